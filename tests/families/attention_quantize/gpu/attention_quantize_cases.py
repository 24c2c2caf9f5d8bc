"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.attention_quantize import (
    AttentionQuantizeOperation,
    AttentionQuantizeSchedule,
    AttentionQuantizeShape,
)
from warploom.generator.families.attention_quantize.schedule import complete
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.attention_quantize.call import AttentionQuantizeCall
from warploom.runtime.families.attention_quantize.family import FAMILY as RUNTIME
from warploom.runtime.families.attention_quantize.family import placed

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
BESIDE = 1024  # elements on both sides of what is guarded: more than a row
ON_CPU = 1 << 22  # elements of v at most, of references that the CPU computes


def spec(
    dim: int = 128,
    scores: str = "int8",
    element: str = "bf16",
    threads: int = 0,
    *,
    smooth: bool = True,
    lengths: str = "fixed",
) -> KernelSpec:
    """A kernel; of e4m3, of v alone."""
    scores, smooth = ("none", False) if element == "e4m3" else (scores, smooth)
    operation = AttentionQuantizeOperation(element, dim, scores, smooth=smooth, lengths=lengths)  # type: ignore[arg-type]
    schedule = complete("sm_90a", operation, {"threads": threads} if threads else {})
    return KernelSpec("sm_90a", operation, schedule)


SMOKE = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "attention_quantize"
]
EVERY = list(
    {
        one.name: one
        for one in [
            *SMOKE,
            *(spec(dim, "int8") for dim in (32, 64, 96, 128, 160, 256)),
            *(spec(dim, "e4m3", "fp16", smooth=False) for dim in (64, 128, 224, 256)),
            *(spec(dim, element="e4m3") for dim in (16, 64, 80, 128, 256)),
            *(spec(dim, element="e4m3", lengths="packed") for dim in (48, 64, 128, 256)),
            *(spec(dim, "e4m3", threads=512) for dim in (64, 128, 256)),
            spec(threads=128),
        ]
    }.values()
)


@dataclass
class Made:
    """A call of one kernel, whose results lie in rooms where every byte is 0xff."""

    call: AttentionQuantizeCall
    guarded: list[Guarded]

    def run(self) -> list[torch.Tensor]:
        """Run it on poisoned results, and return those that there are."""
        for one in self.guarded:
            one.room.fill_(-1)
        plan.run(self.call)
        return [one.view for one in self.guarded]

    def verify(self) -> list[torch.Tensor]:
        """Run it, and assert that all is right and that nothing else was written."""
        results = self.run()
        call, held = self.call, RUNTIME.results(self.call)
        if call.v.numel() <= ON_CPU:  # where torch's own kernels play no part
            moved = {name: one.cpu() for name, one in call.read()}
            call = replace(call, **moved)  # type: ignore[arg-type]
            held = tuple(None if one is None else one.cpu() for one in held)  # type: ignore[assignment]
        worst = RUNTIME.share(held, call)
        assert worst <= 1, worst
        assert all(one.untouched_outside() for one in self.guarded)
        return results


def guarded(like: torch.Tensor, pad: int) -> Guarded:
    """A tensor like a new one; of q and k, whose order of dimensions varies, rows are longer."""
    order = sorted(range(like.dim()), key=like.stride, reverse=True)
    sizes = [like.shape[axis] for axis in order]
    whole = [*sizes[:-1], sizes[-1] + pad]
    size = 2 * BESIDE + torch.Size(whole).numel()
    room = torch.full((size,), -1, dtype=INTEGERS[like.dtype.itemsize], device="cuda")
    inside = torch.zeros(size, dtype=torch.bool, device="cuda")
    inside[BESIDE:-BESIDE].view(whole)[..., : sizes[-1]] = True
    view = room[BESIDE:-BESIDE].view(like.dtype).view(whole)[..., : sizes[-1]]
    back = sorted(range(like.dim()), key=order.__getitem__)
    return Guarded(room, view.permute(back), inside)


def made(
    kernel: KernelSpec,
    *sizes: int,
    pad: int = 0,
    seed: int = 0,
    mean: float = 0.0,
) -> Made:
    """A call of a kernel, of batch, heads, kv_heads, seq_q and seq_k.

    Rows of q and k in 8 bits are `pad` elements longer. k has this `mean` beside that of its
    columns; magnitudes of rows and heads differ, and the largest is the last.
    """
    operation: AttentionQuantizeOperation = kernel.operation  # type: ignore[assignment]
    batch, heads, kv_heads, seq_q, seq_k = sizes
    if not operation.quantizes:
        heads = seq_q = 0
    shape = AttentionQuantizeShape(batch, heads, kv_heads, seq_q, seq_k)
    random = torch.Generator("cuda").manual_seed(seed + sum(sizes))
    call = RUNTIME.draw(operation, shape, "cuda", random)
    for name, one in call.read():
        if operation.quantizes:
            row = torch.linspace(-3, 3, one.shape[2], device="cuda").exp2()[:, None]
            head = torch.linspace(-2, 2, one.shape[1], device="cuda").exp2()[:, None, None]
            setattr(call, name, (one * row * head + mean * (name == "k")).to(one.dtype))
    places: dict[str, Any] = dict.fromkeys(call.declaration.results)
    call = placed(replace(call, **places))
    rooms = {}
    for name, one in zip(call.declaration.results, RUNTIME.results(call), strict=True):
        if one is not None:
            rooms[name] = guarded(one, pad if name in ("q_out", "k_out") else 0)
    views: dict[str, Any] = {name: one.view for name, one in rooms.items()}
    return Made(replace(call, **views, spec=kernel), list(rooms.values()))


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("attention_quantize_sm90a_")


def threads(kernel: KernelSpec, count: int) -> KernelSpec:
    """The same operation, by CTAs of so many threads."""
    return replace(kernel, schedule=AttentionQuantizeSchedule(count))  # type: ignore[arg-type]
