"""The masks of transformers, told by bounds where bounds say all of it.

transformers describes a mask by a function of indices, composed of its own building blocks. `mask`
recognises those that a band and lengths of sequences express: causal and bidirectional attention,
sliding windows, padding at either side, packed sequences, caches that are longer than what is
filled. Whatever it does not recognise is left to the mask of transformers' own "sdpa".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from warploom.integrations import transformers_steps as steps
from warploom.integrations import unpacked
from warploom.integrations.bounds import Bounds, Extents, Pattern, bounds
from warploom.integrations.transformers_interface import mask_kind

NAME = "warploom"  # the attn_implementation whose masks these are
MaskFunction = Callable[..., Any]


_NEVER_NONE = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


class BoundedMask:
    """A mask that is known by its bounds, and made into a tensor for whoever looks at it as one.

    Models hand masks on as they are. One that computes with its mask gets, by what torch offers to
    what is not a tensor, that of transformers' "sdpa" [batch, 1, rows, keys], bool.
    """

    ndim = 4

    def __init__(self, bounds: Bounds, shape: tuple[int, ...], arguments: dict[str, Any]) -> None:
        self.bounds = bounds
        self.shape = torch.Size(shape)
        self._arguments = arguments  # of transformers' mask
        self._tensor: torch.Tensor | None = None

    def tensor(self) -> torch.Tensor:
        """The mask as a tensor: True where a row attends to a key."""
        if self._tensor is None:
            self._tensor = _tensor(self._arguments | self._first_row())
        assert self._tensor is not None  # noqa: S101, by the flags in its arguments
        return self._tensor

    def _first_row(self) -> dict[str, Any]:
        """Where the rows of a step begin: by its lengths, since the cache has gone on meanwhile."""
        if self.bounds.lengths is None:
            return {}
        rows, first_key = self.shape[2], self._arguments["kv_offset"]
        return {"q_offset": self.bounds.lengths[0] - rows + first_key}

    def contiguous(self) -> BoundedMask:
        """The same: there is no memory to order."""
        return self

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> torch.Tensor:  # noqa: ANN401
        return self.tensor()[index]

    def __invert__(self) -> torch.Tensor:
        return ~self.tensor()

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        arguments: tuple[Any, ...] = (),
        keywords: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Apply a function of torch to the tensor that the mask stands for."""
        return function(*_as_tensors(arguments), **_as_tensors(keywords or {}))


def _operator(name: str) -> Callable[..., Any]:
    """An operator of Python, by the name of its method, on the tensor that a mask stands for."""

    def applied(mask: BoundedMask, *operands: Any) -> Any:  # noqa: ANN401
        return getattr(mask.tensor(), name)(*_as_tensors(operands))

    return applied


# Python looks operators up in the class. Without these `mask == 0` would compare objects, and be
# False, and numbers could neither be compared nor multiplied with a mask.
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "mul", "rmul", "len"):
    setattr(BoundedMask, f"__{_name}__", _operator(f"__{_name}__"))


def _as_tensors(value: Any) -> Any:  # noqa: ANN401
    if isinstance(value, BoundedMask):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(_as_tensors(item) for item in value)
    if isinstance(value, dict):
        return {name: _as_tensors(item) for name, item in value.items()}
    return value


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: torch.Tensor | BoundedMask | None = None,
    **keywords: Any,
) -> torch.Tensor | BoundedMask | None:
    """Return the mask of an attention, as `AttentionMaskInterface` asks for it.

    None is what it is for transformers' "sdpa": plain causal attention of a module that is causal,
    from the first key on, or attention to everything. Bounds of a padded batch are read from its
    mask, which waits for the GPU once in a forward pass, as transformers' "sdpa" does.

    Raises ProblemError for the configuration of a model that does not use AttentionInterface.
    """
    kind = mask_kind(keywords.get("config"), NAME)
    if isinstance(attention_mask, BoundedMask):  # made ahead, by `generate`
        return attention_mask
    if unpacked.marks(attention_mask, batch_size):
        attention_mask = None
    if attention_mask is not None and attention_mask.shape[0] > batch_size:
        # Musicgen's has a row for each codebook; transformers reads the first of them.
        attention_mask = attention_mask[:batch_size]
    arguments: dict[str, Any] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        **keywords,
        **(_NEVER_NONE if kind == "not none" else {}),
    }
    if kind == "eager":
        added: torch.Tensor = masking_utils.eager_mask(
            **arguments | {"allow_is_bidirectional_skip": False}
        )
        return added
    if _is_step(q_length, q_offset, keywords):
        step = _step(arguments)
        return _tensor(arguments) if step is None else step
    if is_tracing(attention_mask):
        plain = _causal_from_start(mask_function, attention_mask, kv_offset, arguments)
        return None if plain and q_length == kv_length else _tensor(arguments)
    pattern = None if q_length == 1 else recognised(mask_function)
    if pattern is None or not (pattern.packed is not None or _may_skip(keywords)):
        return _tensor(arguments)
    # A cache's own tensor, which the cache changes before the mask may become a tensor.
    arguments["q_offset"] = int(q_offset)
    extents = Extents(batch_size, q_length, kv_length, int(q_offset), kv_offset)
    found = bounds(pattern, extents, attention_mask, torch.device(keywords.get("device", "cpu")))
    if found is None:
        return _tensor(arguments)
    if _is_plain(found, q_length, kv_length) and kind == "any":
        return None
    arguments |= _NEVER_NONE
    return BoundedMask(found, (batch_size, 1, q_length, kv_length), arguments)


