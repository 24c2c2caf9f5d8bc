"""What the head of a GEMM's source says of its warps, registers, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._product.header import pipeline, staging, tables
from warploom.generator.families._product.layout import REGISTERS
from warploom.generator.families.gemm.layout import GemmLayout
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule, GemmSpec
from warploom.generator.header import Barrier, Memory, counted, header
from warploom.generator.wgmma import TemplateText


def described(spec: GemmSpec, layout: GemmLayout, order: str) -> TemplateText:
    """Return the comment lines of a kernel whose consumers are kept in step by `order`."""
    operation, schedule = spec.operation, spec.schedule
    sentences = [*_roles(operation, schedule), *_registers(operation, schedule, layout)]
    memory = [*_memory(operation, layout)]
    barriers = [*_barriers(operation, schedule, layout, order)]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)


def _roles(operation: GemmOperation, schedule: GemmSchedule) -> Iterator[str]:
    copying = "; warps 1 to 3 copy block scales where TMA cannot" * (
        operation.block_scales != "none"
    )
    yield f"Warpgroup 0, the producer: thread 0 issues the TMA loads{copying}."
    two, own = schedule.consumers == 2, schedule.consumers > schedule.sharing
    who = "Warpgroups 1 and 2, the consumers" if two else "Warpgroup 1, the consumer"
    rows = schedule.rows // schedule.sharing
    tile = "a tile each (ping-pong)" if own else "the CTA's tile" + " each" * two
    yield f"{who}: wgmma on {rows} rows of {tile}, then the epilogue."


def _registers(
    operation: GemmOperation, schedule: GemmSchedule, layout: GemmLayout
) -> Iterator[str]:
    launched, budget = REGISTERS[schedule.consumers], layout.register_budget
    producer = schedule.producer_registers
    if schedule.consumers == 2:
        total = f"{producer} + 2 * {budget} = 3 * {launched}"
        moved = f"setmaxnreg: producer {producer}, consumers {budget} ({total})"
        yield f"Registers per thread: {launched} at launch; {moved}"
    else:
        yield f"Registers per thread: at most {launched}, without setmaxnreg."
    count = schedule.rows * schedule.columns // (128 * schedule.sharing)
    banked = layout.banks * (schedule.columns // 2) * (2 if layout.ahead else 1)
    banks = f" and {banked} for one k tile" * bool(banked)
    yield f"  A consumer thread has {count} accumulators{banks}."
    yield f"  Its epilogue takes {layout.chunk_columns} columns at a time, to need few more."


def _memory(operation: GemmOperation, layout: GemmLayout) -> Iterator[Memory]:
    stages, pieces = layout.stages, operation.pieces
    tiles = f"({layout.a.bytes} + {layout.b.bytes})"
    many = f"{pieces} pieces * " * (pieces > 1)
    yield Memory("a, b", f"{counted(stages, 'stage')} * {many}{tiles}", stages * layout.stage_bytes)
    yield from staging(layout)
    if layout.scale_bytes:
        yield Memory(
            "scales", f"{stages} stages * {layout.scale_bytes}", stages * layout.scale_bytes
        )
    yield from tables(layout, layout.group_bytes)
    yield pipeline(stages)


def _barriers(
    operation: GemmOperation, schedule: GemmSchedule, layout: GemmLayout, order: str
) -> Iterator[Barrier]:
    scaled, split = operation.block_scales != "none", schedule.cluster_split_k > 1
    copied = ", and scale copies" * scaled
    yield Barrier(
        "full",
        f"1 arrival and the stage's bytes{copied}",
        "consumers",
        "a stage until it is filled",
    )
    m, n = schedule.cluster
    ctas = 1 if split else m + n - 1 if schedule.along_both else m * n
    who = (
        f"{4 * schedule.sharing} consumer warps"
        if scaled
        else counted(schedule.sharing, "consumer")
    )
    where = f" of {ctas} CTAs" * (ctas > 1)
    count = schedule.sharing * ctas * (4 if scaled else 1)
    yield Barrier(
        "empty",
        f"{count} arrivals: {who}{where}",
        "the producer",
        "a stage while wgmma reads it",
    )
    if layout.store_bytes:
        names = "named 1" + ", 2" * (schedule.consumers > 1)
        yield Barrier(names, "128 threads of a consumer", "the same", "its staging buffers")
    if order == "pingpong":
        yield Barrier(
            "named 3, 4", "128 threads of each consumer", "one consumer", "one main loop at a time"
        )
    if order == "staggered":
        yield Barrier(
            "named 3, 4",
            "128 threads of each consumer",
            "one consumer",
            "the lag between consumers",
        )
    if split:
        yield Barrier(
            "named 5",
            f"{128 * schedule.consumers} threads of consumers",
            "the same",
            "stages, reused below",
        )
    if layout.factor_bytes:
        yield Barrier("named 6 on", "threads that share factors", "the same", "factors of rows")
    size = schedule.cluster_size
    whole = f"all threads of {counted(size, 'CTA')}"
    guards = "barriers, at start and exit" if size > 1 else "barriers before use"
    if split:
        guards = "accumulators kept in stages"
    yield Barrier("cluster", whole, "the same", guards)
