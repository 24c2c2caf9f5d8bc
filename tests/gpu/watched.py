"""What a GPU is seen to run, and what the host does meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import pytest
import torch

CYCLES = 50_000_000  # of a kernel that only waits: tens of milliseconds
Result = TypeVar("Result")


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Let torch raise where the host waits for the GPU."""
    torch.cuda.synchronize()
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def behind_a_kernel(work: Callable[[], Result]) -> Result:
    """Return what `work` does, which must return while the kernel before it still runs."""
    torch.cuda._sleep(CYCLES)
    busy = torch.cuda.Event()
    busy.record()
    result = work()
    assert not busy.query()
    return result


def launched(work: Callable[[], Any]) -> list[str]:
    """Return the names of what `work` runs on the GPU, in order; skip where no profiler sees it."""
    noise = torch.ones(131, device="cuda")
    if not _profiled(lambda: noise + 1):
        pytest.skip("the profiler sees no kernels on this machine")
    return _profiled(work)


def _profiled(work: Callable[[], Any]) -> list[str]:
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return [event.name for event in profile.events() if event.device_type == cuda]


def operator_called(work: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the only operator of Warploom that `work` calls, its arguments and keywords."""
    calls: list[tuple[Any, ...]] = []

    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self,
            function: object,
            types: object,
            args: tuple[object, ...] = (),
            kwargs: object = None,
        ) -> object:
            if "warploom" in str(function):
                calls.append((function, args, kwargs))
            return function(*args, **(kwargs or {}))  # type: ignore[operator, call-overload]

    with Seen():
        work()
    (call,) = calls
    return call
