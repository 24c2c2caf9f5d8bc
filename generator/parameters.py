"""A kernel's parameter block, declared once: it renders the C++ struct, says what a launch's values
are, and packs their bytes.

The block is a plain struct passed by value: tensor maps first (128-byte aligned), then pointers,
64-bit integers, 32-bit integers, floats. The C++ text asserts sizeof and every offset, so that a
disagreement is a compile error and never a wrong argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator.launches import Address, Argument, Value
from warploom.generator.tensor_maps import TensorMap

AtT = TypeVar("AtT", contravariant=True, default=object)


_ALIGNMENT = 128  # of CUtensorMap in the headers of CUDA 13; sizeof is rounded up to it


class Kind(Enum):
    """Kinds of field, in the order in which they are laid out: (size in bytes, struct format)."""

    TENSOR_MAP = (128, "128s")
    POINTER = (8, "Q")
    INT64 = (8, "q")
    INT32 = (4, "i")
    FLOAT = (4, "f")

    def __init__(self, size: int, notation: str) -> None:
        self.place = len(type(self).__members__)  # among the kinds
        self.size = size  # bytes
        self.format = notation  # of Python's struct module
        self.alignment = _ALIGNMENT if notation == "128s" else size


@dataclass(frozen=True, slots=True)
class Field(Generic[AtT]):
    """One field: name, kind, the C++ type (of the pointee, for a pointer), what it holds, and that
    as a function of the launch.
    """

    name: str
    kind: Kind
    cpp: str
    meaning: str
    value: Callable[[AtT], Value]

    @property
    def declaration(self) -> str:
        """The C++ member declaration, without its semicolon."""
        return f"{self.cpp}{'*' if self.kind is Kind.POINTER else ''} {self.name}"


def tensor_map(name: str, meaning: str, value: Callable[[AtT], TensorMap]) -> Field[AtT]:
    """A tensor map."""
    return Field(name, Kind.TENSOR_MAP, "cute::TmaDescriptor", meaning, value)


def pointer(name: str, cpp: str, meaning: str, *, tensor: str = "") -> Field:
    """The address of a tensor of C++ type `cpp`, which is called as the field where not told."""
    address = Address(tensor or name)
    return Field(name, Kind.POINTER, cpp, meaning, lambda at: address)


def int64(name: str, meaning: str, value: Callable[[AtT], int]) -> Field[AtT]:
    """A number that may be beyond 32 bits."""
    return Field(name, Kind.INT64, "int64_t", meaning, value)


def int32(name: str, meaning: str, value: Callable[[AtT], int]) -> Field[AtT]:
    """A number within 32 bits, which the family refuses to go beyond."""
    return Field(name, Kind.INT32, "int32_t", meaning, value)


def scalar(name: str, meaning: str) -> Field:
    """The call's host scalar of the same name."""
    return Field(name, Kind.FLOAT, "float", meaning, lambda at: Argument(name))


@dataclass(frozen=True, slots=True)
class ParameterBlock(Generic[AtT]):
    """The fields of one kernel's parameters, as `block` lays them out.

    fields   in the order in which they lie
    offsets  of each field, in bytes
    size     sizeof the struct, in bytes
    packer   packs their values
    """

    fields: tuple[Field[AtT], ...]
    offsets: Mapping[str, int]
    size: int
    packer: struct.Struct

    def values(self, at: AtT) -> dict[str, Value]:
        """What every field holds: one mapping serves all launches that read the block."""
        return {field.name: field.value(at) for field in self.fields}

    def pack(self, values: Mapping[str, bytes | int | float]) -> bytes:
        """Return the block's bytes, padding zeroed; `values` has exactly the fields' names."""
        return self.packer.pack(*[values[field.name] for field in self.fields])


def block(fields: list[Field[AtT]]) -> ParameterBlock[AtT]:
    """Lay out `fields` by kind; fields of one kind keep their order."""
    names = [field.name for field in fields]
    if len(set(names)) != len(names):
        raise ValueError(f"parameter names repeat: {names}")
    ordered = tuple(sorted(fields, key=attrgetter("kind.place")))
    offsets, notation, end = dict[str, int](), "<", 0
    for field in ordered:
        kind = field.kind
        offsets[field.name] = end + -end % kind.alignment
        notation += f"{-end % kind.alignment}x{kind.format}"
        end = offsets[field.name] + kind.size
    packer = struct.Struct(f"{notation}{-end % _ALIGNMENT}x")
    return ParameterBlock(ordered, offsets, packer.size, packer)
