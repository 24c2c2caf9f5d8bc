"""Random operands of an attention's backward pass, calls of its kernels, and their check.

What the forward pass returned comes from `warploom.attention`. The check takes it as given: then a
few rows of dq, and a few columns of dk and dv, cost little however long a sequence is, and still
depend on all that a kernel adds up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch

from warploom.generator.families._attention import UNBOUNDED, AttentionShape
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families import family
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.function import Function
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.modifiers import MODIFIERS, Blocks
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families._attention.samples import AttentionData
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients, Tensors
from warploom.runtime.measure import Call, largest_share
from warploom.runtime.trial import sets_for

_CHECKED = 128  # rows of dq, and columns of dk and dv: at the beginning, and at the end
# Errors are independent, so that their root mean square is near 0.6 roundings of that of the
# gradient. The bound of one element grows with the sequence, and a lost tile could hide below it.
_ROUNDINGS = 3.0


@dataclass(frozen=True, slots=True)
class Expected:
    """What is right in one place of the gradients, and how far off each element may be."""

    name: str  # dq, dk or dv
    at: slice
    exact: torch.Tensor
    bound: torch.Tensor


class AttentionBackwardTrial(AttentionData):
    """A backward pass on normal random data, after the forward pass that Warploom chooses."""

    def __init__(
        self, operation: AttentionBackwardOperation, shape: AttentionShape, device: str, seed: int
    ) -> None:
        super().__init__(operation, shape, device, seed)
        self.operation = operation
        one = self._operands()
        tensors = (*one.operands.values(), *(one.into or ()))
        moved = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        more = sets_for(moved, device) - 1
        self.sets = [one, *(self._operands() for _ in range(more))]

    def calls(self, spec: KernelSpec) -> list[Call]:
        """One call of `spec`, with all its launches, for each set of operands."""
        return [
            partial(
                attention_backward, replace(one, forward=replace(one.forward, backward_spec=spec))
            )
            for one in self.sets
        ]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound.

        Held against float64 are the first and last rows of dq and columns of dk and dv, by element
        and by their root mean square. All of the gradients are held for being finite.
        """
        for gradient in self._gradients.values():
            gradient.fill_(math.nan)
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        gradients = self._gradients
        finite = all(gradient.isfinite().all() for gradient in gradients.values())
        worst = 0.0 if finite else math.inf
        for one in self._expected:
            seq = self.shape.seq_q if one.name == "dq" else self.shape.seq_k
            found = self.sequence(gradients[one.name], seq)[:, :, one.at].double()
            error, size = ((t.square().mean().sqrt()) for t in (found - one.exact, one.exact))
            mean = float(error / (self._mean_share * size)) if error else 0.0
            worst = max(worst, mean, largest_share(found, one.exact, one.bound))
        return worst

    @property
    def results(self) -> list[torch.Tensor]:
        """The gradients of the first set."""
        return list(self._gradients.values())

    @property
    def _gradients(self) -> dict[str, torch.Tensor]:
        return dict(zip(("dq", "dk", "dv"), self.sets[0].into or (), strict=True))

    @property
    def _mean_share(self) -> float:
        """What the root mean square of errors may be, of that of the gradient."""
        forward = self.sets[0].forward
        capped = 8 * sum(one.cap_error for one in forward.modifiers)
        return _ROUNDINGS * unit_roundoff(forward.q.dtype) + capped

    @cached_property
    def _expected(self) -> list[Expected]:
        """What is right of one sequence: some rows with all columns, and the other way round."""
        call, seq_q, seq_k = self.sets[0], self.shape.seq_q, self.shape.seq_k
        sizes = extents(call.forward)
        bounds = Band(*band(call.forward, sizes).shifted(sizes))
        whole = self._whole(call)
        found: list[Expected] = []
        for at in _ends(seq_q):
            q, out, lse, dout = (t[:, :, at] for t in (whole.q, whole.out, whole.lse, whole.dout))
            rows = replace(whole, q=q, out=out, lse=lse, dout=dout)
            shown = self._part(slice(-1, None), at, slice(None))
            found += self._following(rows, _shifted(bounds, at.start), shown, at, ("dq",))
        for at in _ends(seq_k):
            columns = replace(whole, k=whole.k[:, :, at], v=whole.v[:, :, at])
            shown = self._part(slice(-1, None), slice(None), at)
            found += self._following(columns, _shifted(bounds, -at.start), shown, at, ("dk", "dv"))
        return found

    def _part(self, batch: slice, rows: slice, columns: slice) -> BlockMask | None:
        mask: BlockMask | None = self.sets[0].forward.block_mask
        return None if mask is None else mask.part(batch, rows, columns)

    def _whole(self, call: BackwardCall) -> Tensors:
        def sequence(tensor: torch.Tensor) -> torch.Tensor:
            return self.sequence(tensor, self.shape.seq_q)

        k, v = (self.sequence(t, self.shape.seq_k) for t in (call.forward.k, call.forward.v))
        out, lse, dout = (sequence(tensor) for tensor in (call.out, call.lse, call.dout))
        return Tensors(sequence(call.forward.q), k, v, out, lse, dout)

    def _following(
        self,
        given: Tensors,
        bounds: Band,
        shown: BlockMask | None,
        at: slice,
        names: tuple[str, ...],
    ) -> list[Expected]:
        forward = self.sets[0].forward
        caps = [one for one in forward.modifiers if one.cap_error]
        blocks = [] if shown is None else [Blocks(shown)]
        function = Function(forward.scaling, bounds, (*caps, *blocks))
        gradients, off = reference.following(given, function)
        return [
            Expected(name, at, exact, bound)
            for name, exact, bound in zip(("dq", "dk", "dv"), gradients, off, strict=True)
            if name in names
        ]

    def _operands(self) -> BackwardCall:
        q, k, v, dout = self.queries(), self.keys(), self.values(), self.outputs()
        told = {**self.keywords, **self.lengths()}
        with torch.no_grad():
            attention: Any = family("attention_forward").function
            out, lse = attention(q, k, v, return_lse=True, **told)
        forward = Arguments(q, k, v, **told, deterministic=self.operation.deterministic)
        into: Gradients = (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
        return prepared(BackwardCall(forward, out, lse, dout, None, into), self.operation)


def prepared(call: BackwardCall, operation: AttentionBackwardOperation) -> BackwardCall:
    """The same call, with room for the further gradients that its operation has."""
    call.prepare(tuple(kind.argument for kind in MODIFIERS if kind.is_differentiated(operation)))
    return call


def _ends(seq: int) -> list[slice]:
    """The first and the last of a sequence; all of a short one."""
    if seq <= 2 * _CHECKED:
        return [slice(0, seq)]
    return [slice(0, _CHECKED), slice(seq - _CHECKED, seq)]


def _shifted(bounds: Band, rows: int) -> Band:
    """The mask of what begins so many rows later (or, negative, columns)."""
    left = bounds.left - rows if bounds.left < UNBOUNDED else UNBOUNDED
    right = bounds.right + rows if bounds.right < UNBOUNDED else UNBOUNDED
    return Band(left, right)
