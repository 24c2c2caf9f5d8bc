"""The comment at the head of a GEMM's source: its warps, registers, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from warploom.generator.architectures import architecture
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families._product.layout import STORE_BUFFERS, ProductLayout
from warploom.generator.families._product.schedule import ProductSchedule
from warploom.generator.wgmma import TemplateText

WIDTH = 112  # characters of a line of a kernel
PAIR_BYTES = 16  # a full and an empty barrier of a stage


class Memory(NamedTuple):
    """A member of SharedStorage and its bytes, as factors with what each counts."""

    name: str
    factors: str
    bytes: int


class Barrier(NamedTuple):
    """A barrier and when a phase of it completes, who waits for that, and what it guards."""

    name: str
    completes: str
    waits: str
    guards: str


def staging(layout: ProductLayout) -> Iterator[Memory]:
    """Yield the buffers that D is staged in, if it is."""
    if layout.store_bytes:
        each = layout.staging_bytes // STORE_BUFFERS
        consumers = counted(layout.consumers, "consumer")
        factors = f"{consumers} * {STORE_BUFFERS} buffers * {each}"
        yield Memory("staging", factors, layout.store_bytes)


def tables(layout: ProductLayout, group_bytes: int) -> Iterator[Memory]:
    """Yield the factors of rows and the table of groups, where a kernel has them."""
    factors = layout.kept_factor_bytes
    if factors:
        yield Memory("factors", f"{factors // 4} rows * 4", factors)
    if group_bytes:
        integers = group_bytes // (4 * (MOST_GROUPS + 1)) * (MOST_GROUPS + 1)
        yield Memory("groups", f"{integers} integers * 4", 4 * integers)


def pipeline(stages: int) -> Memory:
    """Return the shared memory of the barriers of a ring of stages."""
    return Memory("full, empty", f"{stages} stages * 2 * 8", stages * PAIR_BYTES)


def counted(count: int, what: str) -> str:
    """Return `1 consumer` or `2 consumers`."""
    return f"{count} {what}{'s' if count != 1 else ''}"


def schedule_line(schedule: ProductSchedule, by: str, shares: str = "") -> str:
    """Return how D is divided into tiles, and these among CTAs; `by`: what computes a tile."""
    split = schedule.cluster_split_k
    words = (
        f"tile {'x'.join(map(str, schedule.tile))}{by}",
        counted(schedule.consumers, "consumer"),
        shares,
        f"k split over {split} CTAs" * (split > 1),
        f"{schedule.stages} stages",
        schedule.raster,
        f"swizzle {schedule.swizzle_size}",
        f"store {schedule.store}",
    )
    return f"  {', '.join(filter(None, words))}"


def comment(lines: Iterable[str]) -> TemplateText:
    """Return comment lines of a kernel."""
    return TemplateText("".join(f"// {line}\n" for line in lines))


def header(
    arch: str,
    sentences: Sequence[str],
    memory: Sequence[Memory],
    barriers: Sequence[Barrier],
    shared_bytes: int,
) -> TemplateText:
    """Return comment lines: sentences, a map of shared memory, and a table of barriers."""
    used = sum(row.bytes for row in memory)
    limit = architecture(arch).shared_bytes
    lines = [
        *sentences,
        f"Shared memory: {used} bytes; the launch asks for {shared_bytes} of {limit}",
    ]
    lines += [f"  {row.name:11}  {row.factors} = {row.bytes}" for row in memory]
    rows = [Barrier("Barriers", "a phase completes after", "waited for by", "guards"), *barriers]
    lines += [f"{row.name:12}{row.waits:15}{row.guards:29}{row.completes}".rstrip() for row in rows]
    return comment(lines)
