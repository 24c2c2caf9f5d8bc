"""The arguments of one call of `warploom.attention`, its sizes, and whether both are legal.

Tensors are [batch, heads, seq, dim] views, or packed [total, heads, dim] with `cu_seqlens` of their
sequences. Only `check_offsets` reads a tensor's contents.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypedDict

import torch

from warploom.arguments import is_finite, require_boolean
from warploom.errors import ProblemError
from warploom.generator.families._attention import DIMS, GRADIENT_DIMS, UNLIKE_DIMS
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import (
    Declared,
    declared,
    named_spec,
    number,
    option,
    result,
    tensor,
)
from warploom.runtime.elements import NAMES
from warploom.runtime.families._attention import dropout
from warploom.runtime.families._attention.given_blocks import converted
from warploom.runtime.families._attention.modifiers import MODIFIERS
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier
from warploom.runtime.tensors import require_one_device, shown

Alignment = Literal["top_left", "bottom_right"]
Window = tuple[int | None, int | None]


class Keywords(TypedDict, total=False):
    """What a call may be given beside q, k and v (see `warploom.attention`)."""

    causal: bool | Alignment
    window: Window | None
    softcap: float | None
    scale: float | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    out: torch.Tensor | None
    spec: KernelSpec | str | None
    deterministic: bool | None
    backward_spec: KernelSpec | str | None
    sinks: torch.Tensor | None
    block_mask: object
    alibi_slopes: torch.Tensor | None
    bias: torch.Tensor | None
    mask: torch.Tensor | None
    dropout_p: float
    dropout_state: torch.Tensor | None


def _alignment(causal: Any) -> Any:  # noqa: ANN401 (or what the call refuses)
    """The name of an alignment, as operators take it: "equal" is that of True."""
    return "equal" if causal is True else None if causal is False else causal


def _causal(alignment: str | None) -> Any:  # noqa: ANN401
    return alignment == "equal" if alignment in (None, "equal") else alignment


def _further(default: None = None) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare a tensor beside q, k and v: graphs that were exported before it do without."""
    return tensor(default=default, schema="Tensor?=None", grad=True)


