"""What the head of a sparse GEMM's source says of its warps, registers, memory and barriers."""

from __future__ import annotations

from warploom.generator.families._product.template import pipeline
from warploom.generator.families.sparse_gemm.schedule import (
    STAGE_BYTES,
    SparseGemmLayout,
    SparseGemmSpec,
)
from warploom.generator.header import Barrier, Memory, comment, counted, header
from warploom.generator.wgmma import TemplateText


def summary(spec: SparseGemmSpec) -> TemplateText:
    """Return the comment lines that say what a kernel computes, and by which schedule."""
    operation, schedule = spec.operation, spec.schedule
    y = "scale_x scale_weight " * operation.scaled + "x W'" + " + bias" * operation.bias
    if operation.activation != "none":
        y = f"{operation.activation}({y})"
    output = f", y {operation.output}" * (operation.output != "like_x")
    parts = f", {schedule.split_k} parts of k" * (schedule.split_k > 1)
    tile = f"{schedule.rows} rows of W by {schedule.tokens} of x a tile"
    return comment(
        [
            f"y = {y}, {operation.element}{output}, W 2:4 sparse",
            f"  {tile}, {schedule.consumers} consumers, {schedule.stages} stages{parts}",
        ]
    )


def described(spec: SparseGemmSpec, layout: SparseGemmLayout) -> TemplateText:
    """Return the comment lines of a kernel."""
    schedule = spec.schedule
    stages, consumers = schedule.stages, counted(schedule.consumers, "consumer")
    producer, budget = schedule.producer_registers, schedule.consumer_registers
    launched = min(255, 65_536 // schedule.threads // 8 * 8)
    total = f"{producer} + {schedule.consumers} * {budget} <= {1 + schedule.consumers} * {launched}"
    rows = schedule.rows // schedule.consumers
    which = f"s 1 to {schedule.consumers}" if schedule.consumers > 1 else " 1"
    sentences = [
        "Warpgroup 0, the producer: thread 0 issues the TMA loads.",
        f"Warpgroup{which}, {consumers}: wgmma.sp on {rows} rows of W, then the epilogue.",
        f"Registers per thread: {launched} at launch; setmaxnreg: producer {producer}, "
        f"consumers {budget} ({total}).",
        f"  A consumer thread has {schedule.blocks * schedule.tokens // 2} accumulators.",
    ]
    names = ("tokens", schedule.tokens), ("values", schedule.rows)
    bytes_ = STAGE_BYTES, STAGE_BYTES // 2
    memory = [
        Memory(name, f"{stages} stages * {count} rows * {row}", stages * count * row)
        for (name, count), row in zip(names, bytes_, strict=True)
    ]
    metadata = schedule.rows // 64 * layout.words * 512
    memory += [
        Memory("metadata", f"{stages} stages * {metadata}", stages * metadata),
        Memory(
            "staging",
            f"{consumers} * {layout.chunk} tokens * {layout.staged_pitch}",
            schedule.consumers * layout.chunk * layout.staged_pitch,
        ),
        pipeline(stages),
    ]
    arrivals = f"{4 * schedule.consumers} arrivals: every consumer warp"
    named = "named 1" + f" to {schedule.consumers}" * (schedule.consumers > 1)
    barriers = [
        Barrier(
            "full",
            "1 arrival and the stage's bytes",
            "consumers",
            "a stage until it is filled",
        ),
        Barrier("empty", arrivals, "the producer", "a stage while it is read"),
        Barrier(named, "128 threads of a consumer", "all that arrive", "its staging buffer"),
    ]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)
