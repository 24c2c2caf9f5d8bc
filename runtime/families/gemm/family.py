"""The family of GEMMs, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.runtime.baselines import Baseline
from warploom.runtime.call import Call
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families.gemm import api
from warploom.runtime.families.gemm.baselines import baselines
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.plan import GemmPlan
from warploom.runtime.families.gemm.samples import GemmData
from warploom.runtime.families.gemm.trial import GemmTrial
from warploom.runtime.family import RuntimeFamily
from warploom.runtime.plan import make


class GemmRuntime(RuntimeFamily[GemmOperation, GemmShape]):
    """Calls of `warploom.gemm`."""

    function = staticmethod(api.gemm)
    operands = 2
    unnamed = True

    def trial(
        self, operation: GemmOperation, shape: GemmShape, device: str, seed: int
    ) -> GemmTrial:
        """Random operands of a product: see trial.py."""
        return GemmTrial(operation, shape, device, seed)

    def calls(self, operation: GemmOperation, shape: GemmShape) -> list[Call[Any, Any]]:
        """Calls on dense operands: two where a vector of scales has one element.

        `warploom.gemm` takes that of a keyword for a number, that of an `epilogue` for a vector.
        """
        one = GemmData(operation, shape, "meta", 0).operands()
        keywords = {"scale_row": "scale_a", "scale_column": "scale_b"}
        by_keywords = tuple((keywords.get(item[0], item[0]), *item[1:]) for item in one.listed)
        ways = {
            tuple(step_of(item).reads(item) for item in listed): listed
            for listed in (by_keywords, one.listed)
        }
        given = (None, TORCH[operation.d], operation.accumulation)
        return [GemmCall(one.a, one.b, listed, *given) for listed in ways.values()]

    def call(self, *operands: Any, **keywords: Any) -> GemmCall:
        """A product."""
        return api.asked(*operands, **keywords)

    def plan(self, call: Call[Any, Any]) -> GemmPlan:
        """The plan of a product."""
        return make(call, GemmPlan)

    def rehearse(self) -> None:
        """Multiply on the CPU."""
        one = torch.ones(1, 1, 8, 64, dtype=torch.bfloat16)
        api.gemm(one, one.mT)

    def baselines(self, operation: GemmOperation, trial: GemmTrial) -> list[Baseline]:
        """cuBLAS, by torch: see baselines.py."""
        return baselines(operation, trial.sets)


FAMILY = GemmRuntime()