@declared
class Arguments(Declared):
    """The arguments of one call of `warploom.attention`, which says what they mean."""

    function = "warploom.attention"
    nested = ", or packed sequences (cu_seqlens_q, cu_seqlens_k)"
    gradients = "; for gradients, use torch.autograd"

    q: torch.Tensor = tensor()
    k: torch.Tensor = tensor()
    v: torch.Tensor = tensor()
    causal: bool | Alignment = option(
        default=False, schema="str?", encode=_alignment, decode=_causal
    )
    window: Window | None = option(default=None, schema="SymInt? left, SymInt? right")
    softcap: float | None = number(default=None)
    scale: float | None = number(default=None, planned=False)
    cu_seqlens_q: torch.Tensor | None = tensor(default=None, aligned=False)
    cu_seqlens_k: torch.Tensor | None = tensor(default=None, aligned=False)
    max_seqlen_q: int | None = option(default=None, schema="SymInt?")
    max_seqlen_k: int | None = option(default=None, schema="SymInt?")
    out: torch.Tensor | None = result(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)
    deterministic: bool | None = option(default=None, schema="bool?", planned=False)
    backward_spec: KernelSpec | str | None = named_spec(default=None, planned=False)
    sinks: torch.Tensor | None = _further()
    block_mask: Any = option(default=None, schema="", planned=False)
    alibi_slopes: torch.Tensor | None = _further()
    bias: torch.Tensor | None = _further()
    mask: torch.Tensor | None = _further()
    dropout_p: float = option(
        default=0.0,
        schema="float?=None",
        planned=False,
        encode=lambda probability: probability or None,
        decode=lambda probability: probability or 0.0,
    )
    dropout_state: torch.Tensor | None = _further()

    def __post_init__(self) -> None:
        """A softcap of 0 is none, as FlashAttention has it; a state that lacks is drawn."""
        if self.block_mask is not None:  # torch's becomes a BlockMask
            self.block_mask = converted(self.block_mask)
        if isinstance(self.window, list):
            self.window = tuple(self.window)
        softcap = self.softcap  # None in most calls, which ask no more
        if softcap is not None and isinstance(softcap, Real) and softcap == 0:
            self.softcap = None
        if self.deterministic is not None and type(self.deterministic) is not bool:
            require_boolean("deterministic", self.deterministic, optional=True)
        if type(self.dropout_p) is not float or self.dropout_p != 0:
            self.dropout_p, self.dropout_state = dropout.settled(
                self.dropout_p, self.dropout_state, self.q
            )
        if not self.dropout_p:
            self.dropout_state = None

    def named(self) -> list[tuple[str, torch.Tensor | None]]:
        """The tensors of the call, by the names that messages have for them."""
        places = None if self.block_mask is None else self.block_mask.places
        return [*Declared.named(self), ("block_mask", places)]

    def check_elements(self) -> None:
        """Raise ProblemError for types of q, k and v that no kernel has, or several devices."""
        q, k, v = self.q, self.k, self.v
        if not q.dtype == k.dtype == v.dtype or NAMES.get(q.dtype) not in ("fp16", "bf16"):
            raise ProblemError(
                f"q {q.dtype}, k {k.dtype}, v {v.dtype}",
                rule="must have one type, fp16 or bf16",
                fix="convert with .to(torch.bfloat16)"
                if q.dtype.itemsize > 1
                else "give operands of 8 bits with q_descale, k_descale and v_descale",
            )
        require_one_device((("q", q), ("k", k), ("v", v)))

    @property
    def result_dtype(self) -> torch.dtype:
        """The type of the output."""
        return self.q.dtype

    @property
    def values_shape(self) -> torch.Size:
        """The shape of v by keys and dim."""
        return self.v.shape

    @property
    def further(self) -> dict[str, torch.Tensor]:
        """The tensors that results depend on beside q, k and v, as launches take them."""
        values = [(name, getattr(self, name)) for name in self.declaration.graded]
        return {name: value for name, value in values if value is not None}

    @property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The options of the call that change scores, weights or their sums, with their values."""
        kinds = [kind for kind in MODIFIERS if getattr(self, kind.argument) is not None]
        return tuple([modifier for kind in kinds if (modifier := kind.of(self)) is not None])

    @property
    def modifier_fields(self) -> Fields:
        """The fields of the operation that its modifiers decide."""
        return {name: value for one in self.modifiers for name, value in one.fields(self).items()}

    def gradient_fields(self, wanted: tuple[str, ...]) -> Fields:
        """The same of the operation of its gradients, of `wanted` tensors' too."""
        fields = self.modifier_fields
        for one in self.modifiers:
            fields = one.gradient_fields(fields, wanted)
        return fields

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the numbers that kernels of both passes are told."""
        softcap, keep = ("softcap",) * (self.softcap is not None), ("keep",) * bool(self.dropout_p)
        return ("scale", *softcap, *keep)

    def told(self, scale: float) -> tuple[float, ...]:
        """These numbers, with a scale where the call has none."""
        found: tuple[float, ...] = (scale if self.scale is None else self.scale,)
        if self.softcap is not None:
            found += (self.softcap,)
        return (*found, dropout.keep_of(self.dropout_p)) if self.dropout_p else found

    @property
    def repeats(self) -> bool:
        """Not with a mask of blocks, whose lists no argument has."""
        return self.spec is None and self.block_mask is None

    @property
    def scaling(self) -> float:
        """The factor of the products before the softmax."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def offsets(self) -> tuple[torch.Tensor, ...]:
        """cu_seqlens of queries and of keys; none where lengths are fixed."""
        queries, keys = self.cu_seqlens_q, self.cu_seqlens_k
        if queries is None and keys is None:
            return ()
        return tuple(tensor for tensor in (queries, keys) if tensor is not None)

    def signature(self) -> tuple[object, ...]:
        """Everything that decides the plan: all but addresses (their alignment counts) and numbers.

        Whether both cu_seqlens are one tensor counts, since causal=True takes equal lengths; what
        is said of the gradients does not.
        """
        queries, keys, mask = self.cu_seqlens_q, self.cu_seqlens_k, self.block_mask
        if queries is None and mask is None and not self.dropout_p:
            return Declared.signature(self)
        shared = queries is not None and keys is not None and queries.data_ptr() == keys.data_ptr()
        kind = None if mask is None else mask.kind
        return (*Declared.signature(self), bool(self.dropout_p), shared, kind)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Declared.require(self)
        dispatch.named(self.backward_spec)
        if self.window is not None and not isinstance(self.window, tuple):
            raise ProblemError(
                f"window {shown(self.window)}",
                rule="must be (left, right): how many keys left and right of the diagonal",
                fix="(128, 0) with causal, (128, 128) without: None is no bound",
            )
        if not isinstance(self.causal, bool | str):
            raise ProblemError(
                f"causal {shown(self.causal)}",
                rule="must be False, True, 'top_left' or 'bottom_right'",
                fix="write one of them",
            )
        for name in ("max_seqlen_q", "max_seqlen_k"):
            longest = getattr(self, name)
            if longest is not None and type(longest) is not int:
                raise ProblemError(
                    f"{name} {shown(longest)}",
                    rule="must be an int, so that no call waits for the GPU to learn it",
                    fix="use int(...)",
                )


