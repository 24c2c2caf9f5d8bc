"""A way in which a contender attends: its call, the layout of keys, and how exact it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks.peers._decode_problem import Given

Call = Callable[[int], torch.Tensor]  # by the set of buffers; [batch, rows, heads, dim]
Make = Callable[[Given, int], Call]  # with pages of so many keys, 0: contiguous


@dataclass(frozen=True, slots=True)
class Way:
    """`eight`: it multiplies in e4m3, q and probabilities rounded to it."""

    name: str
    make: Make
    page: int = 0
    cache: str = "bf16"
    eight: bool = False

    @property
    def called(self) -> str:
        """The name of its contender."""
        return f"{self.name}, pages of {self.page}" if self.page else self.name
