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
from warploom.generator.launches import DeviceLimits

_forked = False


def _mark_forked() -> None:
    global _forked
    _forked = torch.cuda.is_initialized() or _forked  # type: ignore[no-untyped-call]


os.register_at_fork(after_in_child=_mark_forked)


def check(result: tuple[Any, ...]) -> Any:  # noqa: ANN401 (as the driver's wrappers are)
    """Return what a driver call returned beside its status, or raise DeviceError."""
    status, *values = result
    if status != driver.CUresult.CUDA_SUCCESS:
        _refuse_fork()
        _, text = driver.cuGetErrorString(status)
        raise DeviceError(
            f"{status.name}: {text.decode() if text else 'unknown CUDA error'}",
            fix="an earlier kernel may have failed: run with CUDA_LAUNCH_BLOCKING=1 to find it",
        )
    return values[0] if len(values) == 1 else tuple(values)


def _refuse_fork() -> None:
    if _forked:
        raise DeviceError(
            "a process forked after CUDA was initialised",
            rule="driver handles do not survive a fork",
            fix='start workers with multiprocessing.get_context("spawn")',
        )


def require_usable(device: int) -> None:
    """Raise DeviceError where kernels cannot be built or loaded now on `device`."""
    _refuse_fork()
    torch.cuda.init()  # type: ignore[no-untyped-call]
    if torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            "the current stream is capturing a CUDA graph",
            rule="a kernel is compiled, loaded and planned outside of capture",
            fix="call once with these shapes, or warploom.warmup(path), before the capture",
        )
    capability = torch.cuda.get_device_capability(device)
    if capability != (9, 0):
        raise DeviceError(
            f"cuda:{device} {torch.cuda.get_device_name(device)}, compute capability {capability}",
            rule="kernels are for sm_90a: compute capability (9, 0)",
            fix="run on an H100, H200 or GH200, or pass CPU tensors for the reference",
        )


@cache
def limits(device: int) -> DeviceLimits:
    """What launches depend on of `device`. Raises DeviceError where none can be made there."""
    require_usable(device)
    return DeviceLimits(torch.cuda.get_device_properties(device).multi_processor_count)


os.register_at_fork(after_in_child=limits.cache_clear)


def enter(device: int) -> None:
    """Make torch's context on `device` current in this thread, which may be new to CUDA."""
    context = check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(device))))
    check(driver.cuCtxSetCurrent(context))


def current_stream(device: int) -> int:
    """The handle of torch's current stream on `device`.

    torch.cuda.current_stream(device).cuda_stream is the same at ten times the cost (it makes two
    objects); the code that torch.compile generates uses this one too.
    """
    return torch._C._cuda_getCurrentRawStream(device)