def check_numbers(call: Arguments) -> None:
    """Raise ProblemError for a scale or softcap that the softmax cannot be taken with."""
    for name, value in (("scale", call.scale), ("softcap", call.softcap)):
        if value is None:
            continue
        if not (is_finite(value) and value > 0):
            raise ProblemError(
                f"{name} {shown(value)}",
                rule=f"{name} is finite and greater than 0",
                fix="to change the sign of the products, negate q",
            )


# ---- Sizes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Extents:
    """The sizes of a call; packed: `batch` counts sequences, `seq_q` and `seq_k` the longest."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    total_q: int
    total_k: int
    packed: bool
    dim_v: int = field(default=0, kw_only=True)  # of v and of the output; 0: `dim`

    @property
    def sharing(self) -> int:
        """Query heads of one kv head."""
        return self.heads // max(1, self.kv_heads)

    @property
    def empty(self) -> bool:
        """True when no product is left to compute."""
        totals = self.total_q and self.total_k
        return not (self.batch and self.heads and self.seq_q and self.seq_k and totals)

    @property
    def kernel_dims(self) -> tuple[int, int]:
        """The head dimensions of the forward kernel, of q and k, and of v; the latter 0: as many.

        They are the next there are that take the least work; the rest is filled with zeros.
        """
        square = DIMS[bisect_left(DIMS, max(self.dim, self.dim_v))]
        unlike = pair_of(self.dim, self.dim_v, UNLIKE_DIMS) if self.dim_v else None
        return unlike if unlike is not None and sum(unlike) < 2 * square else (square, 0)

    @property
    def has_gradients(self) -> bool:
        """Whether there are kernels of gradients of these head dimensions."""
        if not self.dim_v:
            return True
        pair = pair_of(self.dim, self.dim_v, GRADIENT_DIMS)
        return pair is not None and self.dim_v < self.dim

    def gradient_dims(self) -> tuple[int, int]:
        """The same of the kernel of gradients. Raises ProblemError where none has both."""
        if not self.dim_v:
            return self.kernel_dims
        pair = pair_of(self.dim, self.dim_v, GRADIENT_DIMS)
        if pair is None or not self.has_gradients:
            dims = " or ".join(f"{dim} and {dim_v}" for dim, dim_v in GRADIENT_DIMS)
            raise ProblemError(
                f"gradients of q and k of dim {self.dim} and v of dim {self.dim_v}",
                rule=f"where the dimensions differ, they must be up to {dims}, v's the smaller",
                fix="pad the smaller one with zeros, and pass the scale of the true dimension",
            )
        return pair

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the log-sum-exp: one number for each query and head."""
        lead = (self.heads,) if self.packed else (self.batch, self.heads)
        return (*lead, self.total_q if self.packed else self.seq_q)


def pair_of(dim: int, dim_v: int, pairs: tuple[tuple[int, int], ...]) -> tuple[int, int] | None:
    """The pair of head dimensions with the least work that has room for these; None without."""
    fitting = [pair for pair in pairs if pair[0] >= dim and pair[1] >= dim_v]
    return min(fitting, key=sum, default=None)


