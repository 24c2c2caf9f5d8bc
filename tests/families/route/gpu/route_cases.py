"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.route import RouteOperation, RouteSchedule
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.route import reference
from warploom.runtime.families.route.call import RouteCall

_BESIDE = 1024  # elements at both ends of a result that are not its own


def spec(threads: int = 1024, cluster: int = 1, ids: str = "int64") -> KernelSpec:
    """A kernel."""
    schedule = RouteSchedule(threads, cluster)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", RouteOperation(ids), schedule)  # type: ignore[arg-type]


SMOKE = [
    one for path in smoke() for one in expand_file(path).specs if one.operation.family == "route"
]
EVERY = list(dict.fromkeys([*SMOKE, spec(128), spec(1024, 2), spec(1024, 8, "int32")]))


def drawn(kind: str, tokens: int, k: int, experts: int, seed: int = 0) -> torch.Tensor:
    """Ids [tokens, k]: uniform, skewed, all of one expert, some skipped, or all skipped."""
    random = torch.Generator("cuda").manual_seed(seed + tokens)
    shape = (tokens, k)
    if kind == "skewed":
        share = torch.rand(shape, generator=random, device="cuda") ** 6
        return (experts * share).long().clamp(max=experts - 1)
    if kind == "one":
        return torch.full(shape, experts - 1, device="cuda")
    if kind == "none":
        return torch.full(shape, -1, device="cuda")
    spread = (-experts - 1, 2 * experts + 1) if kind == "skipping" else (0, experts)
    return torch.randint(*spread, shape, generator=random, device="cuda")


KINDS = ("uniform", "skewed", "one", "skipping", "none")


@dataclass
class Made:
    """A call of one kernel, whose results lie in rooms where every byte is 0xff."""

    call: RouteCall
    guarded: list[Guarded]

    def run(self) -> list[torch.Tensor]:
        """Run it on results that hold -1, and return them."""
        for one in self.guarded:
            one.room.fill_(-1)
        plan.run(self.call)
        return [one.view for one in self.guarded]

    def verify(self) -> list[torch.Tensor]:
        """Run it, and assert that each number is right and that nothing else was written."""
        found, call = self.run(), self.call
        wanted = reference.route(call.ids, call.experts, call.first)
        for name, one, held in zip(call.outputs, found, wanted, strict=True):
            bad = (one != held).nonzero()
            assert not len(bad), (name, bad[0].tolist(), one[tuple(bad[0])], held[tuple(bad[0])])
        assert all(one.untouched_outside() for one in self.guarded)
        return found


def guarded(*shape: int) -> Guarded:
    """An int32 result in its room."""
    count = torch.Size(shape).numel()
    room = torch.full((count + 2 * _BESIDE,), -1, dtype=torch.int32, device="cuda")
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    inside[_BESIDE:-_BESIDE] = True
    return Guarded(room, room[_BESIDE:-_BESIDE].view(shape), inside)


def made(kernel: KernelSpec, ids: torch.Tensor, experts: int, first: int = 0) -> Made:
    """A call of a kernel on ids, which are converted to its type."""
    operation: RouteOperation = kernel.operation  # type: ignore[assignment]
    tokens, k = ids.shape
    results = [guarded(experts), guarded(tokens * k), guarded(tokens, k)]
    given = ids.to(getattr(torch, operation.ids))
    call = RouteCall(given, experts, first, kernel, *[one.view for one in results])
    return Made(call, results)


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("route_sm90a_")
