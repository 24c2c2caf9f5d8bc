"""How long a GEMM takes: waves of tiles, each bound by what is slowest in a step, and by memory.

A step is one k tile of one output tile on one multiprocessor. In it the tensor core multiplies,
shared memory feeds it, L2 fills the stages, the stages in flight hide L2's latency, and no step is
shorter than its barriers: the slowest decides, softly (`slowest`). So do the steps of the busiest
multiprocessor together beside the traffic of memory. What does not overlap is added: launch, first
fill, and epilogues that nothing hides.

Times in comments are of an H200, from sweeps of six products of bf16 and the tuning of 28.
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.families.gemm.cut import cut
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.arithmetic import Value, slowest

# Where a fit begins, and what it is drawn to where measurements do not tell: the hardware's own
# figures (H100 tuning guide, PTX ISA) at the clock of a busy H200, and round numbers.
START = {
    "launch": 2e-6,  # seconds of a launch in a graph, with the first block's prologue
    "latency": 8e-7,  # seconds from a TMA request to its data
    "tensor_clock": 1.85e9,  # of the tensor core, in Hz, where few multiprocessors multiply
    "power": 0.2,  # more of its time where all do, and the GPU is at its limit of power
    "shared_clock": 1.85e9,  # of shared memory, which has 128 bytes a cycle
    "l2_bandwidth": 1.6e11,  # bytes a second that a TPC, two multiprocessors, gets of L2
    "crossing": 2e13,  # bytes a second from one half of L2 to the other
    "hbm_bandwidth": 4.2e12,  # bytes a second of memory
    "l2_bytes": 4e7,  # of L2 that keep an operand from being read again
    "wide": 0.03,  # more of memory's time where L2 fetches 256 bytes for a request, not 128
    "uneven": 0.3,  # of memory's time, that TPCs of two blocks wait more than those of one
    "sparse": 0.1,  # more of memory's time where no TPC has two, and fewer requests are under way
    "epilogue": 5e-7,  # seconds of an epilogue beside its bytes
    "exchange": 1e-6,  # seconds in which blocks that share k find each other's sums
    "exchange_bandwidth": 2e11,  # bytes a second of a tile's sums, laid down and read by others
    "parts": 3e-6,  # seconds in which clusters that share tiles find each other's parts
    "parts_bandwidth": 5e10,  # bytes a second of a part, through L2: written, or read and added
    "apart": 0.1,  # more of a step where clusters are at different k: L2 serves each by itself
    "store_bandwidth": 6e10,  # bytes a second at which one multiprocessor finishes D
    "step": 1e-7,  # seconds that a k tile takes at least: barriers, products one after the other
    "cluster": 1e-8,  # seconds more of it where a cluster's blocks wait for each other
    "alone": 0.1,  # more of the tensor core's time where one warpgroup has it to itself
    "integer": 1.0,  # of the tensor core's time: int8 takes less power, and clocks stay higher
    "promotion": 0.5,  # of the fp32 additions that promotion does not hide
    "transposed": 0.5,  # more shared-memory time where neither operand is K-major
}
_LINE = 128  # bytes of a row of an operand's stage: tile k
_TPC = 2  # multiprocessors of a TPC


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up, into rows and columns of clusters."""

    rows: int
    columns: int
    waves: float  # tiles of the busiest multiprocessor
    finishes: int  # that it finishes of them
    parts: int  # of a tile that is cut, at most
    apart: float  # waves in which clusters are at different k
    blocks: int  # that run at a time
    last_blocks: int  # of the last wave
    busy: float  # share of the multiprocessors that have a tile, on the average of all waves
    bands: int  # times that the operand across the bands is read, if L2 does not keep it

    @classmethod
    def of(cls, schedule: GemmSchedule, shape: GemmShape, multiprocessors: int) -> Tiling:
        """Cut `shape` up as the kernels do: clusters take tiles in turn."""
        rows = -(-shape.m // (schedule.tile[0] * schedule.cluster[0]))
        columns = -(-shape.n // (schedule.tile[1] * schedule.cluster[1]))
        found = cut(schedule, shape, DeviceLimits(multiprocessors))
        clusters, count = found.clusters, found.all_tiles
        along = rows if schedule.raster == "along_m" else columns
        last = clusters if found.tiles else (count - 1) % clusters + 1
        return cls(
            *(rows, columns, found.waves),
            finishes=-(-count // clusters),
            parts=found.parts,
            apart=0 if found.aligned else found.range_k_tiles / found.k_tiles,
            blocks=clusters * schedule.cluster_size,
            last_blocks=last * schedule.cluster_size,
            busy=count * schedule.cluster_size / (found.waves * multiprocessors),
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
    doubled = _doubled(tiling.blocks, multiprocessors)
    parts = [
        _products(constants, operation, schedule, tiling),
        _shared(constants, operation, schedule),
        _filling(constants, schedule, shape) * (_TPC if doubled else 1),
        constants["latency"] / schedule.stages,
        constants["step"],
    ]
    step = slowest(*parts)
    if schedule.multicast > 1:
        step += constants["cluster"]
    if operation.accumulation == "promoted":
        additions = schedule.tile[0] * schedule.tile[1] / 128 / constants["tensor_clock"]
        step += constants["promotion"] * additions
    tile = -(-shape.k // (schedule.tile[2] * schedule.split)) * step
    finish = _epilogue(constants, operation, schedule, shape)
    hidden = schedule.roles == "pingpong"
    work = tiling.waves * tile + finish * (1 if hidden else tiling.finishes)
    if schedule.stream_k:
        work += tiling.apart * constants["apart"] * tile + _parts(constants, schedule, tiling)
    memory = _memory(constants, operation, schedule, shape, tiling)
    last = tiling.last_blocks / ((tiling.waves - 1) * tiling.blocks + tiling.last_blocks)
    memory *= (1 - last) * _pace(constants, tiling.blocks, multiprocessors) + last * _pace(
        constants, tiling.last_blocks, multiprocessors
    )
    return constants["launch"] + constants["latency"] + slowest(work, memory)


def _doubled(blocks: int, multiprocessors: int) -> bool:
    """Whether a TPC has two of so many blocks: every one has one before any has two."""
    return blocks > multiprocessors // _TPC


def _pace(constants: Value, blocks: int, multiprocessors: int) -> float:
    """How much longer memory takes for a wave of so many blocks than where there is one for each.

    For the same weight 128 blocks took 15.1 us, 96 took 17.1, but 64 no more than 15.3; and where
    the last of two waves has 92, 59.7 us instead of 56.4.
    """
    if _doubled(blocks, multiprocessors):
        return 1 + constants["uneven"] * (multiprocessors / blocks - 1)
    return 1 + constants["sparse"]


# ---- A step --------------------------------------------------------------------------------------


def _products(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, tiling: Tiling
) -> float:
    """Seconds of the tensor core. 128x128 took 0.29 us on 40 multiprocessors, 0.37 on all."""
    instructions = schedule.rows // 64 * 4  # 64 rows and 32 bytes of k each
    found = instructions * schedule.columns / 2 / constants["tensor_clock"]
    found *= 1 + constants["power"] * tiling.busy
    if schedule.consumers == 1:
        found *= 1 + constants["alone"]
    if element(operation.a).is_integer:
        found *= constants["integer"]
    return found


def _shared(constants: Value, operation: GemmOperation, schedule: GemmSchedule) -> float:
    """Seconds of shared memory: of each instruction 64 rows and all columns, 32 bytes of k."""
    instructions = schedule.rows // 64 * 4
    found = instructions * (16 + schedule.columns / 4) / constants["shared_clock"]
    if (operation.layout_a, operation.layout_b) == ("col", "row"):
        found *= 1 + constants["transposed"]
    return found


def _filling(constants: Value, schedule: GemmSchedule, shape: GemmShape) -> float:
    """Seconds in which L2 fills a stage of a block that has a TPC to itself."""
    m, n, _ = schedule.tile
    rows = _loaded(m, shape) / schedule.cluster[1] + n / schedule.cluster[0]
    return _LINE * rows / constants["l2_bandwidth"]


def _loaded(rows: int, shape: GemmShape) -> int:
    """Rows of a tile of A that are loaded: none past the last, but for whole groups of 8."""
    return min(rows, -(-shape.m // 8) * 8)


# ---- Beside the steps ----------------------------------------------------------------------------


def _epilogue(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """Seconds from a tile's last product to its last store."""
    rows, columns = min(schedule.tile[0], shape.m), min(schedule.tile[1], shape.n)
    d = element(operation.d)
    moved = rows * columns * d.bytes
    moved += sum(step.moved(rows, columns, d) for step in operation.epilogue)
    found = constants["epilogue"] + moved / schedule.split / constants["store_bandwidth"]
    if schedule.split > 1:
        sums = 4 * schedule.tile[0] * schedule.tile[1]
        found += constants["exchange"] + sums / constants["exchange_bandwidth"]
    return found


def _parts(constants: Value, schedule: GemmSchedule, tiling: Tiling) -> float:
    """Seconds in which a block leaves a part of its own, and adds those of others to another.

    Where nothing is cut a kernel that could takes up to 2 % longer than its twin: never choose it.
    """
    sums = 4 * schedule.tile[0] * schedule.tile[1] / schedule.split
    return constants["parts"] + tiling.parts * sums / constants["parts_bandwidth"]


def _memory(
    constants: Value,
    operation: GemmOperation,
    schedule: GemmSchedule,
    shape: GemmShape,
    tiling: Tiling,
) -> float:
    """Seconds of HBM, and of L2 where several clusters read an operand, in both its halves."""
    found = _traffic(constants, operation, schedule, shape, tiling) / constants["hbm_bandwidth"]
    if schedule.l2_promotion > 128:  # 2 to 4 % of the launch where A has up to 64 rows
        found *= 1 + constants["wide"]
    a = shape.m * element(operation.a).bytes if tiling.columns > 1 else 0
    b = shape.n * element(operation.b).bytes if tiling.rows > 1 else 0
    return found + shape.batches * shape.k * (a + b) / constants["crossing"]


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
