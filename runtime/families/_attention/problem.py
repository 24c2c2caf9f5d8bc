"""The arguments of one call of `warploom.attention`, and whether they are what they may be.

Nothing here reads a tensor's contents.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, TypedDict

import torch

from warploom.arguments import is_number, require_boolean
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.families._attention import dropout
from warploom.runtime.families._attention.given_blocks import converted
from warploom.runtime.tensors import Named, require_tensors, shown

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


@dataclass(slots=True)
class Arguments:
    """The arguments of one call of `warploom.attention`, which says what they mean."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool | Alignment = False
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    out: torch.Tensor | None = None
    spec: KernelSpec | str | None = None
    deterministic: bool | None = None
    backward_spec: KernelSpec | str | None = None
    sinks: torch.Tensor | None = None
    block_mask: Any = None  # a BlockMask, or torch's, which becomes one
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_state: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """A softcap of 0 is none, as FlashAttention has it; a state that lacks is drawn."""
        if self.block_mask is not None:
            self.block_mask = converted(self.block_mask)
        softcap = self.softcap  # None in most calls, which ask no more
        if softcap is not None and isinstance(softcap, Real) and softcap == 0:
            self.softcap = None
        if self.deterministic is not None and type(self.deterministic) is not bool:
            require_boolean("deterministic", self.deterministic, optional=True)
        if type(self.dropout_p) is not float or self.dropout_p != 0:
            self.dropout_p, self.dropout_state = dropout.settled(
                self.dropout_p, self.dropout_state, self.q
            )

    def named(self) -> list[tuple[str, object]]:
        """The tensors of the call, by the names that messages have for them."""
        return [
            ("q", self.q),
            ("k", self.k),
            ("v", self.v),
            ("out", self.out),
            ("cu_seqlens_q", self.cu_seqlens_q),
            ("cu_seqlens_k", self.cu_seqlens_k),
            *self.further.items(),
            ("block_mask", None if self.block_mask is None else self.block_mask.places),
        ]

    @property
    def further(self) -> dict[str, torch.Tensor]:
        """The tensors that results depend on beside q, k and v, as launches take them."""
        names = ("sinks", "alibi_slopes", "bias", "mask", "dropout_state")
        state = self.dropout_state if self.dropout_p else None
        given = (self.sinks, self.alibi_slopes, self.bias, self.mask, state)
        named = zip(names, given, strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

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
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.q.get_device()

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        require_kinds(self)

    @property
    def kernel(self) -> KernelSpec | None:
        """The spec that was asked for, by itself or by name."""
        return dispatch.named(self.spec)

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
        q, k, v, out = self.q, self.k, self.v, self.out
        return (
            Arguments,
            q.shape,
            q.stride(),
            q.dtype,
            q.data_ptr() & 15,
            q.get_device(),
            q.is_neg(),
            k.shape,
            k.stride(),
            k.dtype,
            k.data_ptr() & 15,
            k.get_device(),
            k.is_neg(),
            v.shape,
            v.stride(),
            v.dtype,
            v.data_ptr() & 15,
            v.get_device(),
            v.is_neg(),
            self.causal,
            None if self.window is None else tuple(self.window),
            self.softcap is None,
            None
            if self.cu_seqlens_q is None
            and self.cu_seqlens_k is None
            and self.max_seqlen_q is None
            and self.max_seqlen_k is None
            else self._lengths,
            None
            if out is None
            else (
                out.shape,
                out.stride(),
                out.dtype,
                out.data_ptr() & 15,
                out.get_device(),
                out.is_neg(),
            ),
            self.spec,
            self._further if self._changed else None,
            None if self.block_mask is None else self.block_mask.kind,
        )

    @property
    def _changed(self) -> bool:
        given = self.sinks, self.alibi_slopes, self.bias, self.mask
        return bool(self.dropout_p) or any(one is not None for one in given)

    @property
    def _lengths(self) -> object:
        """What of packed lengths decides the plan."""
        longest = (self.max_seqlen_q, self.max_seqlen_k)
        offsets = self.offsets
        one = len(offsets) == 2 and offsets[0].data_ptr() == offsets[1].data_ptr()
        described = tuple(
            (t.shape, t.stride(), t.dtype, t.get_device(), t.is_neg()) for t in offsets
        )
        return described, one, longest

    @property
    def _further(self) -> object:
        """What of further tensors decides the plan, and that of the gradients."""
        return tuple(
            (
                name,
                t.shape,
                t.stride(),
                t.dtype,
                t.data_ptr() & 15,
                t.get_device(),
                t.is_neg(),
                t.requires_grad,
            )
            for name, t in self.further.items()
        )


def require_kinds(call: Arguments) -> None:
    """Raise ProblemError for arguments that are of no type that they may have."""
    require_tensors(
        "warploom.attention",
        call.named(),
        ("q", "k", "v"),
        nested=", or packed sequences (cu_seqlens_q, cu_seqlens_k)",
        gradients="; for gradients, use torch.autograd",
    )
    dispatch.named(call.spec)
    dispatch.named(call.backward_spec)
    if call.window is not None and not isinstance(call.window, tuple | list):
        raise ProblemError(
            f"window {shown(call.window)}",
            rule="must be (left, right): how many columns beside the diagonal",
            fix="(128, 0) with causal, (128, 128) without: None is no bound",
        )
    if not isinstance(call.causal, bool | str):
        raise ProblemError(
            f"causal {shown(call.causal)}",
            rule="must be False, True, 'top_left' or 'bottom_right'",
            fix="write one of them",
        )
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = getattr(call, name)
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
