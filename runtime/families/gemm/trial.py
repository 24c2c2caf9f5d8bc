"""Calls of a GEMM's kernels on random operands, and their check against float64."""

from __future__ import annotations

from functools import cached_property, partial

import torch

from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import api, reference
from warploom.runtime.families.gemm.samples import GemmData
from warploom.runtime.measure import Call, largest_share
from warploom.runtime.trial import sets_for, wrong


class GemmTrial(GemmData):
    """A GEMM on random data."""

    def __init__(self, operation: GemmOperation, shape: GemmShape, device: str, seed: int) -> None:
        super().__init__(operation, shape, device, seed)
        one = self.operands()
        moved = sum(t.numel() * t.element_size() for t in (one.a, one.b, one.out))
        more = sets_for(moved, device) - 1
        self.sets = [one, *(self.operands() for _ in range(more))]

    def calls(self, spec: KernelSpec) -> list[Call]:
        """One call of `spec` for each set of operands."""
        return [
            partial(
                api.gemm,
                one.a,
                one.b,
                out=one.out,
                epilogue=one.listed,
                accumulation=self.operation.accumulation,
                spec=spec,
            )
            for one in self.sets
        ]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        self.sets[0].out.copy_(wrong(self.sets[0].out))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        exact, bound = self._expected
        return largest_share(self.sets[0].out.reshape(exact.shape), exact, bound)

    @property
    def results(self) -> list[torch.Tensor]:
        """D of the first set."""
        return [self.sets[0].out]

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.sets[0]
        return reference.gemm_bound(
            one.a, one.b, one.listed, one.out.dtype, self.operation.accumulation
        )
