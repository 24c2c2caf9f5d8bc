"""The kernels that the gpu tests run, one table for each thing that can go wrong, and the shapes.

All are built before a test needs them, in parallel. Tables vary one thing each; where a schedule's
fields have no bearing on each other, their values take turns.
"""

from __future__ import annotations

from itertools import product
from typing import Any, cast

from warploom.generator.elements import element
from warploom.generator.epilogue import (
    STEPS,
    Activation,
    ActivationGradient,
    Amax,
    Bias,
    ColumnSum,
    EpilogueStep,
    GateGradient,
    Preactivation,
    Quantize,
    Residual,
    Scale,
    gate_of,
)
from warploom.generator.families.gemm import (
    GemmOperation,
    GemmSchedule,
    complete,
)
from warploom.generator.specification import KernelSpec

# Each but one has a prime extent. n is rounded up where D is stored by TMA, 16 bytes at a time.
SHAPES: dict[str, tuple[int, int, int]] = {
    "single": (1, 1, 1),
    "whole": (64, 512, 64),
    "ragged": (257, 131, 193),
    "one k tile, not full": (61, 512, 37),
    "many k tiles": (129, 257, 2063),
    "many rows": (1023, 1021, 520),
    "more tiles than multiprocessors": (3001, 2003, 129),
}
DEFAULT_D = {"fp16": "fp16", "bf16": "bf16", "e4m3": "bf16", "e5m2": "bf16", "int8": "int32"}


def spec(
    tile: tuple[int, int] = (128, 128),
    *,
    a: str = "bf16",
    b: str | None = None,
    d: str | None = None,
    layouts: str = "row col",
    epilogue: tuple[EpilogueStep, ...] = (),
    accumulation: str = "fast",
    batched: bool = False,
    scales: tuple[str, str, str] = ("none", "fp32", "fp32"),
    **schedule: Any,
) -> KernelSpec:
    """Return a kernel; what is not given is the plainest, and as many stages as fit.

    `scales` are block_scales, and the types of those of A and of B.
    """
    layout_a, layout_b = layouts.split()
    d = d or ("bf16" if epilogue and a == "int8" else DEFAULT_D[a])
    accumulation = accumulation if scales[0] == "none" else "promoted"
    operation = GemmOperation(
        *(a, b or a, d, layout_a, layout_b, epilogue, accumulation, batched),  # type: ignore[arg-type]
        block_scales=scales[0],  # type: ignore[arg-type]
        block_scale_a=scales[1],  # type: ignore[arg-type]
        block_scale_b=scales[2],  # type: ignore[arg-type]
    )
    fields = {"tile": (*tile, 1024 // element(a).bits), **schedule}
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))


def short(kernel: KernelSpec) -> str:
    """The kernel's name without what all names share."""
    return kernel.name.removeprefix("gemm_sm90a_")[:-9]


def stored_by_tma(kernel: KernelSpec) -> bool:
    """Whether D must have rows of whole 16 bytes."""
    return cast("GemmSchedule", kernel.schedule).store == "tma"


def fitting(shape: tuple[int, int, int], kernel: KernelSpec) -> tuple[int, int, int]:
    """Return `shape` with the next n that the kernel can store."""
    m, n, k = shape
    operation = cast("GemmOperation", kernel.operation)
    unit = 16 // element(operation.d).bytes if stored_by_tma(kernel) else 1
    if gate_of(operation.epilogue):  # 8 columns of the gate and 8 of up
        unit = 128 if operation.block_scales == "row_block" else max(16, 2 * unit)
    if any(step.loads for step in operation.epilogue):
        unit = max(8, unit)
    return m, n + -n % unit, k


