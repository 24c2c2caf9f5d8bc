"""What the head of a sparse GEMM's source says of its warps, registers, memory and barriers."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._product.template import pipeline
from warploom.generator.families.sparse_gemm.schedule import (
    BLOCK,
    STAGE_BYTES,
    SWIZZLE_SIZE,
    WORDS,
    SparseGemmLayout,
    SparseGemmSchedule,
    SparseGemmSpec,
)
from warploom.generator.header import Barrier, Memory, comment, counted, header
from warploom.generator.wgmma import TemplateText


def summary(spec: SparseGemmSpec) -> TemplateText:
    """Return the comment lines that say what a kernel computes, and by which schedule."""
    operation, schedule = spec.operation, spec.schedule
    y = "scale_x scale_weight " * operation.scaled + "x[m, k] W[n, k]'"
    y += " + bias" * operation.bias
    if operation.activation != "none":
        y = f"{operation.activation}({y})"
    m, n, _ = schedule.tile
    words = (
        f"tile {m}x{n}x{operation.tile_k}",
        counted(schedule.consumers, "consumer"),
        f"{schedule.stages} stages",
        "along_n",
        f"swizzle {SWIZZLE_SIZE}",
        f"k in up to {schedule.split_k} parts" * (schedule.split_k > 1),
    )
    kind, accumulator = operation.element, operation.accumulator.name
    return comment(
        [
            f"y[m, n] = {y}, W 2:4 sparse along k",
            f"  x {kind}, W {kind}, accumulated in {accumulator}, y {operation.of_output}",
            f"  {', '.join(filter(None, words))}",
            "  computed as y' = W x': rows of wgmma.sp's tile are rows of W, its columns rows of x",
        ]
    )


def described(spec: SparseGemmSpec, layout: SparseGemmLayout) -> TemplateText:
    """Return the comment lines of a kernel."""
    memory, barriers = [*_memory(spec.schedule, layout)], [*_barriers(spec.schedule)]
    sentences = [*_roles(spec.schedule), *_registers(spec.schedule, layout)]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)


def _roles(schedule: SparseGemmSchedule) -> Iterator[str]:
    yield "Warpgroup 0, the producer: thread 0 issues the TMA loads."
    who = {1: " 1, the consumer", 2: "s 1 and 2, the consumers", 3: "s 1 to 3, the consumers"}
    rows, each = BLOCK * schedule.blocks, " each" * (schedule.consumers > 1)
    split = schedule.split_k > 1
    then = "partial sums go to memory" if split else "the epilogue"
    yield f"Warpgroup{who[schedule.consumers]}: wgmma.sp on {rows} rows of W{each}, then {then}."
    if split:
        yield "  The last CTA of those that divide a tile's k adds them up, and has the epilogue."


def _registers(schedule: SparseGemmSchedule, layout: SparseGemmLayout) -> Iterator[str]:
    producer, budget = schedule.producer_registers, schedule.consumer_registers
    warpgroups = 1 + schedule.consumers
    # ptxas gives a thread what a full SM allows, but not more than setmaxnreg asks for.
    launched = min(budget, 65_536 // schedule.threads // 8 * 8)
    total = f"{producer} + {schedule.consumers} * {budget} <= {warpgroups} * {launched}"
    moved = f"setmaxnreg: producer {producer}, consumers {budget} ({total})"
    yield f"Registers per thread: {launched} at launch; {moved}."
    count = schedule.blocks * schedule.tokens // 2
    words = counted(schedule.blocks * layout.words, "word")
    held = f"{count} accumulators, and {words} of metadata for each of two k tiles"
    yield f"  A consumer thread has {held} in flight."


def _memory(schedule: SparseGemmSchedule, layout: SparseGemmLayout) -> Iterator[Memory]:
    stages, consumers = schedule.stages, counted(schedule.consumers, "consumer")
    for name, rows, row in (
        ("x", schedule.tokens, STAGE_BYTES),
        ("values", schedule.rows, STAGE_BYTES // 2),
    ):
        yield Memory(name, f"{stages} stages * {rows} rows * {row}", stages * rows * row)
    blocks, each = schedule.rows // BLOCK, layout.words * 4 * WORDS
    factors = f"{stages} stages * {counted(blocks, 'block')} of {BLOCK} rows * {each}"
    yield Memory("metadata", factors, stages * blocks * each)
    yield Memory(
        "staging",
        f"{consumers} * {layout.chunk} rows of y * {layout.staged_pitch}",
        schedule.consumers * layout.chunk * layout.staged_pitch,
    )
    if schedule.split_k > 1:
        yield Memory("last", f"{consumers}, and padding", 8)
    yield pipeline(stages)


def _barriers(schedule: SparseGemmSchedule) -> Iterator[Barrier]:
    yield Barrier(
        "full", "1 arrival and the stage's bytes", "consumers", "a stage until it is filled"
    )
    arrivals = f"{4 * schedule.consumers} arrivals: every consumer warp"
    yield Barrier("empty", arrivals, "the producer", "a stage while it is read")
    names = {1: "named 1", 2: "named 1, 2", 3: "named 1 to 3"}[schedule.consumers]
    guards = "its staging buffer" + " and partial sums" * (schedule.split_k > 1)
    yield Barrier(names, "128 threads of a consumer", "all that arrive", guards)
    yield Barrier("CTA", "all threads", "all that arrive", "barriers before use")
