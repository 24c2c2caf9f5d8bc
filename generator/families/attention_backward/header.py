"""What the head of a backward kernel's source says of warpgroups, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.families._attention import header as shared
from warploom.generator.families.attention_backward.launch import ROW_THREADS
from warploom.generator.families.attention_backward.layout import (
    AttentionBackwardLayout,
)
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec
from warploom.generator.header import Barrier, Memory, counted, header
from warploom.generator.wgmma import TemplateText

LOADED = "1 arrival and the bytes of TMA"


def described(
    spec: AttentionBackwardSpec,
    layout: AttentionBackwardLayout,
    makers: int,
    ticket: str,
    *,
    shares_work: bool,
) -> TemplateText:
    """Return the comment lines of a kernel of which `makers` warps make dropout's bits.

    `ticket` names the part that takes a number for the CTA's work, see `number_part`.
    `shares_work`: whether that work is in shared memory.
    """
    sentences = [*_kernels(spec, layout), *_roles(spec, layout, makers), *_registers(spec, layout)]
    rows = _memory(layout, spec.schedule.warpgroups)
    memory = shared.completed(rows, layout.shared_bytes, "work, " * shares_work + "barriers")
    barriers = [*_barriers(spec, layout, makers), *_exchanges(spec, layout, ticket)]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)


def _kernels(spec: AttentionBackwardSpec, layout: AttentionBackwardLayout) -> Iterator[str]:
    schedule = spec.schedule
    yield "Three kernels, in the order of launch:"
    yield f"  preprocess   a CTA of {ROW_THREADS} threads per tile of q: delta, lse; zeros dq_sum"
    size = schedule.cluster_size
    unit, count = "CTA", layout.parts * schedule.cluster // size
    if size > 1:
        unit = f"cluster{'s' * (count > 1)} of {size} CTAs"
    each = f"{count} {unit}{'s' * (count > 1 and size == 1)} of {schedule.threads} threads"
    yield f"  main         {each} per KV tile and KV head: dk, dv; adds to dq_sum"
    yield f"  postprocess  a CTA of {ROW_THREADS} threads per tile of q: dq from dq_sum"


def _roles(
    spec: AttentionBackwardSpec, layout: AttentionBackwardLayout, makers: int
) -> Iterator[str]:
    schedule = spec.schedule
    yield "Main, 1 CTA per SM; a step is a tile of q and do:"
    yield "Warpgroup 0, the producer: thread 0 issues the TMA loads of k, v, q, do and statistics"
    if schedule.accumulate == "bulk":
        yield "  Warps 1 and 2, the writers: add dq of every second step each, by TMA reductions"
    if spec.operation.dropout:
        which = "Warp 3 makes" if makers == 1 else f"Warps {4 - makers} to 3 make"
        yield f"  {which} random bits for dropout"
    who, rows = shared.consumers(schedule.warpgroups), "64 rows of k and v"
    own = f"scores and gradients of {rows}"
    if schedule.cluster_split == "rows":
        own = f"scores of {layout.q_rows} rows of q, half of the columns of dk and dv"
    each = " each" * (schedule.warpgroups > 1)
    yield f"{who}: {own}{each}, by wgmma"


def _registers(spec: AttentionBackwardSpec, layout: AttentionBackwardLayout) -> Iterator[str]:
    yield shared.registers(
        spec.schedule.warpgroups, layout.producer_registers, layout.register_budget
    )
    gradients, scores = (layout.columns + layout.value_columns) // 2, layout.q_rows // 2
    held = f"; {4 * layout.held_steps} registers of v" * bool(layout.held_steps)
    yield f"  A consumer thread has {gradients} accumulators of dk and dv{held};"
    yield f"  in a step {2 * scores} of scores and dp, then {layout.query_n // 2} of dq"


def _memory(layout: AttentionBackwardLayout, count: int) -> Iterator[Memory]:
    stages, do_stages = counted(layout.stages, "stage"), counted(layout.do_stages, "stage")
    yield Memory("k", f"{layout.kv_rows} rows", layout.kv_bytes)
    yield Memory("v", f"{layout.kv_rows} rows", layout.v_bytes)
    yield Memory("q", f"{stages} * {layout.q_bytes}", layout.stages * layout.q_bytes)
    yield Memory("d_o", f"{do_stages} * {layout.do_bytes}", layout.do_stages * layout.do_bytes)
    ds = f"{counted(layout.ds_stages, 'stage')} * {layout.ds_bytes}"
    yield Memory("ds", ds, layout.ds_stages * layout.ds_bytes)
    if layout.p_bytes:
        yield Memory("p", f"2 stages * {layout.p_bytes // 2}", layout.p_bytes)
    if layout.peer_bytes:
        yield Memory("peer_k", "half of the columns", layout.peer_bytes)
    if layout.sums_bytes:
        yield Memory("sums", "dq of one step in fp32", layout.sums_bytes)
    yield from shared.modifiers(4 * count, layout.staging_bytes, layout.words_bytes)
    each = layout.statistics_bytes
    yield Memory("statistics", f"{stages} * {each}", layout.stages * each)


def _barriers(
    spec: AttentionBackwardSpec, layout: AttentionBackwardLayout, makers: int
) -> Iterator[Barrier]:
    schedule, count = spec.schedule, spec.schedule.warpgroups
    warps = f"{4 * count} arrivals: consumer warps"
    yield Barrier("k_full, v_full", LOADED, "consumers", "k and v until they are loaded")
    yield Barrier("q_full, do_full", LOADED, "consumers", "a stage until it is filled")
    yield Barrier("q_empty", warps, "the producer", "q until dk is there")
    yield Barrier("do_empty", warps, "the producer", "do until dv is there")
    if schedule.cluster_split == "rows":
        yield Barrier("peer_full", "1 arrival and a box of ds", "consumers", "ds of the peer CTA")
        yield Barrier(
            "peer_empty",
            warps.replace("arrivals", "arrivals of the peer"),
            "consumers",
            "ds in the peer until dq is there",
        )
    elif layout.ds_stages == 1:
        yield Barrier("ds_empty", warps, "consumers", "ds until dq is there")
    if schedule.accumulate == "bulk":
        yield Barrier("sums_full", warps, "a writer", "dq until it is in shared memory")
        yield Barrier(
            "sums_empty", "1 arrival of a writer", "consumers", "dq until TMA has read it"
        )
    if spec.operation.dropout:
        yield from shared.words(makers, count)


def _exchanges(
    spec: AttentionBackwardSpec, layout: AttentionBackwardLayout, ticket: str
) -> Iterator[Barrier]:
    schedule, count = spec.schedule, spec.schedule.warpgroups
    if ticket == "ticket_cluster":
        yield Barrier("ticket_full", "1 arrival and 4 bytes", "one thread", "the cluster's ticket")
    yield Barrier(
        "named 1",
        f"{128 * count} threads of consumers",
        "all that arrive",
        "ds until it is written",
    )
    if schedule.cluster == 1:
        names = "named 2" + ", 3" * (count > 1)
        yield Barrier(
            names, "128 threads of a consumer", "all that arrive", "dk until it is staged"
        )
    if schedule.cluster_size > 1:
        what = f"all threads of {schedule.cluster_size} CTAs"
        yield Barrier("cluster", what, "all that arrive", "barriers, and what peers read")
