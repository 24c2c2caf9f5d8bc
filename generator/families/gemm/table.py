"""Which schedule a product gets that nothing was tuned for, where no model of its GPU decides.

It is the least waves * cost of its class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import (
    BLOCK,
    GATES,
    GateGradient,
    factors,
    quantizes,
    scatters,
)
from warploom.generator.families._product.table import ProductTable
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.families.table import Feature, Row


class GemmTable(ProductTable[GemmOperation, GemmSchedule, GemmShape]):
    """Schedules of classes of bits, layouts, sums, rows and depth."""

    kinds = ("bits", "block_scales")
    advice = "convert the operands, or choose another out_dtype or epilogue"

    def modelled(self, operation: GemmOperation) -> bool:
        """K-major operands were swept without promotion, and with block scales; of others, and of a
        D whose blocks have scales, of sparse matrices and of groups, the classes know more.
        """
        swept = operation.accumulation == "fast" or operation.block_scales != "none"
        plain = swept and not quantizes(operation.epilogue) and operation.sparse == "none"
        plain = plain and operation.groups == "none" and operation.a != "tf32"
        return plain and (operation.layout_a, operation.layout_b) == ("row", "col")

    def uses_near_records(self, operation: GemmOperation) -> bool:
        """No grouped GEMM does: with each of 44 shapes on an H200 left out of the records in turn,
        near records chose kernels 4 % slower than the best, and the table 0.5 %.
        """
        return operation.groups == "none"

    def timed_as(self, operation: GemmOperation) -> GemmOperation:
        """A gate takes what its GEMM takes; so do block scales of either type, whatever the results
        are: accumulators are scaled alike. Groups of which only some rows count take what those
        take that have as many. A launch that may leave at once is timed where it stays. Rows that
        are scattered take what others take.
        """
        if scatters(operation.epilogue):
            return self.timed_as(replace(operation, epilogue=operation.epilogue[:-1]))
        if operation.spans != "any":
            return self.timed_as(replace(operation, spans="any"))
        if operation.groups == "masked":
            operation = replace(operation, groups="rows")
        if operation.block_scales != "none":
            plain: dict[str, Any] = {"block_scale_a": "fp32", "block_scale_b": "fp32"}
            return replace(operation, a="e4m3", b="e4m3", d="bf16", epilogue=(), **plain)
        steps = operation.epilogue
        gates = [index for index, step in enumerate(steps) if isinstance(step, GATES)]
        before = [step for step in steps[: gates[0]] if not step.auxiliary] if gates else steps
        return replace(operation, epilogue=tuple(before))

    def features(self, operation: GemmOperation, shape: GemmShape) -> dict[str, Feature]:
        """The bits of the operands, their layouts, how sums are kept, the products of pieces, the
        columns of a product that share a scale of D (0: none do), whether the gradient of a gate
        is computed, rows and depth.
        """
        return {
            "bits": element(operation.a).bits,
            "layout_a": operation.layout_a,
            "layout_b": operation.layout_b,
            "accumulation": operation.accumulation,
            "block_scales": operation.block_scales,
            "sparse": operation.sparse,
            "groups": "rows" if operation.by_rows else operation.groups,
            "terms": 3 if operation.whole_b else operation.terms,
            "scaled_columns": _scaled_columns(operation),
            "gate_gradient": any(isinstance(step, GateGradient) for step in operation.epilogue),
            "m": shape.m,
            "k": shape.k,
        }

    def portfolio(self, operation: GemmOperation, shape: GemmShape) -> Iterator[Row]:
        """What the model chooses from; of a row with several `split_k` each is a schedule."""
        for row in super().portfolio(operation, shape):
            many = row.get("split_k", 1)
            yield from ({**row, "split_k": n} for n in many) if isinstance(many, list) else (row,)


def _scaled_columns(operation: GemmOperation) -> int:
    epilogue = operation.epilogue
    return BLOCK * factors(epilogue, 0) if quantizes(epilogue) else 0
