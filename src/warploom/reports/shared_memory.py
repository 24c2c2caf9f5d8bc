"""The shared-memory map of a kernel: where each buffer of a CTA is, as the compiler laid it out.

The emitted source declares it as one struct. A constant table of offsets and sizes, appended to a
scratch copy of the source, lets the compiler say where its members are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from warploom.reports.cubin import Cubin

_TABLE = "warploom_shared_memory_map"
_STRUCT = re.compile(r"^struct (Shared(?:Storage)?) \{$(.*?)^\};$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"([A-Za-z_]\w*)\s*((?:\[[^\]]*\])*)$")
_NONE = re.compile(r"^\s*(//|$|static_assert|static constexpr|using )")


@dataclass(frozen=True, slots=True)
class Buffer:
    """A member of the struct.

    kind    what it is declared as, without its extents
    stages  of a ring; 1 of what is none
    line    of the source, counted from 1
    says    the comment on its line
    """

    name: str
    kind: str
    offset: int
    bytes: int
    stages: int
    line: int
    says: str

    @property
    def barrier(self) -> bool:
        """Whether it is barriers, of eight bytes each."""
        return "Barrier" in self.kind


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    kind: str
    ring: bool
    line: int
    says: str


def members(source: str) -> tuple[str, list[_Member]]:
    """Return the struct's name and its members in a source; "" and none without a struct."""
    found = _STRUCT.search(source)
    if not found:
        return "", []
    first = source.count("\n", 0, found.start(2)) + 1
    every = [one for row in _rows(found[2], first) for one in _declared(*row)]
    return found[1], every


def probe(source: str) -> str:
    """Return C++ to append to the source: a table of the offsets; "" where there is no struct."""
    name, every = members(source)
    if not every:
        return ""
    rows = [f"unsigned(sizeof({name}))"]
    for one in every:
        size = f"sizeof({name}::{one.name})"
        count = f"unsigned({size} / sizeof({name}::{one.name}[0]))" if one.ring else "1u"
        rows.append(f"unsigned(OFFSET({name}, {one.name})), unsigned({size}), {count}")
    table = ",\n  ".join(rows)
    return f'\nextern "C" __device__ const unsigned {_TABLE}[] = {{\n  {table}}};\n'


def read(source: str, cubin: Cubin) -> tuple[int, list[Buffer]]:
    """Return the struct's bytes and its buffers, from a cubin made of the source and its probe."""
    _, every = members(source)
    content = cubin.variable(_TABLE) or b""
    if not every or len(content) != 4 * (1 + 3 * len(every)):
        return 0, []
    total, *numbers = struct.unpack(f"<{len(content) // 4}I", content)
    triples = zip(*[iter(numbers)] * 3, strict=True)
    return total, [
        Buffer(one.name, one.kind, offset, size, count if one.ring else 1, one.line, one.says)
        for one, (offset, size, count) in zip(every, triples, strict=True)
    ]


def _rows(body: str, first: int) -> Iterator[tuple[str, int, str]]:
    """The declarations of a struct's body, one a line: text, line of the source, comment."""
    for number, row in enumerate(body.split("\n"), first):
        if _NONE.match(row):
            continue
        code, _, says = row.partition("//")
        if code.strip().endswith(";"):
            yield code.strip().removesuffix(";"), number, says.strip()


def _declared(text: str, line: int, says: str) -> Iterator[_Member]:
    """The members of one declaration: `FullBarrier k_full, v_full, q_full[kStages]` has three."""
    head, brace, tail = text.rpartition("}")
    first, *others = _split(tail)
    found = _NAME.search(first)
    if not found:
        return
    kind = f"{head}{brace}{first[: found.start()]}".strip()
    kind = re.sub(r"alignas\(\d+\)\s*", "", kind)
    for one in (first, *others):
        if named := _NAME.search(one.strip()):
            yield _Member(named[1], kind, "Stages" in named[2], line, says)


def _split(text: str) -> list[str]:
    """Declarators between commas that are in no brackets."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[<(") - (letter in "]>)")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
