"""The comment at the head of a kernel's source: warps, registers, shared memory and barriers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from warploom.generator.architectures import architecture
from warploom.generator.wgmma import TemplateText


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


def counted(count: int, what: str) -> str:
    """Return `1 consumer` or `2 consumers`."""
    return f"{count} {what}{'s' if count != 1 else ''}"


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
    width = max(11, *(len(row.name) for row in memory))
    lines += [f"  {row.name:{width}}  {row.factors} = {row.bytes}" for row in memory]
    rows = [Barrier("Barriers", "a phase completes after", "waited for by", "guards"), *barriers]
    name, waits, guards = (
        max(least, *(len(getattr(row, column)) + 2 for row in rows))
        for column, least in (("name", 12), ("waits", 15), ("guards", 29))
    )
    lines += [
        f"{row.name:{name}}{row.waits:{waits}}{row.guards:{guards}}{row.completes}".rstrip()
        for row in rows
    ]
    return comment(lines)