STORES = ("tma", "direct")
PAIRS = [
    *product(("fp16", "bf16", "e4m3", "int8"), ("fp16", "bf16", "fp32")),
    ("int8", "int32"),
]
MIXTURES = (("e5m2", "e5m2"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
TYPES = [
    *(spec(a=a, b=b) for a, b in MIXTURES),
    *(spec(a=a, d=d, store=store) for a, d in PAIRS for store in STORES),
]

LAYOUTS = [
    spec(tile, layouts=layouts, a=a, cluster=cluster, **others)
    for layouts in ("row col", "row row", "col col", "col row")
    for tile, a, cluster, others in (
        ((128, 128), "bf16", (1, 1), {}),
        ((256, 96), "fp16", (2, 1), {}),
        ((64, 176), "bf16", (1, 2), {"consumers": 1}),
        ((64, 256), "fp16", (2, 1), {"kernel_schedule": "pingpong"}),
    )
]

# tile m n, cluster, and the rest
SCHEDULES = [
    spec(tile, a=a, cluster=cluster, **others)
    for tile, a, cluster, others in (
        ((64, 8), "bf16", (1, 1), {"consumers": 1, "stages": 2}),
        ((64, 24), "bf16", (1, 2), {"consumers": 1, "swizzle_size": 1}),
        ((64, 96), "bf16", (2, 1), {"consumers": 1, "raster": "along_n", "swizzle_size": 3}),
        ((64, 256), "bf16", (1, 1), {"consumers": 1, "store": "direct", "raster": "along_n"}),
        ((64, 8), "e4m3", (1, 1), {"consumers": 1}),
        ((64, 16), "int8", (2, 1), {"consumers": 1, "stages": 3}),
        ((128, 8), "bf16", (1, 2), {"store": "direct", "stages": 2}),
        ((128, 24), "bf16", (1, 1), {"swizzle_size": 3}),
        ((128, 96), "bf16", (2, 1), {"consumers": 1, "swizzle_size": 1}),
        ((128, 176), "bf16", (1, 2), {"raster": "along_n", "swizzle_size": 1}),
        ((128, 256), "bf16", (2, 1), {}),
        ((128, 256), "bf16", (1, 2), {"stages": 2, "swizzle_size": 3, "raster": "along_n"}),
        ((128, 256), "bf16", (1, 1), {"store": "direct", "swizzle_size": 1000}),
        ((128, 256), "e4m3", (2, 1), {}),
        ((128, 256), "int8", (1, 2), {"raster": "along_n"}),
        ((256, 8), "bf16", (1, 1), {"raster": "along_n", "swizzle_size": 3}),
        ((256, 96), "bf16", (1, 2), {"stages": 2}),
        ((256, 176), "bf16", (2, 1), {"swizzle_size": 3}),
        ((256, 128), "e4m3", (1, 2), {"store": "direct"}),
        ((256, 64), "int8", (2, 1), {"raster": "along_n"}),
        ((64, 8), "bf16", (1, 2), {"kernel_schedule": "pingpong", "stages": 2}),
        (
            (64, 96),
            "bf16",
            (1, 1),
            {"kernel_schedule": "pingpong", "raster": "along_n", "swizzle_size": 1},
        ),
        ((64, 256), "bf16", (1, 2), {"kernel_schedule": "pingpong", "store": "direct"}),
        (
            (128, 24),
            "bf16",
            (1, 1),
            {"kernel_schedule": "pingpong", "stages": 2, "swizzle_size": 3},
        ),
        ((128, 128), "bf16", (2, 1), {"kernel_schedule": "pingpong"}),
        ((128, 176), "bf16", (2, 1), {"kernel_schedule": "pingpong", "raster": "along_n"}),
        ((128, 128), "e4m3", (1, 2), {"kernel_schedule": "pingpong", "stages": 3}),
        ((128, 160), "int8", (2, 1), {"kernel_schedule": "pingpong", "store": "direct"}),
    )
]

# Blocks that share k: fewer k tiles than blocks, parts all past the end, tiles in turns.
SPLIT = [
    spec(tile, cluster_split_k=split, **others)
    for tile, split, others in (
        ((64, 16), 2, {"consumers": 1, "stages": 2}),
        ((64, 64), 4, {"consumers": 1, "l2_promotion": 128}),
        ((64, 64), 8, {"consumers": 1, "store": "direct"}),
        ((64, 48), 3, {"consumers": 1, "raster": "along_n", "swizzle_size": 3}),
        ((128, 160), 4, {}),
        ((128, 256), 2, {"swizzle_size": 1}),
        ((256, 96), 6, {"a": "fp16", "d": "fp32"}),
        ((128, 112), 7, {"stages": 5}),
        ((128, 80), 5, {"layouts": "col row"}),
        ((128, 128), 4, {"a": "int8"}),
        ((64, 128), 8, {"a": "e4m3", "consumers": 1}),
        ((128, 64), 4, {"a": "e4m3", "b": "e5m2", "accumulation": "promoted"}),
        ((64, 64), 4, {"swap_ab": True, "consumers": 1}),
        ((96, 128), 3, {"swap_ab": True, "a": "e4m3"}),
        ((64, 128), 8, {"swap_ab": True, "store": "direct"}),
        ((128, 96), 2, {"batched": True}),
        ((128, 96), 3, {"epilogue": (Scale("host"), Amax(), Residual("bf16"))}),
    )
]

SCALES = (Scale("row"), Scale("column"))
ORDERS: dict[str, tuple[EpilogueStep, ...]] = {
    "layer": (Scale("device"), Bias("bf16"), Activation("gelu_tanh"), Residual("bf16")),
    "vectors": (*SCALES, Bias("fp32"), Activation("silu"), Residual("fp32")),
    "residual first": (Residual("fp16"), Activation("gelu"), Bias("fp16"), Scale("host")),
    "twice": (Bias("bf16"), Residual("bf16"), Activation("relu"), Bias("fp32"), Residual("fp32")),
    "six": (*SCALES, Bias("fp32"), Bias("fp16"), Activation("relu"), Scale("host")),
}
EPILOGUES = [
    *(
        spec((128, 96), epilogue=(step,), store=store)
        for step in STEPS
        if not isinstance(step, Quantize | GateGradient)  # which have tiles of their own
        for store in STORES
    ),
    *(
        spec((128, 96), epilogue=steps, store=store)
        for steps in ORDERS.values()
        for store in STORES
    ),
    spec((128, 256), cluster=(2, 1), epilogue=ORDERS["layer"]),
    spec((64, 24), consumers=1, d="fp32", epilogue=ORDERS["layer"]),
    spec((256, 128), layouts="col row", epilogue=ORDERS["residual first"]),
    *(
        spec(
            (128, 128),
            a=a,
            d=d,
            kernel_schedule="pingpong",
            cluster=(2, 1),
            epilogue=ORDERS["vectors"],
        )
        for a, d in (("e4m3", "bf16"), ("int8", "fp16"), ("fp16", "fp32"))
    ),
]

# What training needs: what an activation is given is stored, or its derivative multiplies dy and
# rows are summed; and each output twice.
FORWARD = (Bias("bf16"), Preactivation("bf16"), Activation("gelu_tanh"), Preactivation("fp32"))
BACKWARD = (
    Bias("fp32"),
    ActivationGradient("gelu_tanh", "bf16"),
    ColumnSum(),
    Scale("host"),
)
TWICE = (ColumnSum(), ActivationGradient("silu", "fp32"), Preactivation("fp16"), ColumnSum())
QUANTISED = (Scale("host"), Amax(), Scale("device"))
SIMPLE = {  # for tests of something else than the kernel itself
    "tma": spec((128, 128), cluster=(2, 1), stages=4),
    "direct": spec((128, 128), cluster=(2, 1), stages=4, store="direct"),
    "residual": spec((64, 96), consumers=1, epilogue=(Residual("bf16"),)),
    "residual direct": spec((64, 96), consumers=1, epilogue=(Residual("bf16"),), store="direct"),
    "relu": spec((64, 96), consumers=1, epilogue=(Activation("relu"),)),
    "layer": spec((128, 96), epilogue=ORDERS["layer"]),
    "trained": spec((64, 96), consumers=1, epilogue=(Preactivation("fp32"), ColumnSum())),
}
