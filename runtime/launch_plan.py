"""Launches of one spec for one problem, bound to addresses once and then only fired.

It knows no family. What it keeps is layout, launch configuration and encoded tensor maps, by
address, stream and scalars, in a bounded map; never anything derived from contents. Workspaces are
allocated per call on the current stream, but for those that are kept (see warploom.runtime.kept).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch

from warploom.generator.families import family
from warploom.generator.launches import Address, Argument, Launch, Workspace
from warploom.generator.locks import ForkLock
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap
from warploom.runtime import driver, kept
from warploom.runtime.counters import launch_numbers
from warploom.runtime.kernel import Kernel, Prepared, kernel
from warploom.runtime.operands import without_memory
from warploom.runtime.tensor_map import encode

Launches = tuple[Prepared, ...]
Key = TypeVar("Key", bound=tuple[object, ...])
Value = TypeVar("Value")

_ALIGN = 128  # bytes, of a workspace
_BOUND = 1 << 14  # calls kept over all plans, by addresses, stream and scalars: 1.3 KB each
_lock = ForkLock()
_bound: dict[tuple[object, ...], Launches] = {}
_numbers = itertools.count()

os.register_at_fork(after_in_child=_bound.clear)


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

    def __post_init__(self) -> None:
        self._number = next(_numbers)  # of no other plan of the process
        self._place = torch.device("cuda", self.device)
        self._own = threading.local()
        self._like: torch.Tensor | None = None  # of a call's workspaces
        self._room_bytes, self._offsets = _laid_out([w for w in self.workspaces if not w.kept])
        self._kept_bytes, self._kept_offsets = _laid_out([w for w in self.workspaces if w.kept])

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., object],
        *given: object,
    ) -> Launches:
        """Launch on the current stream of the plan's device; nothing is waited for.

        `check`, called with what is `given` after it, raises where these addresses or scalars must
        not be used; it is called the first time that they come up.
        """
        stream, room, zeros = driver.current_stream(self.device), 0, 0
        if self._room_bytes:
            held = self._room(stream)  # until all is launched: what comes next waits its turn
            room = held.data_ptr()
        if self._kept_bytes:
            zeros = kept.zeros(self.device, stream, self._kept_bytes)
        key = (self._number, stream, room, zeros, addresses, scalars)
        prepared = _bound.get(key)
        if prepared is None:
            check(*given)
            address = dict(zip(self.tensors, addresses, strict=True))
            address |= {tensor: room + offset for tensor, offset in self._offsets.items()}
            address |= {tensor: zeros + offset for tensor, offset in self._kept_offsets.items()}
            prepared = self._bind(address, scalars, stream)
            remember(_bound, key, prepared, _BOUND)
        for launch in prepared:
            launch.fire()
            next(launch_numbers)
        return prepared

    def _room(self, stream: int) -> torch.Tensor:
        """Memory for the workspaces of one call.

        On the per-thread default stream, which torch takes for one stream, it would hand on to
        another thread what a kernel of this one still uses; so a thread keeps its own there.
        """
        like = self._like
        if like is None:
            like = without_memory((self._room_bytes,), torch.uint8, self._place)
            self._like = like
        if stream != driver.PER_THREAD_STREAM or torch.cuda.is_current_stream_capturing():
            return torch.empty_like(like)
        own: dict[str, torch.Tensor] = self._own.__dict__
        if "room" not in own:
            own["room"] = torch.empty_like(like)
        return own["room"]

    def _bind(self, address: dict[str, int], scalars: tuple[float, ...], stream: int) -> Launches:
        driver.enter(self.device)  # tensor maps cannot be encoded without a context
        scalar = dict(zip(self.scalars, scalars, strict=True))
        encoded = cache(lambda request: encode(request, address[request.tensor]))
        return tuple(
            self.kernel.prepare(
                launch, self._pack(launch, address, scalar, encoded), self.device, stream
            )
            for launch in self.launches
        )

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


def _laid_out(workspaces: Sequence[Workspace]) -> tuple[int, dict[str, int]]:
    """Bytes for all, and where each begins."""
    size, offsets = 0, {}
    for workspace in workspaces:
        offsets[workspace.tensor] = size
        size += -(-workspace.bytes // _ALIGN) * _ALIGN
    return size, offsets


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
