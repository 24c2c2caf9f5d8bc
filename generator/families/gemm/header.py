"""What the head of a kernel's source says."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._product.layout import REGISTERS
from warploom.generator.families._product.template import (
    pipeline,
    schedule_line,
    staging,
    tables,
)
from warploom.generator.families.gemm.layout import GemmLayout
from warploom.generator.families.gemm.schedule import (
    SPARSE_BLOCK,
    GemmOperation,
    GemmSchedule,
    GemmSpec,
)
from warploom.generator.header import Barrier, Memory, comment, counted, header
from warploom.generator.wgmma import TemplateText

SHORT = 70  # characters of an epilogue's steps that one line has
GROUPS = {
    "rows": "rows of A and D in groups that end at offsets in device memory, and a B for each",
    "masked": "rows of A and D in groups of one size, of which as many count as device memory "
    "says, and a B for each",
    "k": "k in groups that end at offsets in device memory, and a D for each",
}


def summary(spec: GemmSpec) -> TemplateText:
    """Return the comment lines that say what a kernel computes, and by which schedule."""
    schedule = _schedule(spec.schedule, by_rows=spec.operation.by_rows)
    return comment([*_operation(spec.operation), *schedule])


def _operation(operation: GemmOperation) -> Iterator[str]:
    steps = [step.token for step in operation.epilogue]
    product, one_line = "A[m, k] B[k, n]", ", ".join(steps)
    if len(one_line) > SHORT:
        yield f"D[m, n] = epilogue({product}):"
        yield from (f"  {step}" for step in steps)
    else:
        yield f"D[m, n] = epilogue({product}): {one_line}" if steps else f"D[m, n] = {product}"
    operands = f"A {operation.a} {operation.layout_a}, B {operation.b} {operation.layout_b}"
    yield f"  {operands}, accumulated in {operation.accumulator.name}, D {operation.d} row"
    if operation.groups != "none":
        yield f"  {GROUPS[operation.groups]}"
    if operation.pieces > 1:
        pieces = f"A{' and B' * (operation.pieces_b > 1)} in {operation.pieces} pieces"
        added = f"{operation.terms} products are added up, smallest first"
        yield f"  {pieces} side by side along k, of which {added}"
    if operation.sparse != "none":
        blocks = f"blocks of {SPARSE_BLOCK}x{SPARSE_BLOCK} of {operation.sparse.upper()}"
        yield f"  {blocks} count where a mask says so, the others are zeros"


def _schedule(schedule: GemmSchedule, *, by_rows: bool) -> Iterator[str]:
    m, n = schedule.cluster
    yield schedule_line(schedule, f", cluster {m}x{n}")
    if schedule.swap_ab:
        yield "  swapped: the rows of wgmma are columns of D, which is D' = B' A'"
    if schedule.split_k > 1:
        parts = f"k in {schedule.split_k} parts, each a tile of its own"
        yield f"  {parts}: a second kernel adds them up, and has epilogue and store"
    if schedule.stream_k:
        cut = "the tiles that do not fill a wave, and of one wave before these"
        if by_rows:
            cut = "few tiles, or of one wave and what is left over, if that saves time"
        yield f"  stream-K: clusters split the k of {cut}"


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
    reduced = schedule.split_k > 1
    then = "partial sums go to memory" if reduced else "the epilogue"
    yield f"{who}: wgmma on {rows} rows of {tile}, then {then}."
    if reduced:
        yield "The second kernel, of one warpgroup a CTA: adds up partial sums, then the epilogue."


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
    if schedule.split_k == 1:
        yield f"  Its epilogue takes {layout.chunk_columns} columns at a time, to save registers."


def _memory(operation: GemmOperation, layout: GemmLayout) -> Iterator[Memory]:
    stages, a, b = layout.stages, layout.a.bytes, layout.b.bytes
    tiles = f"({a} + {b})"
    if operation.pieces_b > 1:
        tiles = f"{operation.pieces} pieces * {tiles}"
    elif operation.pieces > 1:
        tiles = f"({operation.pieces} pieces * {a} + {b})"
    yield Memory("a, b", f"{counted(stages, 'stage')} * {tiles}", stages * layout.stage_bytes)
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
        yield Barrier(names, "128 threads of a consumer", "all that arrive", "its staging buffers")
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
            "all that arrive",
            "stages, reused below",
        )
    if layout.kept_factor_bytes:
        yield Barrier(
            "named 6 on", "threads that share factors", "all that arrive", "factors of rows"
        )
    size = schedule.cluster_size
    whole = f"all threads of {counted(size, 'CTA')}"
    guards = "barriers, at start and exit" if size > 1 else "barriers before use"
    if split:
        guards = "accumulators kept in stages"
    yield Barrier("cluster", whole, "all that arrive", guards)
