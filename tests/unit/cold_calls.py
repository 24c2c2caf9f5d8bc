"""New calls on a GPU that is pretended: what they walk through, and what they launch."""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver as cuda

from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.runtime import driver, kept, launch_plan, plan, targets
from warploom.runtime.kernel import Kernel

ROOT = Path(__file__).parents[2]
H200 = target("NVIDIA H200")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """What a pretended GPU launched, by the addresses of parameter blocks."""
    arguments: list[int] = []

    def encode_tiled(*request: Any) -> tuple[cuda.CUresult, cuda.CUtensorMap]:
        encoded = cuda.CUtensorMap()
        ctypes.memmove(encoded.getPtr(), bytes(120) + struct.pack("<Q", request[2]), 128)
        return cuda.CUresult.CUDA_SUCCESS, encoded

    def replace_address(encoded: cuda.CUtensorMap, pointer: int) -> tuple[int]:
        ctypes.memmove(encoded.getPtr() + 120, struct.pack("<Q", pointer), 8)
        return (0,)

    def launch(config: object, function: object, address: int, extra: int) -> tuple[int]:
        arguments.append(address)
        return (0,)

    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(targets, "at_hand", lambda device: H200)
    monkeypatch.setattr(driver, "limits", lambda device: H200)
    monkeypatch.setattr(driver, "enter", lambda device: None)
    monkeypatch.setattr(driver, "current_stream", lambda device: 7)
    monkeypatch.setattr(kept, "zeros", lambda device, stream, size: 1 << 20)
    monkeypatch.setattr(launch_plan, "kernel", built)
    monkeypatch.setattr(Kernel, "load", lambda self, entry, device: 1234)
    monkeypatch.setattr(cuda, "cuTensorMapEncodeTiled", encode_tiled)
    monkeypatch.setattr(cuda, "cuTensorMapReplaceAddress", replace_address)
    monkeypatch.setattr(cuda, "cuLaunchKernelEx", launch)
    monkeypatch.setattr(cuda, "cuStreamGetId", lambda stream: (0, int(stream)))
    plan.forget()
    forget()
    yield arguments
    plan.forget()


def forget() -> None:
    """Empty the caches that forget their oldest entries: other tests of the process left them in
    any state, where a new call computes what calls like it had found out.
    """
    for name, module in [*sys.modules.items()]:
        for one in vars(module).values() if name.startswith("warploom.") else ():
            is_cache = isinstance(one, functools._lru_cache_wrapper)
            if is_cache and one.cache_parameters()["maxsize"] is not None:
                one.cache_clear()


def built(spec: KernelSpec, device: int) -> Kernel:
    artifact: Any = SimpleNamespace(cubin=b"")
    return Kernel(spec, artifact)


def walk(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The file and the name of every Python function of ours that a call calls, in order."""
    steps: list[tuple[str, str]] = []
    rooms = tuple(str(ROOT / room) for room in ("generator", "runtime", "src", "quantization"))

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and str(Path(code.co_filename).resolve()).startswith(rooms):
            steps.append((str(Path(code.co_filename).resolve()), code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps


def counts(steps: list[tuple[str, str]]) -> tuple[int, int, int]:
    """Files, functions and calls of a walk."""
    return len({file for file, _ in steps}), len(set(steps)), len(steps)
