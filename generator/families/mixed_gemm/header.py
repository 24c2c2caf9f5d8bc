"""What the template of a kernel is rendered with, and what the head of its source says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import gate_of
from warploom.generator.families._product import template
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families._product.template import (
    pipeline,
    schedule_line,
    staging,
    tables,
)
from warploom.generator.families.mixed_gemm.launch import FEW_WAVES
from warploom.generator.families.mixed_gemm.layout import (
    LANES,
    LOADING_REGISTERS,
    MixedGemmLayout,
    mixed_gemm_layout,
)
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSchedule, MixedGemmSpec
from warploom.generator.header import Barrier, Memory, comment, counted, header
from warploom.generator.wgmma import TemplateText, wgmma


def summary(spec: MixedGemmSpec) -> TemplateText:
    """Return the comment lines that say what a kernel computes, and by which schedule."""
    operation, schedule = spec.operation, spec.schedule
    steps = ", ".join(step.token for step in operation.epilogue)
    product = f"epilogue(A[m, k] W[n, k]): {steps}" if steps else "A[m, k] W[n, k]"
    scales = f"of groups of {operation.group}" if operation.group else "per channel"
    accumulator = "int32" if element(operation.a).is_integer else "fp32"
    shares, groups = schedule.warp_split_k, "rows of A and D in groups that end at offsets"
    lines = [
        f"D[m, n] = {product}",
        f"  A {operation.a}, W {operation.b} with scales {operation.scale} {scales}, applied to "
        f"{schedule.scaled}, accumulated in {accumulator}, D {operation.d} row",
        schedule_line(
            schedule, f" by {schedule.multiply}", f"of which {shares} share k" * (shares > 1)
        ),
        "  computed as D' = W A': rows of the tensor core's tile are rows of W, columns of D",
    ]
    if operation.groups == "rows":
        lines.append(f"  {groups} in device memory, and a W for each")
    if schedule.stream_k:
        lines.append(f"  stream-K: CTAs split the k of all tiles of less than {FEW_WAVES} waves;")
        lines.append("  else of those that do not fill a wave, and of one wave before these")
    return comment(lines)


def described(spec: MixedGemmSpec, layout: MixedGemmLayout) -> TemplateText:
    """Return the comment lines of a kernel."""
    schedule = spec.schedule
    sentences = [*_roles(schedule), *_registers(schedule, layout)]
    memory, barriers = [*_memory(schedule, layout)], [*_barriers(schedule, layout)]
    return header(spec.arch, sentences, memory, barriers, layout.shared_bytes)


def _roles(schedule: MixedGemmSchedule) -> Iterator[str]:
    warps = 4 * schedule.consumers
    rows = schedule.rows // schedule.sharing
    share = f" and 1/{schedule.warp_split_k} of k" * (schedule.warp_split_k > 1)
    who = f"Warps 0 to {warps - 1}, {counted(schedule.consumers, 'consumer')} of 4 warps"
    yield f"{who}: {schedule.multiply} on {rows} dequantized rows of W{share}, then the epilogue."
    yield f"Warps {warps} and {warps + 1}, the producer: one thread copies slabs of W, one loads A."


def _registers(schedule: MixedGemmSchedule, layout: MixedGemmLayout) -> Iterator[str]:
    budget = layout.register_budget
    if schedule.reallocates:
        launched, loading = LANES // 3 // 8 * 8, LOADING_REGISTERS
        total = f"{loading} + 2 * {budget} = 3 * {launched}"
        moved = f"setmaxnreg: producer {loading}, consumers {budget} ({total})"
        yield f"Registers per thread: {launched} at launch; {moved}."
    else:
        ctas = f"{counted(schedule.ctas_per_sm, 'CTA')} of {schedule.threads} threads per SM"
        yield f"Registers per thread: at most {budget}, for {ctas}."
    count = 4 * layout.fragments
    chunk = f"{layout.chunk_columns} columns"
    yield f"  A consumer thread has {count} accumulators; the epilogue takes {chunk} at once."


def _memory(schedule: MixedGemmSchedule, layout: MixedGemmLayout) -> Iterator[Memory]:
    stages = counted(layout.stages, "stage")
    a = f"{counted(layout.panels, 'panel')} * {layout.a.bytes}"
    yield Memory("a", f"{stages} * {a}", layout.stages * layout.panels * layout.a.bytes)
    b = f"{counted(layout.slabs, 'slab')} * {layout.slab.bytes}"
    yield Memory("b", f"{stages} * {b}", layout.stages * layout.slabs * layout.slab.bytes)
    yield from staging(layout)
    if layout.exchange_bytes:
        yield Memory("shared_sums", _shared_sums(schedule, layout), layout.exchange_bytes)
    yield from tables(layout, layout.group_bytes)
    yield pipeline(layout.stages)


def _shared_sums(schedule: MixedGemmSchedule, layout: MixedGemmLayout) -> str:
    """The bytes that other consumers leave: all but one of those that share a tile's k."""
    others = schedule.sources - 1
    each = layout.exchange_bytes // (schedule.consumers * others)
    return f"{counted(schedule.consumers, 'consumer')} * {counted(others, 'other')} * {each}"


def _barriers(schedule: MixedGemmSchedule, layout: MixedGemmLayout) -> Iterator[Barrier]:
    yield Barrier(
        "full",
        "2 arrivals and the stage's bytes",
        "consumers",
        "a stage until it is filled",
    )
    yield Barrier(
        "empty",
        f"{4 * schedule.consumers} arrivals: every consumer warp",
        "the producer",
        "a stage while it is read",
    )
    if schedule.cluster_split_k > 1:
        yield Barrier(
            "exchanged", "the bytes of other CTAs' partial sums", "consumers", "the reduction"
        )
        size = counted(schedule.cluster_size, "CTA")
        yield Barrier(
            "cluster", f"all threads of {size}", "all that arrive", "peers' shared memory"
        )
    elif schedule.warp_split_k > 1:
        threads = 128 * schedule.warp_split_k
        yield Barrier(
            "named 1 on",
            f"{threads} threads with the same rows",
            "all that arrive",
            "the reduction",
        )
    if layout.store_bytes:
        names = "named 1" + ", 2" * (schedule.consumers > 1)
        yield Barrier(names, "128 threads of a consumer", "all that arrive", "its staging buffers")
    if layout.kept_factor_bytes:
        yield Barrier("named 6", "all consumer threads", "all that arrive", "factors of rows")


# ---- What the template is rendered with ----------------------------------------------------------


def context(spec: MixedGemmSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    a = element(operation.a)
    decoded = operation.weight.decoded_as or operation.b
    by_wgmma, columns = schedule.multiply == "wgmma", schedule.columns // max(1, schedule.lookahead)
    return {
        **template.context(
            operation,
            schedule,
            mixed_gemm_layout(operation, schedule),
            groups=operation.groups,
            exchanged=gate_of(operation.epilogue) is not None,
        ),
        "a": a,
        "decode": f"{decoded}_{operation.a}{'_scaled' if schedule.scaled == 'weights' else ''}",
        "wgmma": wgmma(a, a, columns, a_in_registers=True, has_k=False) if by_wgmma else "",
        "promoted": schedule.scaled == "sums" and operation.promoted > 0,
        "reallocates_registers": schedule.reallocates,
        "loading_registers": LOADING_REGISTERS,
        "shared_sums": schedule.sources > 1,
        "most_groups": MOST_GROUPS,
        "summary": summary(spec),
        "header": described(spec, mixed_gemm_layout(operation, schedule)),
    }
