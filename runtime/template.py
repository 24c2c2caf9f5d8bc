"""The parameter blocks of a plan's launches, made once; calls at other addresses copy them.

Encoding a tensor map costs 6 us of the host's time; to replace the address in a copy of it, which
the driver does, half of one. What is kept of a call are objects that the garbage collector does
not follow: thousands of those made it look through the whole process in the midst of a step.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence

from warploom.generator.launches import Address, Argument, Launch, Value
from warploom.generator.parameters import ParameterBlock
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime.tensor_map import encode, replace

# Memory, and the address in it of a pointer to the parameter block of each launch.
Bound = tuple[bytearray, int]

POINTER = 8  # bytes, from one launch's pointer to the next's
_ALIGN = 128  # of CUtensorMap in the headers of CUDA 13
_pointer = struct.Struct("<Q")


class Template:
    """The blocks of `launches`, which all are laid out as `block`, at addresses yet to come.

    `tensors` and `scalars` name, in order, what `bind` is given.
    """

    def __init__(
        self,
        block: ParameterBlock,
        launches: Sequence[Launch],
        tensors: Sequence[str],
        scalars: Sequence[str],
    ) -> None:
        mappings: list[Mapping[str, Value]] = []  # most plans have one, that all launches read
        for launch in launches:
            if launch.parameters not in mappings:
                mappings.append(launch.parameters)
        self._first = -(-POINTER * len(launches) // _ALIGN) * _ALIGN  # the first block begins here
        self._shared = [mappings.index(launch.parameters) for launch in launches]
        self._parts = [_Part(block, each, tensors, scalars) for each in mappings]
        self._size = block.size
        self._counts = len(tensors), len(scalars)

    def bind(self, addresses: Sequence[int], scalars: Sequence[float]) -> Bound:
        """Return the blocks for these addresses and scalars; nothing changes them afterwards.

        Raises ProblemError where TMA cannot address a tensor. There must be a context.
        """
        if (len(addresses), len(scalars)) != self._counts:
            raise ValueError(f"{addresses} and {scalars} are not {self._counts} in number")
        size, parts = self._size, self._parts
        memory = bytearray(self._first + size * len(parts) + _ALIGN)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = -base % _ALIGN
        blocks = start + self._first
        for index, part in enumerate(parts):
            part.write(memory, base, blocks + index * size, addresses, scalars)
        for index, shared in enumerate(self._shared):
            _pointer.pack_into(memory, start + index * POINTER, base + blocks + shared * size)
        return memory, base + start


class _Part:
    """One block: what stays of it, and which fields hold what of a call."""

    def __init__(
        self,
        block: ParameterBlock,
        parameters: Mapping[str, Value],
        tensors: Sequence[str],
        scalars: Sequence[str],
    ) -> None:
        place = {name: index for index, name in enumerate(tensors)}
        self._block = block
        self._maps: list[tuple[str, int, TensorMap, int]] = []
        self._addresses: list[tuple[str, int]] = []
        self._scalars: list[tuple[str, int]] = []
        self._values: dict[str, bytes | int | float] = {}
        self._encoded: dict[str, bytes] | None = None  # at the addresses that came first
        for name, value in parameters.items():
            match value:
                case TensorMap():
                    self._maps.append((name, block.offsets[name], value, place[value.tensor]))
                case Address():
                    self._addresses.append((name, place[value.tensor]))
                case Argument():
                    self._scalars.append((name, list(scalars).index(value.name)))
                case _:
                    self._values[name] = value

    def write(
        self,
        memory: bytearray,
        base: int,
        start: int,
        addresses: Sequence[int],
        scalars: Sequence[float],
    ) -> None:
        """Write the block into `memory`, which lies at `base`, from the byte `start` on."""
        encoded = self._encoded
        if encoded is None:
            encoded = {
                name: encode(request, addresses[index]) for name, _, request, index in self._maps
            }
            self._encoded = encoded  # by several threads at once, maybe: any of them will do
        values = self._values | encoded
        for name, index in self._addresses:
            values[name] = addresses[index]
        for name, index in self._scalars:
            values[name] = scalars[index]
        memory[start : start + self._block.size] = self._block.pack(values)
        for _, offset, request, index in self._maps:
            replace(request, base + start + offset, addresses[index])
