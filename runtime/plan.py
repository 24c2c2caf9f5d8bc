"""A plan: launches of one spec for one problem, bound to addresses once and then only fired.

It knows no family. What it keeps is layout, launch configuration and encoded tensor maps, by
address, stream and scalars, in a bounded map; never anything derived from contents. Workspaces are
allocated per call on the current stream, but for those that are kept (see warploom.runtime.kept).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
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

_ALIGN = 256  # bytes, of a workspace
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

    def __post_init__(self) -> None:
        self._place = torch.device("cuda", self.device)
        self._room_bytes: dict[bool, int] = {}  # of the workspaces that are zeroed, and not
        self._offsets: list[tuple[bool, int]] = []
        for workspace in self.workspaces:
            offset = self._room_bytes.get(workspace.zeroed, 0)
            self._offsets.append((workspace.zeroed, offset))
            if not workspace.kept:
                self._room_bytes[workspace.zeroed] = offset + -(-workspace.bytes // _ALIGN) * _ALIGN

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
            found, _held = self._find_workspaces(stream)  # until all is launched
            addresses += found
        key = (stream, addresses, scalars)
        prepared = self._bound.get(key)
        if prepared is None:
            check()
            prepared = self._bind(key, addresses, scalars, stream)
        for launch in prepared:
            launch.fire()
            next(launch_numbers)
        return prepared

    def _find_workspaces(self, stream: int) -> tuple[tuple[int, ...], list[torch.Tensor]]:
        """Return the workspaces' addresses, and the memory that was allocated for them."""
        rooms = {
            zeroed: (torch.zeros if zeroed else torch.empty)(
                size, dtype=torch.uint8, device=self._place
            )
            for zeroed, size in self._room_bytes.items()
        }
        held, found = list(rooms.values()), []
        for workspace, (zeroed, offset) in zip(self.workspaces, self._offsets, strict=True):
            if not workspace.kept:
                found.append(rooms[zeroed].data_ptr() + offset)
                continue
            address = self._keep(workspace, stream)
            if address is None:
                held.append(torch.zeros(workspace.bytes, dtype=torch.uint8, device=self._place))
                address = held[-1].data_ptr()
            found.append(address)
        return tuple(found), held

    def _keep(self, workspace: Workspace, stream: int) -> int | None:
        """Return the address of a workspace that is kept; None where there is no room for it."""
        key = workspace.tensor, stream
        fresh = driver.capturing(stream)  # a graph keeps its own
        address = None if fresh else self._kept.get(key)
        address = address or kept.take(self.device, workspace.bytes)
        return address if fresh or address is None else self._kept.setdefault(key, address)

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
        encoded = cache(lambda request: encode(request, address[request.tensor]))
        prepared = tuple(
            self.kernel.prepare(
                launch, self._pack(launch, address, scalar, encoded), self.device, stream
            )
            for launch in self.launches
        )
        remember(self._bound, key, prepared, _BOUND)
        return prepared

    def _pack(
        self,
        launch: Launch,
        address: dict[str, int],
        scalar: dict[str, float],
        encoded: Callable[[TensorMap], bytes],
    ) -> bytes:
        values: dict[str, bytes | int | float] = {}
        for name, value in launch.parameters.items():
            match value:
                case TensorMap():
                    values[name] = encoded(value)
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
