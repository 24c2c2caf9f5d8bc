"""Which schedule a product with weights of few bits gets that nothing was tuned for."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families._product.table import ProductTable
from warploom.generator.families.mixed_gemm.cut import waves
from warploom.generator.families.mixed_gemm.operation import MixedGemmOperation
from warploom.generator.families.mixed_gemm.problem import MixedGemmShape
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSchedule
from warploom.generator.families.table import Feature, Row
from warploom.generator.launches import DeviceLimits


class MixedGemmTable(ProductTable[MixedGemmOperation, MixedGemmSchedule, MixedGemmShape]):
    """Schedules of classes of rows, depth, and bits of activations."""

    kinds = ("bits",)
    advice = "convert the activations, quantise anew, or choose another out_dtype or epilogue"

    def features(self, operation: MixedGemmOperation, shape: MixedGemmShape) -> dict[str, Feature]:
        """The bits of activations, rows and depth."""
        return {"bits": element(operation.a).bits, "m": shape.m, "k": shape.k}

    def order(
        self,
        row: Row,
        schedule: MixedGemmSchedule,
        shape: MixedGemmShape,
        device: DeviceLimits,
        requires: object,
    ) -> tuple[float, ...]:
        """Schedules that must store D directly come after those that need not."""
        busiest = waves(schedule, shape, device)
        return schedule.store != (requires or "tma"), busiest * row["cost"]
