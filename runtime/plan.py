"""A plan: launches of one spec for one problem, bound to addresses once and then only fired.

It knows no family. What it keeps is layout, launch configuration and encoded tensor maps, by
address, stream and scalars, in a bounded map; never anything derived from contents. Workspaces are
allocated per call on the current stream, but for those that are kept (see warploom.runtime.kept).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from warploom.generator.families import family
from warploom.generator.launches import Address, Argument, Launch, Workspace
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime import driver, kept
from warploom.runtime.counters import launch_numbers
from warploom.runtime.kernel import Kernel, Prepared, kernel
from warploom.runtime.tensor_map import encode

Launches = tuple[Prepared, ...]
Key = TypeVar("Key", bound=tuple[object, ...])
Value = TypeVar("Value")

_BOUND = 1024  # combinations of addresses, stream and scalars kept per plan
_lock = threading.Lock()


def remember(known: dict[Key, Value], key: Key, value: Value, bound: int) -> None:
    """Keep `value` in a map of at most `bound` entries; the oldest go first."""
    with _lock:
        while len(known) >= bound:
            known.pop(next(iter(known)))
        known[key] = value


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
    _bound: dict[tuple[object, ...], Launches] = field(default_factory=dict, repr=False)
    _kept: dict[tuple[str, int], int] = field(default_factory=dict, repr=False)  # by stream

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[[], None],
    ) -> Launches:
        """Launch on the current stream of the plan's device; nothing is waited for.

        `check` raises where these addresses or scalars must not be used; it is called the first
        time that they come up.
        """
        stream = driver.current_stream(self.device)
        if self.workspaces:
            buffers = [self._workspace(workspace, stream) for workspace in self.workspaces]
            addresses += tuple(
                buffer if isinstance(buffer, int) else buffer.data_ptr() for buffer in buffers
            )
        key = (stream, addresses, scalars)
        prepared = self._bound.get(key)
        if prepared is None:
            check()
            prepared = self._bind(key, addresses, scalars, stream)
        for launch in prepared:
            launch.fire()
            next(launch_numbers)
        return prepared

    def _workspace(self, workspace: Workspace, stream: int) -> torch.Tensor | int:
        """A workspace, or the address of one that is kept."""
        if workspace.kept:
            key = workspace.tensor, stream
            fresh = driver.capturing(stream)  # a graph keeps its own
            found = None if fresh else self._kept.get(key)
            found = found or kept.take(self.device, workspace.bytes)
            if found is not None:
                return found if fresh else self._kept.setdefault(key, found)
        device = torch.device("cuda", self.device)
        return torch.zeros(workspace.bytes, dtype=torch.uint8, device=device)

    def _bind(
        self,
        key: tuple[object, ...],
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        stream: int,
    ) -> Launches:
        driver.enter(self.device)  # tensor maps cannot be encoded without a context
        names = (*self.tensors, *(workspace.tensor for workspace in self.workspaces))
        address = dict(zip(names, addresses, strict=True))
        scalar = dict(zip(self.scalars, scalars, strict=True))
        prepared = tuple(
            self.kernel.prepare(launch, self._pack(launch, address, scalar), self.device, stream)
            for launch in self.launches
        )
        remember(self._bound, key, prepared, _BOUND)
        return prepared

    def _pack(self, launch: Launch, address: dict[str, int], scalar: dict[str, float]) -> bytes:
        values: dict[str, bytes | int | float] = {}
        for name, value in launch.parameters.items():
            match value:
                case TensorMap():
                    values[name] = encode(value, address[value.tensor])
                case Address():
                    values[name] = address[value.tensor]
                case Argument():
                    values[name] = scalar[value.name]
                case _:
                    values[name] = value
        return family(self.spec.operation.family).parameters(self.spec).pack(values)


def plan_launches(
    spec: KernelSpec,
    problem: object,
    device: int,
    tensors: tuple[str, ...],
    scalars: tuple[str, ...],
) -> LaunchPlan:
    """Build or find the spec's kernel, load it, and lay out the launches of `problem`."""
    described = family(spec.operation.family)
    built = kernel(spec, device)
    launches = described.launches(spec, problem, driver.limits(device))
    for launch in launches:
        built.load(launch.entry, device)
    workspaces = described.workspaces(spec, problem)
    if any(workspace.kept for workspace in workspaces):
        kept.prepare(device)
    return LaunchPlan(spec, device, tensors, scalars, launches, workspaces, built)
