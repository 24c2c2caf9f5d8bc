"""Launches of one spec for one problem, bound to addresses once and then only fired.

It knows no family. What it keeps is launch configurations, by stream, and parameter blocks, by
address, stream and scalars, in bounded maps; never anything derived from contents. Workspaces are
allocated per call on the current stream, but for those that are kept (see warploom.runtime.kept).
"""

from __future__ import annotations

import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from warploom.generator.families import family
from warploom.generator.launches import Launch, Workspace
from warploom.generator.specification import KernelSpec
from warploom.runtime import driver, kept
from warploom.runtime.bounded import remember
from warploom.runtime.counters import launch_numbers
from warploom.runtime.kernel import Kernel, Prepared, kernel
from warploom.runtime.operands import maker, without_memory
from warploom.runtime.template import POINTER, Bound, Template

Launches = tuple[Prepared, ...]
Launched = tuple[Launches, Bound]

_ALIGN = 128  # bytes, of a workspace
_BOUND = 1 << 14  # calls kept over all plans, by addresses, stream and scalars: 1.3 KB each
_STREAMS = 64  # of a plan, that launches are kept configured for
# Ordered: the oldest of a dict is found behind all places of those that went before it.
_bound: OrderedDict[tuple[object, ...], Bound] = OrderedDict()
_numbers = itertools.count()

os.register_at_fork(after_in_child=_bound.clear)


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
        self._make_room: Callable[[], torch.Tensor] | None = None  # for a call's workspaces
        self._room_bytes, self._offsets = _laid_out([w for w in self.workspaces if not w.kept])
        self._kept_bytes, self._kept_offsets = _laid_out([w for w in self.workspaces if w.kept])
        self._configured: dict[int, Launches] = {}  # by stream
        self._template: Template | None = None

    def run(
        self,
        addresses: tuple[int, ...],
        scalars: tuple[float, ...],
        check: Callable[..., object],
        *given: object,
    ) -> Launched:
        """Launch on the current stream of the plan's device; nothing is waited for.

        `check`, called with what is `given` after it, raises where these addresses or scalars must
        not be used; it is called the first time that they come up. Returns what was launched.
        """
        stream, room, zeros = driver.current_stream(self.device), 0, 0
        if self._room_bytes:
            held = self._room(stream)  # until all is launched: what comes next waits its turn
            room = held.data_ptr()
        if self._kept_bytes:
            zeros = kept.zeros(self.device, stream, self._kept_bytes)
        key = (self._number, stream, room, zeros, addresses, scalars)
        bound = _bound.get(key)
        if bound is None:
            check(*given)
            bound = self._bind(addresses, room, zeros, scalars)
            remember(_bound, key, bound, _BOUND)
        launches = self._configured.get(stream)
        if launches is None:
            launches = tuple(self.kernel.prepare(one, self.device, stream) for one in self.launches)
            remember(self._configured, stream, launches, _STREAMS)
        arguments = bound[1]
        for launch in launches:
            launch.fire(arguments)
            next(launch_numbers)
            arguments += POINTER
        return launches, bound

    def _room(self, stream: int) -> torch.Tensor:
        """Memory for the workspaces of one call.

        On the per-thread default stream, which torch takes for one stream, it would hand on to
        another thread what a kernel of this one still uses; so a thread keeps its own there.
        """
        make = self._make_room
        if make is None:
            make = maker(without_memory((self._room_bytes,), torch.uint8, self._place))
            self._make_room = make
        if stream != driver.PER_THREAD_STREAM or torch.cuda.is_current_stream_capturing():
            return make()
        own: dict[str, torch.Tensor] = self._own.__dict__
        if "room" not in own:
            own["room"] = make()
        return own["room"]

    def _bind(
        self, addresses: tuple[int, ...], room: int, zeros: int, scalars: tuple[float, ...]
    ) -> Bound:
        driver.enter(self.device)  # there are no tensor maps without a context
        template = self._template
        if template is None:
            tensors = (*self.tensors, *self._offsets, *self._kept_offsets)
            block = family(self.spec.operation.family).parameters(self.spec)
            self._template = template = Template(block, self.launches, tensors, self.scalars)
        addresses += tuple([room + offset for offset in self._offsets.values()])
        addresses += tuple([zeros + offset for offset in self._kept_offsets.values()])
        return template.bind(addresses, scalars)


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
