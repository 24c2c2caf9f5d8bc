"""Kernels: a spec's cubin, built or found in the store, loaded once for all devices."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from cuda.bindings import driver

from warploom.errors import DeviceError
from warploom.generator import build as building
from warploom.generator.artifact import Artifact
from warploom.generator.launches import Launch
from warploom.generator.locks import fork_lock
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store
from warploom.runtime.counters import counters
from warploom.runtime.driver import DEFAULT_STREAMS, check, enter, refuse_fork, require_usable

_kernels: dict[KernelSpec, Kernel] = {}
_building: dict[KernelSpec, threading.Lock] = {}  # a kernel is built once, beside others
_loading = fork_lock()

os.register_at_fork(after_in_child=_kernels.clear)  # their handles are the parent's
os.register_at_fork(after_in_child=_building.clear)


@cache
def store() -> Store:
    """The process's kernel store."""
    return Store.default()


@dataclass(frozen=True, slots=True)
class Prepared:
    """One launch on one stream, ready to go: immutable, so that any thread may fire it any time.

    launch    is given the address of a pointer to the parameter block, and 0
    device    the stream's
    roams     launches on a default stream: that of whichever device is current
    """

    launch: Callable[[int, int], tuple[driver.CUresult]]
    device: int
    roams: bool

    def fire(self, arguments: int) -> None:
        """Launch with the parameter block whose address lies at the address `arguments`."""
        if self.roams:
            refuse_fork()  # in our words: torch would be the first to notice
            if torch._C._cuda_getDevice() != self.device:
                with torch.cuda.device(self.device):
                    self.fire(arguments)
                return
        (status,) = self.launch(arguments, 0)
        if status:  # the driver's success is 0
            if status == driver.CUresult.CUDA_ERROR_INVALID_CONTEXT:  # a thread new to CUDA
                enter(self.device)
                (status,) = self.launch(arguments, 0)
            check((status,))


@dataclass
class Kernel:
    """One spec's loaded cubin; its handles serve every device, attributes are set per device."""

    spec: KernelSpec
    artifact: Artifact
    _library: driver.CUlibrary | None = field(default=None, repr=False)
    _handles: dict[str, driver.CUkernel] = field(default_factory=dict, repr=False)
    _ready: set[tuple[str, int]] = field(default_factory=set, repr=False)

    def _handle(self, entry: str) -> driver.CUkernel:
        if self._library is None:
            self._library = check(
                driver.cuLibraryLoadData(self.artifact.cubin, [], [], 0, [], [], 0)
            )
            counters.add("loads")
        if entry not in self._handles:
            self._handles[entry] = check(driver.cuLibraryGetKernel(self._library, entry.encode()))
        return self._handles[entry]

    def load(self, entry: str, device: int) -> driver.CUkernel:
        """Return the entry's handle, ready on `device` (loaded now, not at the first launch)."""
        if (entry, device) in self._ready:
            return self._handles[entry]
        with _loading:
            _require(self.spec, device)
            handle = self._handle(entry)
            attribute = driver.CUfunction_attribute
            static = attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES
            maximum = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            # The limit holds for what the kernel declares and what a launch asks for, together.
            declared = check(driver.cuKernelGetAttribute(static, handle, device))
            room = self.spec.architecture.shared_bytes - declared
            check(driver.cuKernelSetAttribute(maximum, room, handle, device))
            with torch.cuda.device(device):
                enter(device)
                check(driver.cuKernelGetFunction(handle))
            self._ready.add((entry, device))
            return handle

    def prepare(self, launch: Launch, device: int, stream: int) -> Prepared:
        """Configure a launch on a stream of `device`, whatever its parameters will be."""
        handle = self.load(launch.entry, device)
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
        config.sharedMemBytes, config.hStream = launch.shared_bytes, driver.CUstream(stream)
        kinds = driver.CUlaunchAttributeID
        cluster, early = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
        cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dimensions = cluster.value.clusterDim
        dimensions.x, dimensions.y, dimensions.z = launch.cluster, 1, 1
        early.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        config.attrs = [cluster, early] if launch.early else [cluster]
        config.numAttrs = len(config.attrs)
        fire = partial(driver.cuLaunchKernelEx, config, driver.CUfunction(int(handle)))
        roams = stream in DEFAULT_STREAMS and torch.cuda.device_count() > 1
        return Prepared(fire, device, roams)


def kernel(spec: KernelSpec, device: int | None = None) -> Kernel:
    """Return the spec's kernel, building it when neither this process nor the store has it.

    With a device, raises DeviceError first where nothing may be built or loaded (during capture,
    after a fork, on another architecture).
    """
    found = _kernels.get(spec)
    if found is not None:
        return found
    if device is not None:
        _require(spec, device)
    with _building.setdefault(spec, threading.Lock()):
        if spec not in _kernels:
            _kernels[spec] = Kernel(spec, building.build(spec, store()))
    return _kernels[spec]


def _require(spec: KernelSpec, device: int) -> None:
    """Raise DeviceError where `spec` cannot be built or loaded now for `device`."""
    found = require_usable(device)
    if found.name != spec.arch:
        raise DeviceError(
            f"kernel {spec.name} on cuda:{device}, which is {found.name}",
            rule="a kernel must be for the architecture of the GPU that it runs on",
            fix=f"leave spec out, or pass one for {found.name}",
        )
