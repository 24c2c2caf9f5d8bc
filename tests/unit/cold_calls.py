"""New calls on a GPU that is pretended: what they walk through, and what they launch."""

from __future__ import annotations

import ctypes
import json
import runpy
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import forked
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
    plan.forget()
    yield pretend(monkeypatch)
    plan.forget()


def pretend(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Pretend a GPU, and return the list of what it launches from now on."""
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
    return arguments


def built(spec: KernelSpec, device: int) -> Kernel:
    artifact: Any = SimpleNamespace(cubin=b"")
    return Kernel(spec, artifact)


def walk(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The file and the name of every Python function of ours that a call calls, in order.

    Comprehensions are left out: since Python 3.12 those of lists, dicts and sets are no functions.
    """
    codes: list[CodeType] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and not frame.f_code.co_name.endswith("comp>"):
            codes.append(frame.f_code)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    packages = tuple(str(ROOT / name) for name in ("generator", "runtime", "src", "quantization"))
    steps = [(str(Path(code.co_filename).resolve()), code.co_qualname) for code in codes]
    return [(file, function) for file, function in steps if file.startswith(packages)]


Counts = tuple[int, int, int]  # of files, functions and calls


def new_call_counts(file: str) -> Counts:
    """Count what the second of the two `calls()` of a file walks through, after the first ran.

    RECORDED in the file says whether its operation and shape have a record.

    It is counted in a process of its own. In one that ran other tests, what a call finds in caches
    depends on those, and so did the counts.
    """
    program = forked.Program("import cold_calls; cold_calls.print_counts()", [file])
    (ended,) = forked.run(program)
    assert ended.returncode == 0, ended.stderr
    files, functions, calls = json.loads(ended.stdout)
    return files, functions, calls


def print_counts() -> None:
    """Print the counts of `new_call_counts`: what runs in that process."""
    with pytest.MonkeyPatch.context() as patch:
        launches = pretend(patch)
        names = runpy.run_path(sys.argv[1])
        first, second = names["calls"]()
        first()  # reads the records and loads what is loaded late
        before = len(launches)
        steps = walk(second)
        planned = [*plan.known.values()][-1]
        assert len(launches) == before + 1, "the second call must launch one kernel"
        recorded = names["RECORDED"]
        assert planned.choice.asked.recorded == recorded, f"of a record the file says: {recorded}"
    print(json.dumps([len({file for file, _ in steps}), len(set(steps)), len(steps)]))
