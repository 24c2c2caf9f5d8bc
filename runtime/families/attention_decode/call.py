"""One call of `warploom.attention_decode`: what it asks for, and what is done with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from warploom.errors import ProblemError
from warploom.generator.families.attention_decode import DecodeProblem
from warploom.generator.launches import DeviceLimits
from warploom.runtime import call as calls
from warploom.runtime import dispatch
from warploom.runtime.call import Draft
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.operands import (
    check_out,
    contiguous_copy,
    in_place,
    ordered_strides,
)
from warploom.runtime.families._attention.problem import check_numbers
from warploom.runtime.families.attention_decode import cache, contents, reference
from warploom.runtime.families.attention_decode.arguments import Arguments
from warploom.runtime.families.attention_decode.extents import Extents, extents
from warploom.runtime.families.attention_decode.operation import operation, problem, shape
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import refuse_dual, require_memory

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


@dataclass(slots=True)
class AttentionDecodeCall(Arguments):
    """The arguments of a call, whose results are out and lse."""

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
            (
                "q",
                "k",
                "v",
                "o",
                "lse",
                *[name for name, one in self.optional() if one is not None],
            ),
            ("scale", "softcap") if self.softcap is not None else ("scale",),
            copies,
            details,
        )

    def _problem(self, details: Details) -> DecodeProblem:
        out = self.out
        if out is None:
            out = torch.empty_strided(self.q.shape, details.out_strides, device="meta")
        return problem(self, details.sizes, details.band, out, details.copies)

    def refuse(self) -> None:
        """Raise ProblemError for tensors that require grad: decoding has no gradient."""
        if not torch.is_grad_enabled():
            return
        tensors = (self.q, self.k, self.v, self.sinks, self.scale_k, self.scale_v, self.out)
        if any(one is not None and one.requires_grad for one in tensors):
            raise ProblemError(
                "warploom.attention_decode of tensors that require grad",
                rule="must be called without: it has no gradient",
                fix="call it under torch.no_grad(), or warploom.attention, which is differentiable",
            )

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        refuse_dual("warploom.attention_decode", (one for _, one in self.named()))

    def results(self, details: Details) -> Pair:
        """Out, as it was given or new, and a new lse."""
        q, out = self.q, self.out
        if out is None:
            out = q.new_empty_strided(q.shape, details.out_strides)
        return out, q.new_empty(details.sizes.lse_shape, dtype=torch.float32)

    def copied(self, details: Details) -> AttentionDecodeCall:
        """The same call, of a copy of queries that kernels cannot read."""
        return replace(self, q=contiguous_copy(self.q)) if details.copies else self

    def arguments(self, details: Details, results: Pair) -> calls.Arguments:
        """The addresses of q, k, v, out, lse and what else is read; the scale, and any softcap."""
        out, lse = results
        addresses: tuple[int, ...] = (
            self.q.data_ptr(),
            self.k.data_ptr(),
            self.v.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            *[one.data_ptr() for _, one in self.optional() if one is not None],
        )
        scale = details.scale if self.scale is None else self.scale
        return addresses, (scale,) if self.softcap is None else (scale, self.softcap)

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
        sizes, sinks = details.sizes, self.sinks
        if sizes.empty:
            out.zero_()
            lse.fill_(-torch.inf)
            if sinks is not None:
                lse.copy_(sinks[:, None].expand(lse.shape))
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            found = reference.of_call(self, sizes, details.band, reference.attention)
        last = int(self.cu_seqlens_q[-1]) if self.cu_seqlens_q is not None else sizes.total_q
        rows = (slice(last),) if sizes.packed else ()
        out[rows] = found[0][rows].to(out.dtype)
        lse[..., :last] = found[1][..., :last]
