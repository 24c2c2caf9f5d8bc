"""How long a GEMM takes: waves of tiles, each bound by what is slowest in a step, and by memory.

A step is one k tile of one output tile on one multiprocessor. In it the tensor core multiplies,
shared memory feeds it, L2 fills the stages, and the stages in flight hide L2's latency: the slowest
of them decides, softly (`slowest`). So do the steps of the busiest multiprocessor together beside
HBM's traffic. What does not overlap is added: launch, first fill, and epilogues that nothing hides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.model.shapes import GemmShape

# Where a fit begins, and what it is drawn to where measurements do not tell: the hardware's own
# figures (H100 tuning guide, PTX ISA) at the clock of a busy H200, and round numbers.
START = {
    "launch": 2e-6,  # seconds of a launch in a graph, with the first block's prologue
    "latency": 8e-7,  # seconds from a TMA request to its data
    "tensor_clock": 1.55e9,  # of the tensor core under load, in Hz
    "shared_clock": 1.55e9,  # of shared memory, which has 128 bytes a cycle
    "l2_bandwidth": 8e10,  # bytes a second that one multiprocessor gets of L2
    "hbm_bandwidth": 4.2e12,  # bytes a second of memory
    "l2_bytes": 4e7,  # of L2 that keep an operand from being read again
    "epilogue": 5e-7,  # seconds of an epilogue beside its bytes
    "store_bandwidth": 6e10,  # bytes a second at which one multiprocessor finishes D
    "step": 2e-8,  # seconds of a k tile that nothing hides: barriers, issue
    "cluster": 5e-7,  # seconds that a cluster's blocks wait for each other, once
    "alone": 0.1,  # more of it where one warpgroup has the tensor core to itself
    "integer": 1.0,  # of the tensor core's time: int8 takes less power, and clocks stay higher
    "promotion": 0.5,  # of the fp32 additions that promotion does not hide
    "transposed": 0.5,  # more shared-memory time where neither operand is K-major
}
SHARPNESS = 4  # of `slowest`: two equal times take 1.19 of one
_LINE = 128  # bytes of a row of an operand's stage: tile k

Value = Mapping[str, float]


def slowest(*seconds: float) -> float:
    """The largest of times that overlap, and somewhat more where two are close."""
    return math.pow(sum(part**SHARPNESS for part in seconds), 1 / SHARPNESS)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up: tiles of the busiest multiprocessor, and bands for L2."""

    waves: int
    bands: int  # times that the operand across the bands is read, if L2 does not keep it

    @classmethod
    def of(cls, schedule: GemmSchedule, shape: GemmShape, multiprocessors: int) -> Tiling:
        """Cut `shape` up as the kernels do: clusters take tiles in turn."""
        rows = -(-shape.m // (schedule.tile[0] * schedule.cluster[0]))
        columns = -(-shape.n // (schedule.tile[1] * schedule.cluster[1]))
        clusters = max(1, multiprocessors // schedule.cluster_size)
        along = rows if schedule.raster == "along_m" else columns
        return cls(
            waves=-(-rows * columns * shape.batches // clusters),
            bands=-(-along // schedule.group),
        )


def seconds(
    constants: Value,
    operation: GemmOperation,
    schedule: GemmSchedule,
    shape: GemmShape,
    multiprocessors: int,
) -> float:
    """Predict the time of one launch; shapes without products take the launch alone."""
    if not (shape.m and shape.n and shape.k and shape.batches):
        return constants["launch"]
    tiling = Tiling.of(schedule, shape, multiprocessors)
    steps = -(-shape.k // schedule.tile[2])
    tile = steps * _step(constants, operation, schedule, shape)
    finish = _epilogue(constants, operation, schedule, shape)
    hidden = schedule.roles == "pingpong"
    work = tiling.waves * tile + finish * (1 if hidden else tiling.waves)
    traffic = _traffic(constants, operation, schedule, shape, tiling)
    alone = constants["launch"] + constants["latency"]
    if schedule.cluster_size > 1:
        alone += constants["cluster"]
    return alone + slowest(work, traffic / constants["hbm_bandwidth"])


def _step(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """Seconds of one k tile: the slowest of tensor core, shared memory, L2 and latency."""
    m, n, _ = schedule.tile
    instructions = schedule.rows // 64 * 4  # 64 rows and 32 bytes of k each
    tensor = instructions * schedule.columns / 2 / constants["tensor_clock"]
    if schedule.consumers == 1:
        tensor *= 1 + constants["alone"]
    if element(operation.a).is_integer:
        tensor *= constants["integer"]
    # Of each instruction 64 rows and all columns are read, 32 bytes of k of both: 128 a cycle.
    shared = instructions * (16 + schedule.columns / 4) / constants["shared_clock"]
    if (operation.layout_a, operation.layout_b) == ("col", "row"):
        shared *= 1 + constants["transposed"]
    rows = min(m, -(-shape.m // 8) * 8)  # no row past the last is loaded
    filled = _LINE * (rows / schedule.cluster[1] + n / schedule.cluster[0])
    l2 = filled / constants["l2_bandwidth"]
    arriving = constants["latency"] / schedule.stages
    step = slowest(tensor, shared, l2, arriving) + constants["step"]
    if operation.accumulation == "promoted":
        additions = m * n / 128 / constants["tensor_clock"]
        step += constants["promotion"] * additions
    return step


def _epilogue(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """Seconds from a tile's last product to its last store."""
    rows, columns = min(schedule.tile[0], shape.m), min(schedule.tile[1], shape.n)
    moved = rows * columns * element(operation.d).bytes
    residuals = sum(step.token.startswith("residual") for step in operation.epilogue)
    moved += residuals * rows * columns * element(operation.d).bytes
    return constants["epilogue"] + moved / constants["store_bandwidth"]


def _traffic(
    constants: Value,
    operation: GemmOperation,
    schedule: GemmSchedule,
    shape: GemmShape,
    tiling: Tiling,
) -> float:
    """Bytes to and from HBM: every matrix once, and what L2 does not keep from band to band."""
    a = shape.m * shape.k * element(operation.a).bytes
    b = shape.n * shape.k * element(operation.b).bytes
    d = shape.m * shape.n * element(operation.d).bytes
    again = b if schedule.raster == "along_m" else a
    lost = min(1.0, max(0.0, again / constants["l2_bytes"] - 0.5))
    return shape.batches * (a + b + d + again * lost * (tiling.bands - 1))
