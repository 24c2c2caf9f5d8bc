"""How long a GEMM takes: waves of tiles, each bound by what is slowest in a step, and by memory.

A step is one k tile of one output tile on one multiprocessor. In it the tensor core multiplies,
shared memory feeds it, L2 fills the stages, the stages in flight hide L2's latency, and no step is
shorter than its barriers: the slowest decides, softly (`slowest`). So do the steps of the busiest
multiprocessor together beside the traffic of memory. What does not overlap is added: launch, first
fill, and epilogues that nothing hides. Rows that do not begin where L2's lines and sectors do cost
more to load, and more to store.

Times in comments are of an H200, from sweeps of six products of bf16 and the tuning of 28; those of
single launches from sweeps of drawn products (docs/notebook.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.epilogue import columns as columns_of_d
from warploom.generator.families._product.launch import cut, parts_at_once, parts_of_k
from warploom.generator.families.gemm.constants import START
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.scales import column_scales
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.families.gemm.shape import GemmShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.model.arithmetic import Value, slowest

__all__ = ["START", "Tiling", "seconds"]

_LINE = 128  # bytes of a row of an operand's stage: tile k
_SECTOR = 32  # bytes of memory that L2 reads and writes at least
_TPC = 2  # multiprocessors of a TPC


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up, into rows and columns of clusters."""

    rows: int
    columns: int
    k_tiles: int  # of a tile, or of a part of its k that is a tile of its own
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
            *(rows, columns, found.k_tiles, found.waves),
            finishes=-(-count // clusters),
            parts=found.parts,
            apart=0 if found.aligned else found.range_k_tiles / found.k_tiles,
            blocks=clusters * schedule.cluster_size,
            last_blocks=last * schedule.cluster_size,
            busy=count * schedule.cluster_size / (found.waves * multiprocessors),
            bands=-(-along // schedule.swizzle_size),
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
    step = _step(constants, operation, schedule, shape, tiling, multiprocessors)
    tile = tiling.k_tiles * step
    reduced = schedule.split_k > 1
    if reduced:
        finish = _left(constants, schedule, shape)
    else:
        finish = _epilogue(constants, operation, schedule, shape)
    work, finishes = tiling.waves * tile, tiling.finishes * finish
    if schedule.kernel_schedule == "pingpong":  # two tiles at a time, the products of one alone
        work = max(work, (work + finishes) / 2) + finish
    else:
        work += finishes
    if schedule.stream_k:
        work += tiling.apart * constants["apart"] * tile + _parts(constants, schedule, tiling)
    memory = _memory(constants, operation, schedule, shape, tiling)
    last = tiling.last_blocks / ((tiling.waves - 1) * tiling.blocks + tiling.last_blocks)
    memory *= (1 - last) * _pace(constants, tiling.blocks, multiprocessors) + last * _pace(
        constants, tiling.last_blocks, multiprocessors
    )
    fixed = constants["launch"] + constants["latency"]
    if schedule.cluster_size > 1:
        fixed += constants["gathering"]
    if reduced:
        fixed += _reduction(constants, operation, schedule, shape)
    return fixed + slowest(work, memory) * (
        1 + constants["slowest_part"] * (schedule.cluster_split_k - 1)
    )


def _step(
    constants: Value,
    operation: GemmOperation,
    schedule: GemmSchedule,
    shape: GemmShape,
    tiling: Tiling,
    multiprocessors: int,
) -> float:
    """Seconds of one k tile: of the slowest that overlaps, and of what does not."""
    loaded = _stage_bytes(schedule, shape)
    alone = loaded / constants["l2_bandwidth"]
    together = loaded * tiling.blocks / constants["l2_total"]
    multiplied = _products(constants, operation, schedule, tiling)
    scaled = operation.block_scales != "none"
    step = slowest(
        max(multiplied, _shared(constants, operation, schedule))
        + (_scaling(constants, operation, schedule) if scaled else 0),
        alone * (_TPC if _doubled(tiling.blocks, multiprocessors) else 1),
        together * _misfit(constants, operation, schedule, shape),
        constants["latency"] / schedule.stages,
        constants["step"],
    )
    step += constants["turn"]
    if schedule.multicast > 1:
        step += constants["cluster"]
    if schedule.cluster[1] > 1:
        step += constants["across"]
    if operation.accumulation == "promoted" and not scaled:
        step += constants["promotion"] * _additions(constants, schedule)
    return step


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


def _additions(constants: Value, schedule: GemmSchedule) -> float:
    """Seconds in which fp32 units add the products of a k tile to the accumulators of a tile."""
    return schedule.tile[0] * schedule.tile[1] / 128 / constants["tensor_clock"]


def _scaling(constants: Value, operation: GemmOperation, schedule: GemmSchedule) -> float:
    """Seconds of a k tile in which products are scaled and added, and no MMA is in flight.

    Loads go on meanwhile. With scales of blocks of columns a k tile of 256x128 took 0.88 us, where
    its MMAs take 0.64 by these clocks; with a scale of each column 1.1 us. Where MMAs of the next
    k tile run meanwhile, it is 0.01 to 0.02 us less, which says too little to tell these apart.
    """
    single = column_scales(operation, schedule).each == 1
    share = constants["column_scaling" if single else "block_scaling"]
    return constants["scaled"] + share * _additions(constants, schedule)


def _shared(constants: Value, operation: GemmOperation, schedule: GemmSchedule) -> float:
    """Seconds of shared memory: of each instruction 64 rows and all columns, 32 bytes of k."""
    instructions = schedule.rows // 64 * 4
    found = instructions * (16 + schedule.columns / 4) / constants["shared_clock"]
    if (operation.layout_a, operation.layout_b) == ("col", "row"):
        found *= 1 + constants["transposed"]
    return found


def _stage_bytes(schedule: GemmSchedule, shape: GemmShape) -> float:
    """Bytes of L2 that a block loads for a step: a cluster's blocks share what they share."""
    m, n, _ = schedule.tile
    rows = _loaded(m, shape.m) / schedule.cluster[1] + _loaded(n, shape.n) / schedule.cluster[0]
    return _LINE * rows


def _misfit(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """How much longer L2 takes where rows of A or B begin within its lines or its sectors.

    With k = 78600, whose rows of bf16 begin at any 16 bytes, it gave 5e12 bytes a second to all
    multiprocessors; where rows are whole lines, 1.1e13 and more. Of such rows it gives less where
    it fetches 256 bytes for a request: 4096x7216x17048 took 1559 us so, and 1296 by 128.
    """
    extents = (
        shape.k if operation.layout_a == "row" else shape.m,
        shape.k if operation.layout_b == "col" else shape.n,
    )
    pitches = [extent * element(operation.a).bytes for extent in extents]
    found = 1.0
    if any(pitch % _LINE for pitch in pitches):
        found += constants["misaligned"]
    if any(pitch % _SECTOR for pitch in pitches):
        found += constants["straddling"]
        if schedule.l2_promotion > 128:
            found += constants["overfetched"]
    return found


def _loaded(rows: int, extent: int) -> int:
    """Rows of a tile that are loaded: none past the last, but for whole groups of 8."""
    return min(rows, -(-extent // 8) * 8)


# ---- Beside the steps ----------------------------------------------------------------------------


def _epilogue(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """Seconds from a tile's last product to its last store."""
    rows, columns = min(schedule.tile[0], shape.m), min(schedule.tile[1], shape.n)
    d = element(operation.d)
    moved = rows * columns_of_d(operation.epilogue, columns) * d.bytes
    moved += sum(step.moved(rows, columns, d) for step in operation.epilogue)
    found = constants["epilogue"] + moved / schedule.cluster_split_k / constants["store_bandwidth"]
    found += constants["chunk"] * _chunks(operation, schedule, shape)
    if schedule.swap_ab and schedule.store == "direct":  # a thread's elements are of different rows
        found += constants["scattered"] * rows * columns / schedule.cluster_split_k
    if schedule.cluster_split_k > 1:
        sums = 4 * schedule.tile[0] * schedule.tile[1]
        found += constants["exchange"] + sums / constants["exchange_bandwidth"]
        found += constants["further"] * (schedule.cluster_split_k - 2)
    return found


def _chunks(operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape) -> float:
    """Chunks of a tile that a consumer finishes: blocks of 64 rows, a few columns at a time."""
    m, n = (shape.n, shape.m) if schedule.swap_ab else (shape.m, shape.n)
    blocks = min(schedule.rows // 64, -(-m // 64)) / schedule.sharing
    columns = gemm_layout(operation, schedule).chunk_columns
    return blocks * -(-min(schedule.finished, n) // columns)


def _parts(constants: Value, schedule: GemmSchedule, tiling: Tiling) -> float:
    """Seconds in which a block leaves a part of its own, and adds those of others to another.

    Where nothing is cut a kernel that could takes up to 2 % longer than its twin: never choose it.
    """
    sums = 4 * schedule.tile[0] * schedule.tile[1] / schedule.cluster_split_k
    return constants["parts"] + tiling.parts * sums / constants["parts_bandwidth"]


def _left(constants: Value, schedule: GemmSchedule, shape: GemmShape) -> float:
    """Seconds in which a block leaves its part of k for the second launch."""
    sums = 4 * min(schedule.tile[0], shape.m) * min(schedule.tile[1], shape.n)
    return constants["epilogue"] + sums / constants["parts_bandwidth"]


def _reduction(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """Seconds of the second launch, whose blocks wait where the first one has left room.

    A thread reads some parts at a time: of 48x256x100000 in 32 parts, which are four rounds, 64x64
    took 22.5 us, in 24 parts 22.1, and had a quarter less to multiply. Parts that half of L2 does
    not keep come back from memory.
    """
    d, parts = element(operation.d), parts_of_k(schedule, shape)
    rounds = -(-parts // parts_at_once(gemm_layout(operation, schedule)))
    left = _partial_tiles(schedule, shape)
    lost = max(0.0, left - constants["l2_bytes"] / 2)
    moved = sum(step.moved(shape.m, shape.n, d) for step in operation.epilogue)
    stored = shape.batches * (_stored(constants, operation, schedule, shape) + moved)
    found = constants["reduction"] + constants["reduction_round"] * rounds
    found += lost / constants["hbm_bandwidth"]
    return found + slowest(left / constants["reduction_bandwidth"], stored / constants["written"])


def _partial_tiles(schedule: GemmSchedule, shape: GemmShape) -> int:
    """Bytes of all parts of k that the first launch leaves, and the second one reads."""
    return 4 * shape.batches * shape.m * shape.n * parts_of_k(schedule, shape)


def _memory(
    constants: Value,
    operation: GemmOperation,
    schedule: GemmSchedule,
    shape: GemmShape,
    tiling: Tiling,
) -> float:
    """Seconds of HBM, and of L2 where several clusters read an operand, in both its halves."""
    d = shape.batches * _stored(constants, operation, schedule, shape)
    found = _traffic(constants, operation, schedule, shape, tiling) / constants["hbm_bandwidth"]
    if schedule.l2_promotion > 128:  # 2 to 4 % of the launch where A has up to 64 rows
        found *= 1 + constants["wide"]
    a = shape.m * element(operation.a).bytes if tiling.columns > 1 else 0
    b = shape.n * element(operation.b).bytes if tiling.rows > 1 else 0
    if schedule.split_k > 1:  # the second launch stores D
        found += _partial_tiles(schedule, shape) / constants["written"]
    else:
        found += d / constants["written"]
    return found + shape.batches * shape.k * (a + b) / constants["crossing"]


def _stored(
    constants: Value, operation: GemmOperation, schedule: GemmSchedule, shape: GemmShape
) -> float:
    """Bytes of D to memory, and what sectors cost of which a tile stores but a part."""
    pitch = columns_of_d(operation.epilogue, shape.n) * element(operation.d).bytes
    found = float(shape.m * pitch)
    if pitch % _SECTOR:
        ends = shape.m * -(-shape.n // schedule.tile[1])
        merged = 0.0 if schedule.raster == "along_m" else min(1.0, constants["merged"])
        found += constants["ragged"] * ends * (1 - merged)
    return found


def _traffic(
    constants: Value,
    operation: GemmOperation,
    schedule: GemmSchedule,
    shape: GemmShape,
    tiling: Tiling,
) -> float:
    """Bytes from HBM: A and B once, and what L2 does not keep from band to band."""
    a = shape.m * shape.k * element(operation.a).bytes
    b = shape.n * shape.k * element(operation.b).bytes
    again = b if schedule.raster == "along_m" else a
    lost = min(1.0, max(0.0, again / constants["l2_bytes"] - 0.5))
    return shape.batches * (a + b + again * lost * (tiling.bands - 1))
