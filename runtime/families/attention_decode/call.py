"""One call of `warploom.attention_decode`: what it asks for, and what is done with it."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.families.attention_decode import DecodeProblem
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.arguments import (
    Arguments,
    declared,
    named_spec,
    number,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.operands import check_out, in_place, ordered_strides
from warploom.runtime.families._attention.problem import Arguments as Plain
from warploom.runtime.families._attention.problem import Window, check_numbers
from warploom.runtime.families.attention_decode import cache, contents, reference
from warploom.runtime.families.attention_decode.extents import Extents, extents
from warploom.runtime.families.attention_decode.operation import operation, problem, shape
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, shown

Pair = tuple[torch.Tensor, torch.Tensor]


def result_like(q: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that lies as a result for q does: as empty_like makes such tensors.

    Of extents of 1, as of one row, that may not be the strides that q has.
    """
    strides = ordered_strides(q)
    return torch.empty_like(torch.empty_strided(q.shape, strides, dtype=q.dtype, device="meta"))


@dataclass(frozen=True, slots=True)
class Details:
    """What a kind of call has in common: its sizes and mask, and where its results go."""

    sizes: Extents
    band: Band
    out_strides: tuple[int, ...]
    scale: float  # where a call gives none
    copies: tuple[str, ...]


@declared
class AttentionDecodeCall(Arguments[Details, Pair]):
    """The arguments of `warploom.attention_decode`, which says what they mean."""

    function = "warploom.attention_decode"
    outputs = ("o", "lse")
    nested = ", or packed queries (cu_seqlens_q) and cache_seqlens"
    gradients = "; for gradients, use warploom.attention with torch.autograd"
    no_gradient = (
        "warploom.attention_decode of tensors that require grad",
        "must be called without: it has no gradient",
        "call it under torch.no_grad(), or warploom.attention, which is differentiable",
    )

    q: torch.Tensor = tensor()
    k: torch.Tensor = tensor()
    v: torch.Tensor = tensor()
    cache_seqlens: torch.Tensor | None = tensor(
        default=None, schema="Tensor? lengths", kernel="lengths"
    )
    cache_leftpad: torch.Tensor | None = tensor(
        default=None, schema="Tensor? starts", kernel="starts"
    )
    page_table: torch.Tensor | None = tensor(default=None)
    causal: bool = option(default=True, schema="bool")
    window: Window | None = option(default=None, schema="SymInt? left, SymInt? right")
    softcap: float | None = number(default=None)
    scale: float | None = number(default=None, planned=False)
    sinks: torch.Tensor | None = tensor(default=None)
    scale_k: torch.Tensor | None = tensor(default=None)
    scale_v: torch.Tensor | None = tensor(default=None)
    cu_seqlens_q: torch.Tensor | None = tensor(default=None)
    cu_seqlens_k: torch.Tensor | None = tensor(default=None)
    max_seqlen_q: int | None = option(default=None, schema="SymInt?")
    max_seqlen_k: int | None = option(default=None, schema="SymInt?")
    batch_invariant: bool = option(default=False, schema="bool")
    out: torch.Tensor | None = result(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    def __post_init__(self) -> None:
        """A softcap of 0 is none, as FlashAttention has it; a list of two bounds is a window."""
        softcap, window = self.softcap, self.window
        if softcap is not None and isinstance(softcap, Real) and softcap == 0:
            self.softcap = None
        if isinstance(window, list):
            self.window = tuple(window)

    @property
    def scaling(self) -> float:
        """The factor of the products before the softmax."""
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale

    @property
    def plain(self) -> Plain:
        """The call as the checks see it that are those of `warploom.attention`."""
        aligned = "bottom_right" if self.causal else False
        plain = Plain(self.q, self.k, self.v, aligned, self.window)  # type: ignore[arg-type]
        for name in ("softcap", "scale", "sinks", "out"):
            setattr(plain, name, getattr(self, name))
        return plain

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        if self.window is not None and not isinstance(self.window, tuple):
            raise ProblemError(
                f"window {shown(self.window)}",
                rule="must be (left, right): how many keys left and right of the diagonal",
                fix="(128, 0) for the last 129 keys: None is no bound",
            )
        fix = "pass a boolean: the diagonal always ends at the last key"
        require_boolean("causal", self.causal, fix=fix)
        require_boolean("batch_invariant", self.batch_invariant)
        for name in ("max_seqlen_q", "max_seqlen_k"):
            longest = getattr(self, name)
            if longest is not None and (type(longest) is not int or longest < 0):
                raise ProblemError(
                    f"{name} {shown(longest)}",
                    rule="must be an int of at least 0, so that no call waits for the GPU to "
                    "learn it",
                    fix="use int(...)",
                )

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel for a GPU."""
        sizes, plain = extents(self), self.plain
        masked = band(plain, sizes)
        check_out(plain)
        check_numbers(plain)
        cache.check_places(self)
        copies = () if in_place(self.q) else ("q",)
        wanted = operation(self, sizes, masked)
        at = shape(sizes, batch_invariant=self.batch_invariant)
        choice = dispatch.choose(wanted, at, spec=self.kernel, device=target)
        details = Details(sizes, masked, result_like(self.q).stride(), sizes.dim**-0.5, copies)
        return Draft(
            choice,
            None if sizes.empty else self._problem(details),
            self.addressed(),
            plain.numbers,
            copies,
            details,
        )

    def _problem(self, details: Details) -> DecodeProblem:
        out = self.out
        if out is None:
            out = torch.empty_strided(self.q.shape, details.out_strides, device="meta")
        return problem(self, details.sizes, details.band, out, details.copies)

    def results(self, details: Details) -> Pair:
        """Out, as it was given or new, and a new lse."""
        q, out = self.q, self.out
        if out is None:
            out = q.new_empty_strided(q.shape, details.out_strides)
        return out, q.new_empty(details.sizes.lse_shape, dtype=torch.float32)

    def fake(self) -> Pair:
        """Both, of a call whose tensors fit each other."""
        q = self.q
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
        out = torch.empty_like(result_like(q), device=q.device)
        return out, q.new_empty(shape, dtype=torch.float32)

    def scalars(self, details: Details) -> tuple[float, ...]:
        """The scale, and a softcap where there is one."""
        return self.plain.told(details.scale)

    def check(self, details: Details, results: Pair) -> None:
        """Raise ProblemError for missing memory, bad numbers or lists, and a shared out."""
        require_memory(self.named())
        check_numbers(self.plain)
        rule = "out does not overlap what is read"
        refuse_overlap(results[0], self.read(), rule)
        if self.q.is_cpu:
            contents.check(self, details.sizes)

    def compute(self, details: Details, results: Pair) -> None:
        """Without a key there are sinks at most to attend to; else this is a call on CPU tensors.

        Of packed queries, rows past the last sequence are nobody's.
        """
        out, lse = results
        sizes = details.sizes
        if sizes.empty:
            out.zero_()
            lse.fill_(-torch.inf)
            for one in self.plain.modifiers:
                one.fill_empty(lse)
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = reference.of_call(self, sizes, details.band, reference.attention)
        last = int(self.cu_seqlens_q[-1]) if self.cu_seqlens_q is not None else sizes.total_q
        rows = (slice(last),) if sizes.packed else ()
        out[rows] = found[0][rows].to(out.dtype)
        lse[..., :last] = found[1][..., :last]
