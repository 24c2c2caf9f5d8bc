"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation,
    AttentionMergeSchedule,
)
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.family import FAMILY as RUNTIME
from warploom.runtime.measure import largest_share

INTEGERS = {2: torch.int16, 4: torch.int32}
TYPES = (("bf16", "bf16", "bf16"), ("fp16", "fp16", "fp16"), ("fp32", "bf16", "fp32"))


def spec(
    dim: int = 128, threads: int = 128, lanes: int = 16, types: tuple[str, ...] = TYPES[0]
) -> KernelSpec:
    """A kernel."""
    operation = AttentionMergeOperation(*types, dim)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, AttentionMergeSchedule(threads, lanes))  # type: ignore[arg-type]


SMOKE = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "attention_merge"
]
EVERY = [
    *SMOKE,
    *(spec(dim, 128, lanes, types) for types in TYPES for dim, lanes in ((64, 8), (96, 16))),
    *(spec(dim, 256, 32, types) for types in TYPES for dim in (256, 512)),
    spec(96, 64, 4),
]


@dataclass
class Made:
    """A call of one kernel, whose results lie in rooms where every byte is 0xff."""

    call: AttentionMergeCall
    out: Guarded
    lse: Guarded

    def run(self) -> list[torch.Tensor]:
        """Run it on results that hold NaN, and return both."""
        for one in (self.out, self.lse):
            one.room.fill_(-1)
        plan.run(self.call)
        return [self.out.view, self.lse.view]

    def verify(self) -> list[torch.Tensor]:
        """Run it, and assert that each element is right and that nothing else was written."""
        found = self.run()
        for name, one, held in zip(("out", "lse"), found, RUNTIME.expected(self.call), strict=True):
            worst = largest_share(one, *held)
            assert worst <= 1, (name, worst)
        assert self.out.untouched_outside() and self.lse.untouched_outside()
        return found


def guarded(shape: tuple[int, ...], dtype: torch.dtype, pad: int = 0) -> Guarded:
    """A tensor whose last dimension is followed by `pad` elements that are not its own."""
    *rows, last = shape
    count = torch.Size(rows).numel()
    whole, beside = (*rows, last + pad), 1024  # elements at both ends: more than a row
    size = 2 * beside + count * (last + pad)
    room = torch.full((size,), -1, dtype=INTEGERS[dtype.itemsize], device="cuda")
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    inside[beside:-beside].view(whole)[..., :last] = True
    return Guarded(room, room[beside:-beside].view(dtype).view(whole)[..., :last], inside)


def made(kernel: KernelSpec, *rows: int, pad: int = 0, seed: int = 0) -> Made:
    """A call of a kernel; rows of all three results are `pad` elements longer than dim."""
    operation: AttentionMergeOperation = kernel.operation  # type: ignore[assignment]
    random = torch.Generator("cuda").manual_seed(seed + sum(rows))

    def drawn(*extents: int) -> torch.Tensor:
        return 3 * torch.randn(extents, generator=random, device="cuda")

    a, b = (
        drawn(*rows, operation.dim + pad).to(TORCH[name])[..., : operation.dim]
        for name in (operation.a, operation.b)
    )
    out = guarded((*rows, operation.dim), TORCH[operation.out], pad)
    lse = guarded(rows, torch.float32)
    call = AttentionMergeCall(a, drawn(*rows), b, drawn(*rows), out.view, lse.view, spec=kernel)
    return Made(call, out, lse)


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("attention_merge_sm90a_")
