"""What the head of a decode kernel's source says of its warps, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families.attention_decode.layout import DecodeLayout
from warploom.generator.families.attention_decode.schedule import WARP_ROWS, DecodeSpec
from warploom.generator.header import Barrier, Memory, counted, header
from warploom.generator.wgmma import TemplateText

BARRIER_BYTES = 8


def described(spec: DecodeSpec, layout: DecodeLayout) -> TemplateText:
    """Return the comment lines of a kernel."""
    sentences = [*_roles(spec), *_registers(spec, layout)]
    memory, barriers = [*_memory(spec, layout)], [*_barriers(spec)]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)


def _roles(spec: DecodeSpec) -> Iterator[str]:
    schedule = spec.schedule
    per_sm = f"{counted(schedule.ctas_per_sm, 'CTA')} per SM"
    yield f"Launch: {schedule.threads} threads, {per_sm}; grid: as many CTAs as all SMs hold"
    if schedule.cluster > 1:
        yield f"  Clusters of {schedule.cluster} CTAs divide the keys of a sequence and KV head"
    else:
        yield "  CTAs divide the tiles of keys of all sequences; partial results go through global"
        yield "  memory, and whichever CTA of a sequence and KV head comes last adds them up"
    last = schedule.warps - 1
    many = f"Warps 0 {'to' if last > 1 else 'and'} {last}, the consumers"
    who = many if last else "Warp 0, the consumer"
    share = f"1/{schedule.key_warps} of the keys" if schedule.key_warps > 1 else "all keys"
    each = " each" * (last > 0)
    yield f"{who}: mma.sync on {WARP_ROWS} rows of q and {share} of a tile{each}"
    yield f"Warp {schedule.warps}, the producer: its lanes issue the TMA loads of k and v"


def _registers(spec: DecodeSpec, layout: DecodeLayout) -> Iterator[str]:
    operation, schedule = spec.operation, spec.schedule
    ctas = f"{counted(schedule.ctas_per_sm, 'CTA')} of {schedule.threads} threads per SM"
    yield f"Registers per thread: at most {layout.register_budget}, for {ctas}"
    outputs, queries = operation.dim // 2, operation.dim // 4
    others = layout.registers - outputs - queries
    yield (
        f"  A consumer thread needs about {layout.registers}: {outputs} output, {queries} of q, "
        f"{others} scores and others"
    )


def _memory(spec: DecodeSpec, layout: DecodeLayout) -> Iterator[Memory]:
    stages, warps = counted(layout.stages, "stage"), counted(spec.schedule.warps, "warp")
    yield Memory(
        "k, v", f"{stages} * 2 * {layout.stage_bytes}", 2 * layout.stages * layout.stage_bytes
    )
    if layout.scale_bytes:
        yield Memory(
            "scales", f"{stages} * {layout.scale_bytes}", layout.stages * layout.scale_bytes
        )
    merged = f"{warps} * {WARP_ROWS} rows * {layout.merged_columns} columns * 4"
    yield Memory("merged", merged, layout.merged_bytes)
    yield Memory("sums", f"{warps} * {WARP_ROWS} rows * 8", layout.sums_bytes)
    if layout.parts_bytes:
        yield Memory("parts", "what the cluster's CTAs send", layout.parts_bytes)
    barriers = 4 * BARRIER_BYTES
    yield Memory("full, empty", f"{stages} * 4 * {BARRIER_BYTES}", layout.stages * barriers)


def _barriers(spec: DecodeSpec) -> Iterator[Barrier]:
    schedule = spec.schedule
    loaded = "1 arrival and the bytes of TMA"
    if spec.operation.scales == "token":
        loaded = "33 arrivals (32 of scales) and the bytes of TMA"
    warps = f"{counted(schedule.warps, 'arrival')}: consumer warps"
    yield Barrier("k_full, v_full", loaded, "consumers", "a stage until it is filled")
    yield Barrier("k_empty", warps, "the producer", "k until the scores are there")
    yield Barrier("v_empty", warps, "the producer", "v until the output is there")
    whole = f"{32 * schedule.warps} threads of consumers"
    yield Barrier("named 1", whole, "all that arrive", "outputs until they are summed")
    if schedule.cluster > 1:
        yield Barrier(
            "parts_full", "1 arrival and the bytes of all CTAs", "consumers", "parts of an item"
        )
        all_threads = f"all threads of {schedule.cluster} CTAs"
        yield Barrier("cluster", all_threads, "all that arrive", "parts until they are read")
