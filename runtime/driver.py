"""The CUDA driver as this project uses it: checked calls, device limits, a process's rules.

Streams and devices are torch's. Handles die with a fork: a child that inherits them is told so
before the driver is.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
from cuda.bindings import driver

from warploom.errors import DeviceError
from warploom.generator.architectures import Architecture, products, served, serving
from warploom.generator.launches import DeviceLimits

# Handles that stand for a stream of whichever device is current: the legacy default stream, by two
# names, and that of the calling thread (CU_STREAM_LEGACY, CU_STREAM_PER_THREAD).
LEGACY_STREAMS = (0, 1)
PER_THREAD_STREAM = 2
DEFAULT_STREAMS = (*LEGACY_STREAMS, PER_THREAD_STREAM)

_used = False  # whether CUDA was initialised when this process was last forked
_forked = False  # whether this process came of such a fork


def _note_use() -> None:
    global _used
    _used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]


def _note_fork() -> None:
    global _forked
    _forked = _forked or _used


os.register_at_fork(before=_note_use, after_in_child=_note_fork)


def check(result: tuple[Any, ...]) -> Any:  # noqa: ANN401 (as the driver's wrappers are)
    """Return what a driver call returned beside its status, or raise DeviceError."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        refuse_fork()
        _, text = driver.cuGetErrorString(status)
        raise DeviceError(
            f"{status.name}: {text.decode() if text else 'unknown CUDA error'}",
            fix="an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to find it",
        )
    return values[0] if len(values) == 1 else tuple(values)


def refuse_fork() -> None:
    """Raise DeviceError in a process that was forked after CUDA was used."""
    if _forked:
        raise DeviceError(
            "a process forked after CUDA was initialised",
            rule="driver handles do not survive a fork",
            fix='start workers with multiprocessing.get_context("spawn")',
        )


def require_usable(device: int) -> Architecture:
    """Return the architecture of `device`; DeviceError where nothing can be built or loaded now."""
    refuse_fork()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        capturing = torch.cuda.is_current_stream_capturing()
    if capturing:
        raise DeviceError(
            f"the current stream of cuda:{device} is capturing a CUDA graph",
            rule="a kernel is compiled, loaded and planned outside of capture",
            fix="call once with these shapes, or warploom.warmup(path), before the capture",
        )
    capability = torch.cuda.get_device_capability(device)
    architecture = serving(capability)
    if architecture is None:
        raise DeviceError(
            f"cuda:{device} {torch.cuda.get_device_name(device)}, compute capability {capability}",
            rule=f"kernels exist for {served()}",
            fix=f"run on an {products()}, or pass CPU tensors for the reference",
        )
    return architecture


@cache
def limits(device: int) -> DeviceLimits:
    """What launches depend on of `device`. Raises DeviceError where none can be made there."""
    arch = require_usable(device).name
    properties = torch.cuda.get_device_properties(device)
    return DeviceLimits(properties.multi_processor_count, properties.name, arch=arch)


os.register_at_fork(after_in_child=limits.cache_clear)


def enter(device: int) -> None:
    """Make torch's context on `device` current in this thread, if it is new to CUDA."""
    if int(check(driver.cuCtxGetCurrent())):
        return
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))))
    check(driver.cuCtxSetCurrent(context))


def current_stream(device: int) -> int:
    """The handle of torch's current stream on `device`.

    torch.cuda.current_stream(device).cuda_stream is the same at ten times the cost (it makes two
    objects); the code that torch.compile generates uses this one too.
    """
    try:
        return torch._C._cuda_getCurrentRawStream(device)
    except RuntimeError:
        refuse_fork()
        raise
