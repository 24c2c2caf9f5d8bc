"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from rooms import Guarded

from warploom.generator.families.fp32_pieces import Fp32PiecesOperation, Fp32PiecesSchedule
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.fp32_pieces.call import Details, Fp32PiecesCall
from warploom.runtime.families.fp32_pieces.family import FAMILY as RUNTIME
from warploom.runtime.families.fp32_pieces.family import WIDE
from warploom.runtime.families.fp32_pieces.reference import pieces

BESIDE = 256  # elements on both sides of what is guarded


def spec(
    q: str = "fp16", count: int = 2, layout: str = "row", threads: int = 256, spans: str = "any"
) -> KernelSpec:
    """A kernel."""
    operation = Fp32PiecesOperation(q, count, layout, spans=spans)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, Fp32PiecesSchedule(threads))  # type: ignore[arg-type]


EVERY = [
    *(spec("fp16", threads=threads) for threads in (128, 256, 512)),
    *(spec("bf16", count, threads=threads) for count in (2, 3) for threads in (128, 512)),
    *(spec(q, count, "col") for q, count in (("fp16", 2), ("bf16", 2), ("bf16", 3))),
    *(spec("bf16", 3, threads=threads, spans="wide") for threads in (128, 512)),
    spec("bf16", 3, "col", spans="wide"),
]
NARROW = torch.tensor([1, 1, 64, 0], dtype=torch.int32)
"""What a matrix spans whose fp16 pieces hold it."""


def short(kernel: KernelSpec) -> str:
    """A kernel's name without its family."""
    return kernel.name.removeprefix("fp32_pieces_sm90a_")


@dataclass
class Made:
    """A call of one kernel, whose results are in rooms where every byte is 0xff."""

    call: Fp32PiecesCall
    guarded: list[Guarded]

    def verify(self) -> None:
        """Run it, and assert that each bit is right and that nothing else was written."""
        for one in self.guarded:
            one.room.fill_(-1)
        plan.run(self.call)
        results = (self.call.out, self.call.scale_out, self.call.span_out)
        right = RUNTIME.expected(self.call)
        assert RUNTIME.share(results, right) == 0
        assert all(one.untouched_outside() for one in self.guarded)


def guard(like: torch.Tensor) -> Guarded:
    """A tensor like a new one, with elements on both sides that nothing may write."""
    integer = {2: torch.int16, 4: torch.int32}[like.dtype.itemsize]
    room = torch.full((2 * BESIDE + like.numel(),), -1, dtype=integer, device="cuda")
    inside = torch.zeros_like(room, dtype=torch.bool)
    inside[BESIDE:-BESIDE] = True
    return Guarded(room, room[BESIDE:-BESIDE].view(like.dtype).view(like.shape), inside)


def made(
    kernel: KernelSpec, m: int, k: int, *, pad: int = 0, shift: int = 0, seed: int = 0
) -> Made:
    """A call on rows of many sizes, some of many octaves, with values that are not finite."""
    operation: Any = kernel.operation
    random = torch.Generator(device="cuda").manual_seed(seed + m + k)
    down, across = (m, k) if operation.layout == "row" else (k, m)
    room = torch.randn(down * (across + pad) + shift, generator=random, device="cuda")
    x = room[shift:].view(down, across + pad)[:, :across]
    x = x if operation.layout == "row" else x.t()
    sizes = torch.randint(-130, 120, (m, 1), generator=random, device="cuda")
    x.mul_(torch.exp2(sizes.float()))
    x[m // 5].mul_(torch.exp2(torch.linspace(0, -24, k, device="cuda")))
    x[m // 6] = 0
    x[m // 4, k - 1] = 16 * x[m // 4].abs().amax()  # what is read last decides that row's scale
    x[m // 2, k // 2], x[m // 3, k - 1] = torch.inf, torch.nan
    call = Fp32PiecesCall(x, TORCH[operation.q], operation.count, spec=kernel)
    if operation.spans == "wide":
        _, call.scale, _ = pieces(x, torch.float16, 2)
        call.span_a = call.span_b = WIDE.cuda()
    guarded = [guard(one) for one in call.results(Details(())) if one is not None]
    q, scale, span = [*(one.view for one in guarded), None, None][:3]
    return Made(replace(call, out=q, scale_out=scale, span_out=span), guarded)
