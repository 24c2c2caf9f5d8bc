"""Tensors that lie in rooms of 0xff bytes, by which it is seen what a kernel wrote beside them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Guarded:
    """A view, the room of 0xff bytes that it lies in, and where in the room it is."""

    room: torch.Tensor  # integers of the view's size
    view: torch.Tensor
    inside: torch.Tensor  # of the room's shape: True for the view's elements

    def untouched_outside(self) -> bool:
        """Whether every byte beside the view is as it was made."""
        return bool((self.room[~self.inside] == -1).all())


def assert_repeats(
    run: Callable[[], Sequence[torch.Tensor]],
    wanted: Sequence[torch.Tensor],
    outputs: Sequence[Guarded],
    runs: int = 1000,
) -> None:
    """Assert that `run` comes to the same bits beside another kernel, and writes nothing else."""
    noise = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    beside = torch.cuda.Stream()
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(runs):
        with torch.cuda.stream(beside):
            torch.mm(noise, noise)
        for one in outputs:
            one.room.fill_(-1)
        for found, first in zip(run(), wanted, strict=True):
            differing += (found != first).sum()
    assert differing.item() == 0
    assert all(one.untouched_outside() for one in outputs)