def _tensor(arguments: dict[str, Any]) -> torch.Tensor | None:
    """The mask of transformers' "sdpa", which is None where its kernels need none."""
    made: torch.Tensor | None = masking_utils.sdpa_mask(**arguments)
    return made


def _is_step(q_length: int, q_offset: int | torch.Tensor, keywords: dict[str, Any]) -> bool:
    """Whether one row attends to a cache of a fixed size: for these, masks may not be skipped."""
    fixed = isinstance(q_offset, torch.Tensor) or not _may_skip(keywords)
    return q_length == 1 and fixed


def _step(arguments: dict[str, Any]) -> BoundedMask | None:
    """The mask of a step that kernels are expected to compute, told by lengths; else None."""
    padding, device = arguments["attention_mask"], torch.device(arguments.get("device", "cpu"))
    if padding is not None and is_tracing(padding):
        return None
    if not steps.expected(arguments.get("config"), arguments.get("dtype"), device):
        return None
    batch, rows, keys = (arguments[name] for name in ("batch_size", "q_length", "kv_length"))
    offsets = arguments["q_offset"], arguments["kv_offset"]
    pattern = recognised(arguments["mask_function"])
    found = steps.bounds(pattern, batch, rows, keys, offsets, padding, device)
    return None if found is None else BoundedMask(found, (batch, 1, rows, keys), arguments)


def _may_skip(keywords: dict[str, Any]) -> bool:
    """Whether the caller takes a mask that is no tensor."""
    causal: bool = keywords.get("allow_is_causal_skip", True)
    bidirectional: bool = keywords.get("allow_is_bidirectional_skip", False)
    return causal or bidirectional


def _causal_from_start(
    mask_function: MaskFunction,
    attention_mask: torch.Tensor | None,
    kv_offset: int,
    keywords: dict[str, Any],
) -> bool:
    """Whether the mask of as many rows as keys is plain causal, told without values of tensors.

    Every row's own key is among the keys: where these begin at 0, so do the rows, whose offset may
    be a tensor.
    """
    return (
        mask_function is masking_utils.causal_mask_function
        and keywords.get("allow_is_causal_skip", True)
        and attention_mask is None
        and isinstance(kv_offset, int)
        and kv_offset == 0
    )


def _is_plain(found: Bounds, rows: int, keys: int) -> bool:
    """Whether None says the same: causal from the first key on, or attention to every key."""
    return found == Bounds(keys=rows if found.causal else keys, causal=found.causal)


# ---- What a mask function is composed of ---------------------------------------------------------


_BOTH = masking_utils.and_masks(masking_utils.causal_mask_function).__code__
_LEFT = masking_utils.sliding_window_overlay(1).__code__
_AROUND = masking_utils.sliding_window_bidirectional_overlay(1).__code__
_CHUNK = masking_utils.chunked_overlay(1, torch.zeros(1)).__code__
_PACKED = masking_utils.packed_sequence_mask_function(torch.zeros(1, 1)).__code__
# Newer versions of transformers compare positions in each sequence. Rows of a packed sequence
# follow each other, so distances are the same.
_remap = getattr(masking_utils, "remap_positions_for_packed_sequence", None)
_POSITIONS = (
    None
    if _remap is None
    else _remap(masking_utils.causal_mask_function, torch.zeros(1, 1)).__code__
)


def recognised(function: MaskFunction) -> Pattern | None:
    """Return what a mask function of transformers says, or None for any other function.

    A function is what the code of one of transformers' own is; its variables say the rest.
    """
    causal, window, left, chunk, packed = False, None, False, None, None
    for code, variables in _factors(function):
        if code is masking_utils.causal_mask_function.__code__:
            causal = True
        elif code is _LEFT and window is None:
            window, left = variables["sliding_window"] - 1, True
        elif code is _AROUND and window is None:
            window = variables["sliding_window"]
        elif code is _CHUNK and chunk is None:
            chunk = variables["chunk_size"]
        elif code is _PACKED and packed is None:
            packed = variables["packed_sequence_mask"]
        elif code is not masking_utils.bidirectional_mask_function.__code__:
            return None
    if left and not causal:  # a bound on one side alone
        return None
    return Pattern(causal, window, chunk, packed)


def _factors(function: MaskFunction) -> Iterator[tuple[object, dict[str, Any]]]:
    """Take a conjunction apart: the code of each factor and the variables that it closes over."""
    code = getattr(function, "__code__", None)
    cells = getattr(function, "__closure__", None) or ()
    variables = {} if code is None else dict(zip(code.co_freevars, cells, strict=True))
    variables = {name: cell.cell_contents for name, cell in variables.items()}
    if code is _BOTH:
        for factor in variables["mask_functions"]:
            yield from _factors(factor)
    elif code is _POSITIONS and code is not None:
        yield from _factors(variables["mask_function"])
    else:
        yield code, variables
