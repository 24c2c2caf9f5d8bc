"""The arguments of one call of `warploom.attention_decode`, and whether they are of their types."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TypedDict

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.families._attention.problem import Arguments as Plain
from warploom.runtime.families._attention.problem import Window
from warploom.runtime.tensors import Named, require_tensors, shown


class Keywords(TypedDict, total=False):
    """What a call may be given beside q, k and v (see `warploom.attention_decode`)."""

    lengths: torch.Tensor | None
    starts: torch.Tensor | None
    page_table: torch.Tensor | None
    causal: bool
    window: Window | None
    softcap: float | None
    scale: float | None
    sinks: torch.Tensor | None
    scale_k: torch.Tensor | None
    scale_v: torch.Tensor | None
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    batch_invariant: bool
    out: torch.Tensor | None
    spec: KernelSpec | str | None


@dataclass(slots=True)
class Arguments:
    """The arguments of one call of `warploom.attention_decode`, which says what they mean."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    lengths: torch.Tensor | None = None
    starts: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    causal: bool = True
    window: Window | None = None
    softcap: float | None = None
    scale: float | None = None
    sinks: torch.Tensor | None = None
    scale_k: torch.Tensor | None = None
    scale_v: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    batch_invariant: bool = False
    out: torch.Tensor | None = None
    spec: KernelSpec | str | None = None

    def __post_init__(self) -> None:
        """A softcap of 0 is none, as FlashAttention has it."""
        softcap = self.softcap  # None in most calls, which ask no more
        if softcap is not None and isinstance(softcap, Real) and softcap == 0:
            self.softcap = None

    def optional(self) -> list[tuple[str, torch.Tensor | None]]:
        """The tensors that are read beside q, k and v, by name; None where one is left out."""
        return [
            ("lengths", self.lengths),
            ("starts", self.starts),
            ("page_table", self.page_table),
            ("sinks", self.sinks),
            ("scale_k", self.scale_k),
            ("scale_v", self.scale_v),
            ("cu_seqlens_q", self.cu_seqlens_q),
            ("cu_seqlens_k", self.cu_seqlens_k),
        ]

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that is read, by the name that messages have for it."""
        given = [(name, one) for name, one in self.optional() if one is not None]
        return [("q", self.q), ("k", self.k), ("v", self.v), *given]

    def named(self) -> list[tuple[str, object]]:
        """The tensors of the call, by the names that messages have for them."""
        return [("q", self.q), ("k", self.k), ("v", self.v), *self.optional(), ("out", self.out)]

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.q.get_device()

    @property
    def kernel(self) -> KernelSpec | None:
        """The spec that was asked for, by itself or by name."""
        return dispatch.named(self.spec)

    @property
    def scaling(self) -> float:
        """The factor of the products before the softmax."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def plain(self) -> Plain:
        """The call as the checks see it that are those of `warploom.attention`."""
        aligned = "bottom_right" if self.causal else False
        plain = Plain(self.q, self.k, self.v, aligned, self.window)  # type: ignore[arg-type]
        plain.softcap, plain.scale, plain.out = self.softcap, self.scale, self.out
        return plain

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        require_kinds(self)

    def signature(self) -> tuple[object, ...]:
        """What decides the plan: all but numbers, and addresses but for their alignment."""
        window = self.window
        return (
            Arguments,
            *[
                None
                if one is None
                else (
                    one.shape,
                    one.stride(),
                    one.dtype,
                    one.data_ptr() & 15,
                    one.get_device(),
                    one.is_neg(),
                )
                for one in (
                    self.q,
                    self.k,
                    self.v,
                    self.lengths,
                    self.starts,
                    self.page_table,
                    self.sinks,
                    self.scale_k,
                    self.scale_v,
                    self.cu_seqlens_q,
                    self.cu_seqlens_k,
                    self.out,
                )
            ],
            self.causal,
            None if window is None else tuple(window),
            self.softcap is None,
            self.max_seqlen_q,
            self.max_seqlen_k,
            self.batch_invariant,
            self.spec,
        )


def require_kinds(call: Arguments) -> None:
    """Raise ProblemError for arguments that are of no type that they may have."""
    require_tensors(
        "warploom.attention_decode",
        call.named(),
        ("q", "k", "v"),
        nested=", or packed queries (cu_seqlens_q) and lengths",
        gradients="; for gradients, use warploom.attention with torch.autograd",
    )
    dispatch.named(call.spec)
    if call.window is not None and not isinstance(call.window, tuple | list):
        raise ProblemError(
            f"window {shown(call.window)}",
            rule="must be (left, right): how many keys beside the diagonal",
            fix="(128, 0) for the last 129 keys: None is no bound",
        )
    fix = "pass a boolean: the diagonal always ends at the last key"
    require_boolean("causal", call.causal, fix=fix)
    require_boolean("batch_invariant", call.batch_invariant)
    for name in ("max_seqlen_q", "max_seqlen_k"):
        longest = getattr(call, name)
        if longest is not None and (type(longest) is not int or longest < 0):
            raise ProblemError(
                f"{name} {shown(longest)}",
                rule="must be an int of at least 0, so that no call waits for the GPU to learn it",
                fix="use int(...)",
            )
