"""The arguments of one call of `warploom.attention`, and whether they are what they may be.

Nothing here reads a tensor's contents.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Literal, TypedDict

import torch

from warploom.arguments import is_number, require_boolean
from warploom.errors import ProblemError
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
from warploom.runtime.elements import name_of
from warploom.runtime.families._attention import dropout
from warploom.runtime.families._attention.given_blocks import converted
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
        if not q.dtype == k.dtype == v.dtype or name_of(q.dtype, "q") not in ("fp16", "bf16"):
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
        if not (is_number(value) and math.isfinite(value) and value > 0):
            raise ProblemError(
                f"{name} {shown(value)}",
                rule=f"{name} is finite and greater than 0",
                fix="to change the sign of the products, negate q",
            )
