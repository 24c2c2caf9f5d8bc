"""Launches of one spec for one problem, bound to addresses once and then only fired.

It knows no family. What it keeps is launch configurations, by stream, and parameter blocks, by
address, stream and scalars, in bounded maps; never anything derived from contents. Workspaces are
allocated per call on the current stream, but for those that are kept (see warploom.runtime.kept).
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from cuda.bindings import driver as cuda

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.launches import Address, Argument, Launch, Value, Workspace
from warploom.generator.locks import remember
from warploom.generator.parameters import ParameterBlock
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import LARGEST_EXTENT, PITCH_BYTES, PITCH_END, TensorMap
from warploom.runtime import driver, kept
from warploom.runtime.counters import launch_numbers
from warploom.runtime.kernel import Kernel, Prepared, kernel
from warploom.runtime.operands import maker, without_memory

# ---- Tensor maps ---------------------------------------------------------------------------------

_SWIZZLES = {
    128: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
    64: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    32: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    16: cuda.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
}
_PROMOTIONS = {
    0: cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
    64: cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
    128: cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
    256: cuda.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
}
_MAP_BYTES = 128  # sizeof(CUtensorMap)


def encode(request: TensorMap, pointer: int) -> bytes:
    """Return the 128 bytes of the tensor map of `request` over the tensor at `pointer`.

    Raises ProblemError where TMA cannot address the tensor; dispatch never asks for that, but for
    extents and pitches that are too large.
    """
    if not request.fits(pointer):
        raise _refused(request, pointer)
    data_type = getattr(
        cuda.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{request.element.tensor_map}"
    )
    result = cuda.cuTensorMapEncodeTiled(
        data_type,
        len(request.extents),
        pointer,
        [*map(cuda.cuuint64_t, request.extents)],
        [*map(cuda.cuuint64_t, request.pitches)],
        [*map(cuda.cuuint32_t, request.box)],
        [cuda.cuuint32_t(1)] * len(request.extents),
        cuda.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLES[request.span],
        _PROMOTIONS[request.promotion],
        cuda.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if result[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:  # whatever else TMA does not take
        raise _refused(request, pointer)
    if result[0]:
        driver.check(result)
    return ctypes.string_at(result[1].getPtr(), _MAP_BYTES)


def replace(request: TensorMap, place: int, pointer: int) -> None:
    """Let the tensor map of `request` that lies at the address `place` be one of `pointer`.

    Its bytes are then those of `encode`, at a small part of the host's time. Raises ProblemError
    where TMA cannot address the tensor there.
    """
    if pointer % PITCH_BYTES:  # all else that `fits` asks does not depend on the address
        raise _refused(request, pointer)
    result = cuda.cuTensorMapReplaceAddress(cuda.CUtensorMap(place), pointer)
    if result[0]:  # the driver's success is 0
        if result[0] == cuda.CUresult.CUDA_ERROR_INVALID_VALUE:
            raise _refused(request, pointer)
        driver.check(result)


def _refused(request: TensorMap, pointer: int) -> ProblemError:
    return ProblemError(
        f"{request.tensor} at {pointer:#x}, strides {request.pitches} bytes, "
        f"sizes {request.extents}",
        rule=f"must be readable by TMA: address and strides multiples of {PITCH_BYTES} bytes, "
        f"strides below {PITCH_END} bytes, sizes of 1 to {LARGEST_EXTENT}",
        fix="pad the rows or copy the tensor to smaller strides; leave `spec` out so that a "
        "fitting kernel is chosen",
    )


# ---- Parameter blocks ----------------------------------------------------------------------------
#
# Those of a plan's launches are made once; calls at other addresses copy them. To encode a tensor
# map costs 6 us of the host's time; to replace the address in a copy of it, which the driver does,
# half of one. What is kept of a call are objects that the garbage collector does not follow:
# thousands of those made it look through the whole process in the midst of a step.

# Memory, and the address in it of a pointer to the parameter block of each launch.
Bound = tuple[bytearray, int]

POINTER = 8  # bytes, from one launch's pointer to the next's
_MAP_ALIGN = 128  # of CUtensorMap in the headers of CUDA 13
_pointer = struct.Struct("<Q")


@dataclass(slots=True)
class _Part:
    """One block: what stays of it, and which fields hold what of a call.

    maps       name, offset in the block, request, and index among the tensors
    addresses, scalars   name, and index among the tensors or scalars
    values     what stays
    encoded    the tensor maps at the addresses that came first
    """

    maps: list[tuple[str, int, TensorMap, int]] = field(default_factory=list)
    addresses: list[tuple[str, int]] = field(default_factory=list)
    scalars: list[tuple[str, int]] = field(default_factory=list)
    values: dict[str, bytes | int | float] = field(default_factory=dict)
    encoded: dict[str, bytes] | None = None


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
        self._first = -(-POINTER * len(launches) // _MAP_ALIGN) * _MAP_ALIGN  # block begins here
        self._shared = [mappings.index(launch.parameters) for launch in launches]
        self._parts = [_Part() for _ in mappings]
        self._block, self._size = block, block.size
        self._counts = len(tensors), len(scalars)
        for part, parameters in zip(self._parts, mappings, strict=True):
            for name, value in parameters.items():
                match value:
                    case TensorMap():
                        offset, place = block.offsets[name], tensors.index(value.tensor)
                        part.maps.append((name, offset, value, place))
                    case Address():
                        part.addresses.append((name, tensors.index(value.tensor)))
                    case Argument():
                        part.scalars.append((name, scalars.index(value.name)))
                    case _:
                        part.values[name] = value

    def bind(self, addresses: Sequence[int], scalars: Sequence[float]) -> Bound:
        """Return the blocks for these addresses and scalars; nothing changes them afterwards.

        Raises ProblemError where TMA cannot address a tensor. There must be a context.
        """
        if (len(addresses), len(scalars)) != self._counts:
            raise ValueError(f"{addresses} and {scalars} are not {self._counts} in number")
        size, parts = self._size, self._parts
        memory = bytearray(self._first + size * len(parts) + _MAP_ALIGN)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = -base % _MAP_ALIGN
        blocks = start + self._first
        for part, place in zip(parts, count(blocks, size), strict=False):
            encoded, others = part.encoded, part.maps  # whose addresses are others
            if encoded is None:
                encoded = {name: encode(map_, addresses[index]) for name, _, map_, index in others}
                part.encoded, others = encoded, []  # by several threads, maybe: any will do
            values = part.values | encoded
            for name, index in part.addresses:
                values[name] = addresses[index]
            for name, index in part.scalars:
                values[name] = scalars[index]
            memory[place : place + size] = self._block.pack(values)
            for _, offset, request, index in others:
                replace(request, base + place + offset, addresses[index])
        for index, shared in enumerate(self._shared):
            _pointer.pack_into(memory, start + index * POINTER, base + blocks + shared * size)
        return memory, base + start


# ---- Plans ---------------------------------------------------------------------------------------

Launches = tuple[Prepared, ...]
Launched = tuple[Launches, Bound]

_ALIGN = 128  # bytes, of a workspace
_BOUND = 1 << 14  # calls kept over all plans, by addresses, stream and scalars: 1.3 KB each
_STREAMS = 64  # of a plan, that launches are kept configured for
# Ordered: the oldest of a dict is found behind all places of those that went before it.
_bound: OrderedDict[tuple[object, ...], Bound] = OrderedDict()
_numbers = count()

os.register_at_fork(after_in_child=_bound.clear)


@dataclass
class LaunchPlan:
    """The launches of one problem on one device.

    `tensors` and `scalars` name, in order, what a call hands over; workspaces come after them.
    """

    spec: KernelSpec
    device: int
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    launches: Sequence[Launch]
    workspaces: Sequence[Workspace]
    kernel: Kernel

    def __post_init__(self) -> None:
        self._number = next(_numbers)  # of no other plan of the process
        self._place = torch.device("cuda", self.device)
        self._own = threading.local()
        self._make_room: Callable[[], torch.Tensor] | None = None  # for a call's workspaces
        self._room_bytes = self._kept_bytes = 0
        self._offsets, self._kept_offsets = dict[str, int](), dict[str, int]()  # in those bytes
        for workspace in self.workspaces:
            size = -(-workspace.bytes // _ALIGN) * _ALIGN
            if workspace.kept:
                self._kept_offsets[workspace.tensor] = self._kept_bytes
                self._kept_bytes += size
            else:
                self._offsets[workspace.tensor] = self._room_bytes
                self._room_bytes += size
        self._configured: dict[int, Launches] = {}  # by stream
        self._template: Template | None = None

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., object],
        *given: object,
    ) -> Launched:
        """Launch on the current stream of the plan's device; nothing is waited for.

        `check`, called with what is `given` after it, raises where these addresses or scalars must
        not be used; it is called the first time that they come up. Returns what was launched.
        """
        stream, room, zeros = driver.current_stream(self.device), 0, 0
        if self._room_bytes:
            held = self._room(stream)  # until all is launched: what comes next waits its turn
            room = held.data_ptr()
        if self._kept_bytes:
            zeros = kept.zeros(self.device, stream, self._kept_bytes)
        key = (self._number, stream, room, zeros, addresses, scalars)
        bound = _bound.get(key)
        if bound is None:
            check(*given)
            bound = self._bind(addresses, room, zeros, scalars)
            remember(_bound, key, bound, _BOUND)
        launches = self._configured.get(stream)
        if launches is None:
            prepare = self.kernel.prepare
            launches = tuple([prepare(one, self.device, stream) for one in self.launches])
            remember(self._configured, stream, launches, _STREAMS)
        arguments = bound[1]
        for launch in launches:
            launch.fire(arguments)
            next(launch_numbers)
            arguments += POINTER
        return launches, bound

    def _room(self, stream: int) -> torch.Tensor:
        """Memory for the workspaces of one call.

        On the per-thread default stream, which torch takes for one stream, it would hand on to
        another thread what a kernel of this one still uses; so a thread keeps its own there.
        """
        make = self._make_room
        if make is None:
            make = maker(without_memory((self._room_bytes,), torch.uint8, self._place))
            self._make_room = make
        if stream != driver.PER_THREAD_STREAM or torch.cuda.is_current_stream_capturing():
            return make()
        own: dict[str, torch.Tensor] = self._own.__dict__
        if "room" not in own:
            own["room"] = make()
        return own["room"]

    def _bind(
        self, addresses: tuple[int, ...], room: int, zeros: int, scalars: tuple[float, ...]
    ) -> Bound:
        driver.enter(self.device)  # there are no tensor maps without a context
        template = self._template
        if template is None:
            tensors = (*self.tensors, *self._offsets, *self._kept_offsets)
            block = family(self.spec.operation.family).parameters(self.spec)
            self._template = template = Template(block, self.launches, tensors, self.scalars)
        addresses += tuple([room + offset for offset in self._offsets.values()])
        addresses += tuple([zeros + offset for offset in self._kept_offsets.values()])
        return template.bind(addresses, scalars)


def plan_launches(
    spec: KernelSpec,
    problem: object,
    device: int,
    tensors: tuple[str, ...],
    scalars: tuple[str, ...],
) -> LaunchPlan:
    """Lay out the launches of `problem`, build or find the spec's kernel, and load it."""
    described = family(spec.operation.family)
    launches = described.launches(spec, problem, driver.limits(device))  # or it is refused
    built = kernel(spec, device)
    for launch in launches:
        built.load(launch.entry, device)
    workspaces = described.workspaces(spec, problem)
    return LaunchPlan(spec, device, tensors, scalars, launches, workspaces, built)
