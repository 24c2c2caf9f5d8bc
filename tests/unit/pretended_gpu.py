"""A GPU that is pretended: calls on CPU tensors are planned for an H200, and what would be launched
is noted with the memory that the kernel would read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from cuda.bindings import driver as cuda

from warploom.generator.targets import target
from warploom.runtime import driver, targets
from warploom.runtime import plan as plans


@dataclass
class PretendedGpu:
    """What was launched: addresses by the names of the kernel's tensors, a dict for each launch.

    sizes    the bytes that are read of each tensor as it is launched, by its name
    read     these bytes, a dict for each launch
    """

    launches: list[dict[str, int]] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    read: list[dict[str, bytes]] = field(default_factory=list)


@dataclass
class Launches:
    """The launches of one plan."""

    tensors: tuple[str, ...]
    gpu: PretendedGpu
    launches: list[object] = field(default_factory=lambda: [SimpleNamespace(grid=1)])
    workspaces: tuple[()] = ()

    def __post_init__(self) -> None:
        self.seen: set[object] = set()  # whose check has passed, as a real plan keeps them

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., object],
        *given: object,
    ) -> tuple[tuple[object, ...], object]:
        if (addresses, scalars) not in self.seen:
            check(*given)
            self.seen.add((addresses, scalars))
        at = dict(zip(self.tensors, addresses, strict=True))
        sizes = self.gpu.sizes
        self.gpu.launches.append(at)
        self.gpu.read.append(
            {name: ctypes.string_at(at[name], size) for name, size in sizes.items() if name in at}
        )
        return (SimpleNamespace(roams=True),), None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedGpu]:
    """Pretend that CPU tensors are on a GPU, and note what is launched there."""
    found = PretendedGpu()
    h200 = target("NVIDIA H200")
    monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
    monkeypatch.setattr(torch.Tensor, "is_cpu", False, raising=False)
    monkeypatch.setattr(targets, "at_hand", lambda device: h200)
    monkeypatch.setattr(driver, "current_stream", lambda device: 7)
    monkeypatch.setattr(cuda, "cuStreamGetId", lambda stream: (0, int(stream)))

    def plan_launches(
        spec: object, problem: object, device: int, tensors: tuple[str, ...], *scalars: object
    ) -> Launches:
        return Launches(tensors, found)

    monkeypatch.setattr(plans, "plan_launches", plan_launches)
    plans.forget()
    yield found
    plans.forget()
