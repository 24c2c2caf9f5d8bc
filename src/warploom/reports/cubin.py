"""What a cubin's ELF file tells without a disassembler: its entries, their sizes, its variables."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

INSTRUCTION_BYTES = 16
_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_SYMTAB, _NOBITS = 2, 8  # types of sections


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry of a cubin.

    code            its machine code
    static_bytes    of shared memory that its declarations take, next to what a launch asks for
    constant_bytes  of the constant bank that its parameters are in
    """

    name: str
    code: bytes
    static_bytes: int
    constant_bytes: int

    @property
    def instructions(self) -> int:
        """The number of its instructions, with the padding at its end."""
        return len(self.code) // INSTRUCTION_BYTES


@dataclass(frozen=True, slots=True)
class _Section:
    name: str
    kind: int
    offset: int
    size: int
    link: int
    content: bytes


class Cubin:
    """A cubin, read: 64-bit little-endian ELF, as NVRTC writes it."""

    def __init__(self, image: bytes) -> None:
        """Read the sections. ValueError for bytes that are no ELF file."""
        if image[:6] != b"\x7fELF\x02\x01":
            raise ValueError("a cubin must be a 64-bit little-endian ELF file")
        self._sections = _sections(image)
        self._by_name = {one.name: one for one in self._sections}

    @property
    def entries(self) -> list[Entry]:
        """The functions that have a section of their own, in the order of the file."""
        return [
            Entry(
                name=(name := one.name.removeprefix(".text.")),
                code=one.content,
                static_bytes=self._size(f".nv.shared.{name}"),
                constant_bytes=self._size(f".nv.constant0.{name}"),
            )
            for one in self._sections
            if one.name.startswith(".text.")
        ]

    def variable(self, name: str) -> bytes | None:
        """Return the initial bytes of a global variable; None where there is none of this name."""
        for label, index, value, size in self._symbols():
            if label == name and 0 < index < len(self._sections):
                return self._sections[index].content[value : value + size]
        return None

    def _size(self, section: str) -> int:
        found = self._by_name.get(section)
        return found.size if found else 0

    def _symbols(self) -> Iterator[tuple[str, int, int, int]]:
        """Name, section, place in it and size of each symbol."""
        for table in self._sections:
            if table.kind == _SYMTAB:
                names = self._sections[table.link].content
                for fields in _SYMBOL.iter_unpack(table.content):
                    yield _text(names, fields[0]), fields[3], fields[4], fields[5]


def _sections(image: bytes) -> list[_Section]:
    header = _HEADER.unpack_from(image)
    start, count, names_at = header[6], header[12], header[13]
    rows = [_SECTION.unpack_from(image, start + i * _SECTION.size) for i in range(count)]
    contents = [b"" if row[1] == _NOBITS else image[row[4] : row[4] + row[5]] for row in rows]
    return [
        _Section(_text(contents[names_at], row[0]), row[1], row[4], row[5], row[6], content)
        for row, content in zip(rows, contents, strict=True)
    ]


def _text(strings: bytes, offset: int) -> str:
    return strings[offset : strings.index(b"\0", offset)].decode(errors="replace")
