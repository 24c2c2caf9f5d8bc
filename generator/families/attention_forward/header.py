"""What the head of a forward kernel's source says of its warpgroups, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._attention import header as shared
from warploom.generator.families.attention_forward.layout import AttentionLayout
from warploom.generator.families.attention_forward.schedule import AttentionSpec
from warploom.generator.header import Barrier, Memory, counted, header
from warploom.generator.wgmma import WGMMA_M, TemplateText

GRIDS = {
    "single": "one CTA per tile of q",
    "static": "one CTA per SM, to which tiles of q are dealt in advance",
    "dynamic": "one CTA per SM, each of which takes the next tile of q from a counter",
}


def described(spec: AttentionSpec, layout: AttentionLayout, makers: int) -> TemplateText:
    """Return the comment lines of a kernel of which `makers` warps make dropout's bits."""
    sentences = [*_roles(spec, makers), *_registers(spec, layout)]
    memory = shared.completed(_memory(layout), layout.shared_bytes, "work, barriers")
    barriers = [*_barriers(spec, layout, makers)]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)


def _roles(spec: AttentionSpec, makers: int) -> Iterator[str]:
    schedule = spec.schedule
    yield f"Launch: {schedule.threads} threads, 1 CTA per SM; grid: {GRIDS[schedule.scheduler]}"
    making = f"; warps {4 - makers} to 3 make random bits for dropout" * spec.operation.dropout
    yield f"Warpgroup 0, the producer: thread 0 issues the TMA loads of q, k and v{making}"
    each = " each" * (schedule.warpgroups > 1)
    who = shared.consumers(schedule.warpgroups)
    yield f"{who}: scores, softmax and output of {WGMMA_M} rows of q{each}, by wgmma"
    if schedule.overlap:
        yield "  Overlap: S(n) = q k^T and O += P(n + 1) v are in flight together, and the softmax"
        yield "  of S(n) runs under the latter; KV tiles n are visited from the last to the first"
    if schedule.pingpong:
        yield "  Ping-pong: consumers issue wgmma in turns; one's softmax runs under another's MMAs"


def _registers(spec: AttentionSpec, layout: AttentionLayout) -> Iterator[str]:
    operation, schedule = spec.operation, spec.schedule
    producer, budget = layout.producer_registers, layout.register_budget
    yield shared.registers(schedule.warpgroups, producer, budget)
    output, bits = operation.value_dim // 2, operation.element_of("v").bits
    held = {
        "scores": schedule.kv_tile // 2,
        "output": output,
        "product of one tile": output if operation.promoted else 0,
        f"weights in {bits} bits": schedule.kv_tile * bits // 64,
    }
    yield shared.needed(layout.registers, held)


def _memory(layout: AttentionLayout) -> Iterator[Memory]:
    count, stages = layout.warpgroups, counted(layout.stages, "stage")
    q = f"{counted(layout.q_stages, 'stage')} * {counted(count, 'consumer')} * {layout.q_bytes}"
    yield Memory("q", q, layout.q_stages * count * layout.q_bytes)
    yield Memory("k", f"{stages} * {layout.kv_bytes}", layout.stages * layout.kv_bytes)
    yield Memory("v", f"{stages} * {layout.v_bytes}", layout.stages * layout.v_bytes)
    yield from shared.modifiers(4 * count, layout.staging_bytes, layout.words_bytes)


def _barriers(spec: AttentionSpec, layout: AttentionLayout, makers: int) -> Iterator[Barrier]:
    count, dropout = spec.schedule.warpgroups, spec.operation.dropout
    loaded = "1 arrival and the bytes of TMA"
    yield Barrier("q_full", loaded, "its consumer", "q and work of a consumer")
    read = "4 arrivals: warps" + f" (consumer 0: {makers} makers too)" * dropout
    yield Barrier("q_empty", read, "the producer", "q until the last scores are there")
    yield Barrier("k_full, v_full", loaded, "consumers", "a stage until it is filled")
    warps = f"{4 * count} arrivals: consumer warps"
    yield Barrier("k_empty", warps, "the producer", "k until the scores are there")
    yield Barrier("v_empty", warps, "the producer", "v until the output is there")
    if dropout:
        yield from shared.words(makers, count)
    if spec.schedule.pingpong:
        yield Barrier(
            "named 4, 5" if count == 2 else f"named 4 to {3 + count}",
            "256 threads of two consumers",
            "one consumer",
            "MMAs: one consumer issues at a time",
        )
