"""Kernels that tests name no schedules of: those that the table has."""

from __future__ import annotations

from itertools import product

from gemm_cases import SHAPES

from warploom.generator.epilogue import Activation, Amax, Bias, Residual, Scale
from warploom.generator.families.gemm import FAMILY, GemmOperation, GemmSchedule, GemmShape
from warploom.generator.launches import NO_GPU
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose, portfolio

CHOSEN_SHAPES = [*SHAPES.values(), (2047, 6144, 256)]
CHOSEN_OPERATIONS = [
    GemmOperation(a, a, "bf16", epilogue=(Scale("host"),))  # type: ignore[arg-type]
    for a in ("bf16", "e4m3", "int8")
]


def chosen(operation: GemmOperation, shape: tuple[int, int, int]) -> KernelSpec:
    """Return the kernel that the table has for a shape on an H200, D contiguous."""
    at = GemmShape(*shape)
    return choose(operation, at, requires=FAMILY.table.required(operation, at)).spec


def block_scaled(scales: str) -> list[KernelSpec]:
    """Return what the cost model chooses from for block scales, of several parts of k by three."""
    operation = GemmOperation(
        *("e4m3", "e4m3", "bf16"),  # type: ignore[arg-type]
        accumulation="promoted",
        block_scales=scales,  # type: ignore[arg-type]
    )
    every = portfolio(operation, GemmShape(64, 576, 2**16), NO_GPU, "tma")
    return [
        one
        for one in every
        if isinstance(one.schedule, GemmSchedule) and one.schedule.split_k in (1, 3)
    ]


BLOCK_SCALED = [*block_scaled("row_block"), *block_scaled("row_row")]
CHOSEN = [chosen(operation, shape) for operation in CHOSEN_OPERATIONS for shape in CHOSEN_SHAPES]

_PLAIN = (257, 136, 193)
_LAYOUTS = tuple(product(("row", "col"), repeat=2))
# What tests that name no kernel ask the table for: a kernel that is missing here is compiled by the
# test itself, which takes a second.
ASKED = [
    chosen(GemmOperation(a, a, d, layout_a, layout_b, epilogue), shape)  # type: ignore[arg-type]
    for a, d, layout_a, layout_b, epilogue, shape in (
        *((a, a, *layouts, (), _PLAIN) for a in ("bf16", "fp16") for layouts in _LAYOUTS),
        ("bf16", "bf16", "row", "col", (), (257, 131, 193)),
        ("bf16", "bf16", "row", "col", (), (129, 131, 193)),
        ("bf16", "bf16", "row", "col", (), (1, 131, 193)),
        ("bf16", "fp32", "row", "col", (), (257, 131, 193)),
        ("bf16", "fp32", "row", "col", (), (257, 132, 193)),
        ("int8", "int32", "row", "col", (), _PLAIN),
        ("bf16", "bf16", "row", "col", (Scale("device"), Scale("host")), _PLAIN),
        ("bf16", "bf16", "row", "col", (Scale("host"), Residual("bf16")), _PLAIN),
        ("bf16", "bf16", "row", "row", (Residual("bf16"),), (257, 264, 264)),
        ("bf16", "bf16", "row", "col", (Bias("bf16"), Activation("relu")), _PLAIN),
        ("bf16", "bf16", "row", "col", (Bias("bf16"), Activation("silu")), _PLAIN),
        ("bf16", "bf16", "row", "col", (Amax(),), _PLAIN),
        ("bf16", "e4m3", "row", "col", (Amax(), Scale("host")), (257, 144, 193)),
    )
]
