"""Values in 8 bits with scales of tensors, rows or blocks; of a matrix and of its transpose."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import activation_class, derivative_class, function_parts
from warploom.generator.families.base import Family
from warploom.generator.families.cast import launch
from warploom.generator.families.cast.schedule import (
    COLUMNS,
    CastLayout,
    CastOperation,
    CastProblem,
    CastSchedule,
    CastShape,
    CastSpec,
)

__all__ = ["FAMILY", "CastOperation", "CastProblem", "CastSchedule", "CastShape"]


class Cast(Family[CastOperation, CastSchedule, CastShape, CastProblem]):
    """Quantization."""

    def layout(self, spec: CastSpec) -> CastLayout:
        """The shared memory of tiles."""
        return CastLayout(spec.operation)

    def context(self, spec: CastSpec) -> dict[str, Any]:
        """The element of x, the sizes that the schedule does not say, and the parts of a gate."""
        gate = spec.operation.gate
        return {
            "parts": _parts(spec.operation),
            "largest": {"e4m3": "448.f", "e5m2": "57344.f", "int8": "127.f"}[spec.operation.q],
            "gate_parts": ()
            if gate == "none"
            else function_parts(gate, gradient=spec.operation.gradient),
            "gate_class": "" if gate == "none" else activation_class(gate),
            "slope_class": "" if gate == "none" else derivative_class(gate),
            "x": element(spec.operation.x),
            "values": spec.operation.values,
            "columns": COLUMNS,
            "amax_vectors": launch.AMAX_VALUES // spec.operation.values,
        }


def _parts(operation: CastOperation) -> list[str]:
    """Return the files of a tile's options, in the order in which hooks include them."""
    own = operation.transposes_scales
    options = {
        "offsets": operation.offsets,
        "transpose": operation.transpose,
        "factors": operation.reads_factors,
        "row_scales": own and not operation.reads_factors and not operation.static,
        "given_scales": own and operation.static,
        "own_scales": own,
        "same_scales": operation.transpose and not own,
        "square_scale": operation.block == "128x128" and not operation.static and not own,
        "given_scale": operation.static and not own,
        "tensor_scale": operation.reads_amax,
        "infinities": operation.q != "int8",
        "stochastic": operation.rounding == "stochastic",
    }
    return [f"cast/{name}.cuh.jinja" for name, has in options.items() if has]


FAMILY = Cast()
