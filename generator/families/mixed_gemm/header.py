"""What the head of a kernel's source says."""

from __future__ import annotations

from collections.abc import Iterator

from warploom.generator.elements import element
from warploom.generator.families._product.groups import FEW_WAVES
from warploom.generator.families._product.template import (
    pipeline,
    schedule_line,
    staging,
    tables,
)
from warploom.generator.families.mixed_gemm.layout import (
    LANES,
    LOADING_REGISTERS,
    MixedGemmLayout,
)
from warploom.generator.families.mixed_gemm.schedule import MixedGemmSchedule, MixedGemmSpec
from warploom.generator.header import Barrier, Memory, comment, counted, header
from warploom.generator.wgmma import TemplateText


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
