"""Which schedule a product with weights of few bits gets that nothing was tuned for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import Gate, gate_of
from warploom.generator.families._product.schedule import Store
from warploom.generator.families._product.table import ProductTable
from warploom.generator.families.mixed_gemm.launch import MixedGemmShape, waves
from warploom.generator.families.mixed_gemm.schedule import MixedGemmOperation, MixedGemmSchedule
from warploom.generator.families.table import Feature, Row
from warploom.generator.launches import DeviceLimits

FEW = 128  # rows of A up to which a weight's bytes decide, or the time of a launch


class MixedGemmTable(ProductTable[MixedGemmOperation, MixedGemmSchedule, MixedGemmShape]):
    """Schedules of classes of rows of A, and of n."""

    kinds = ("bits",)
    advice = "convert the activations, quantise anew, or choose another out_dtype or epilogue"

    def uses_near_records(self, operation: MixedGemmOperation) -> bool:
        """None does: at 56 shapes that were sampled on an H200 near tuned configs chose kernels up
        to 1.7 times as slow as the best, where the table chose better ones. Tiles of 8 rows read
        the weights twice at 16 rows, and what fits the SMs at one n does not at another.
        """
        return False

    def timed_as(self, operation: MixedGemmOperation) -> MixedGemmOperation:
        """A gate takes what its GEMM takes; of groups it has schedules that were tuned for it, with
        the numbers that kernels have themselves.
        """
        gate, steps = gate_of(operation.epilogue), operation.epilogue
        if gate is None:
            return operation
        at = steps.index(gate)
        if operation.groups == "none":
            return replace(operation, epilogue=steps[:at])
        own = Gate(gate.function, gate.layout)
        return replace(operation, epilogue=(*steps[:at], own, *steps[at + 1 :]))

    def required(self, operation: MixedGemmOperation, shape: MixedGemmShape) -> Store:
        """Direct stores behind a gate."""
        return "direct" if gate_of(operation.epilogue) else super().required(operation, shape)

    def features(self, operation: MixedGemmOperation, shape: MixedGemmShape) -> dict[str, Feature]:
        """The bits of activations and of D, the format of weights, rows, columns and depth."""
        of = {"b": operation.b, "groups": operation.groups}
        bits = {"bits": ELEMENTS[operation.a].bits, "d_bits": ELEMENTS[operation.d].bits}
        return {**of, **bits, "m": shape.m, "n": shape.n, "k": shape.k}

    def variants(self, fields: dict[str, Any], requires: object) -> Iterable[dict[str, Any]]:
        """Scales where a row has them, or may be; stored as it says, or as tensors allow."""
        ways = [fields] if "store" in fields else super().variants(fields, requires)
        for one in ways:
            yield one
            yield {**one, "scaled": "weights" if one["scaled"] == "sums" else "sums"}

    def order(
        self,
        row: Row,
        schedule: MixedGemmSchedule,
        shape: MixedGemmShape,
        device: DeviceLimits,
        requires: object,
    ) -> tuple[float, ...]:
        """Of few rows the least cost; of many the least work, and direct stores come last.

        Not where the row has them: what was measured stored directly.
        """
        if shape.m <= FEW:
            return (0, row["cost"])
        busiest = waves(schedule, shape, device)
        return schedule.store != row.get("store", requires or "tma"), busiest * row["cost"]

    def reason(
        self, operation: MixedGemmOperation, shape: MixedGemmShape, order: tuple[float, ...]
    ) -> str:
        """Why the table has the schedule that came first."""
        if shape.m <= FEW:
            return "the fastest measured of its class in the table"
        return super().reason(operation, shape, order)