def extents(call: Arguments) -> Extents:
    """Return the sizes of a call, or raise ProblemError for tensors that do not go together."""
    call.require()
    q, k, v = call.q, call.k, call.v
    if call.dropout_p:
        dropout.check_state(call.dropout_state, q.device)
    packed = _is_packed(call)
    rank = 3 if packed else 4
    layout = "[total, heads, dim]" if packed else "[batch, heads, seq, dim]"
    if any(t.dim() != rank for t in (q, k, v)):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule=f"each must be {layout}",
            fix="packed tensors come with cu_seqlens and max_seqlen, others without",
        )
    call.check_elements()
    heads_at, seq_at = (1, 0) if packed else (1, 2)
    heads, kv_heads, dim = q.shape[heads_at], k.shape[heads_at], q.shape[-1]
    values = call.values_shape
    dim_v = values[-1]
    if (
        k.shape[:-1] != values[:-1]
        or k.shape[-1] != dim
        or (not packed and k.shape[0] != q.shape[0])
    ):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule="k and v must have one batch, heads and length, and k the batch and dim of q",
            fix=f"give {layout} tensors; to swap heads and seq, use .transpose(1, 2)",
        )
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(
            f"{heads} heads of q over {kv_heads} of k and v",
            rule="the heads of q must be a multiple of those of k and v",
            fix="consecutive heads of q share one of k and v",
        )
    if (dim | dim_v) % 8 or not 8 <= min(dim, dim_v) <= max(dim, dim_v) <= DIMS[-1]:
        raise ProblemError(
            f"dim {dim}" if dim == dim_v else f"dim {dim} of q and k, {dim_v} of v",
            rule=f"a head dimension must be a multiple of 8 up to {DIMS[-1]}",
            fix="pad q, k and v with zeros, and pass the scale of the true dimension",
        )
    total_q, total_k = q.shape[seq_at], k.shape[seq_at]
    batch, seq_q, seq_k = q.shape[0], total_q, total_k
    if packed:
        batch = call.offsets[0].shape[0] - 1
        seq_q, seq_k = min(call.max_seqlen_q or 0, total_q), min(call.max_seqlen_k or 0, total_k)
    sizes = (batch, heads, kv_heads, seq_q, seq_k, dim, total_q, total_k)
    found = Extents(*sizes, packed, dim_v=0 if dim_v == dim else dim_v)
    if further := call.further:
        require_one_device((("q", q), *further.items()))
    if modifiers := call.modifiers:
        scores = (call.max_seqlen_q or 0, call.max_seqlen_k or 0) if packed else (seq_q, seq_k)
        for modifier in modifiers:
            modifier.check(call, (batch, heads, *scores))
    return found


def _is_packed(call: Arguments) -> bool:
    """Whether lengths vary; ProblemError for half of what that takes."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    missing = [name for name in names if getattr(call, name) is None]
    if len(missing) == len(names):
        return False
    if missing:
        raise ProblemError(
            f"packed lengths without {', '.join(missing)}",
            rule=f"packed lengths take {', '.join(names)}",
            fix="the longest lengths are ints, so that no call waits for the GPU to learn them",
        )
    for name, offsets in zip(names, call.offsets, strict=False):
        if (
            offsets.dtype != torch.int32
            or offsets.dim() != 1
            or not offsets.is_contiguous()
            or offsets.shape != call.offsets[0].shape
            or offsets.shape[0] < 1
            or offsets.device != call.q.device
        ):
            raise ProblemError(
                f"{name} {list(offsets.shape)} {offsets.dtype} on {offsets.device}",
                rule="must be int32 [batch + 1], contiguous, on the device of q, of one length",
                fix="a cumulative sum of lengths that begins with 0",
            )
    for name in names[2:]:
        if getattr(call, name) < 0:
            raise ProblemError(
                f"{name} {getattr(call, name)}",
                rule="the longest length must be at least 0",
                fix="pass the largest length of a sequence",
            )
    return True


def check_offsets(call: Arguments) -> None:
    """Raise ProblemError for cu_seqlens of CPU tensors that are none, or too long a sequence.

    Contents are read, which no call on a GPU does.
    """
    longest = (call.max_seqlen_q, call.max_seqlen_k)
    named_offsets = zip(("q", "k"), call.offsets, (call.q, call.k), longest, strict=False)
    for name, offsets, rows_of, most in named_offsets:
        starts, rows = offsets.tolist(), rows_of.shape[0]
        lengths = [after - before for before, after in itertools.pairwise(starts)]
        if starts[0] != 0 or min(lengths, default=0) < 0 or starts[-1] > rows:
            raise ProblemError(
                f"cu_seqlens_{name} {shown(starts)} over {rows} rows",
                rule="must begin with 0, never decrease, and end at no more than the rows",
                fix="a cumulative sum of lengths that begins with 0",
            )
        if most is not None and max(lengths, default=0) > most:
            raise ProblemError(
                f"max_seqlen_{name} {most}",
                rule=f"must be at least the longest sequence, {max(lengths)}",
                fix="pass the largest length of a sequence, or any larger number",
            )
