"""What a library has of attention, declared once, for every way in which attention is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.peers._attention import Operands
from benchmarks.peers._attention_problem import Attention
from benchmarks.peers._gradients import Backward, Step
from benchmarks.peers._options_given import Given, Tensors

Forward = Callable[[Attention, Operands], torch.Tensor]
Start = Callable[[Step, bool], Backward]
Attend = Callable[[Given, Tensors], torch.Tensor]


@dataclass(frozen=True, slots=True)
class AttentionBaseline:
    """What a library has of attention; None: what it lacks, or is not measured with.

    name       of its contender
    forward    returns the forward pass; of one cell alone, since a compiler's is
    backward   runs the forward pass and returns a call of the backward pass alone; asked to be
               deterministic, it raises where it cannot
    trained    the forward pass as autograd differentiates it, with no host time but its own
    option     returns the forward pass with what an option does to scores; of one cell alone
    """

    name: str
    forward: Callable[[], Forward] | None = None
    backward: Start | None = None
    trained: Forward | None = None
    option: Callable[[], Attend] | None = None


def differentiated(
    step: Step, deterministic: bool, attend: Callable[[Attention, Operands], torch.Tensor]
) -> Backward:
    """Run a forward pass through autograd, and return a call of its backward pass."""
    leaves = step.leaves
    q, k, v = leaves
    out = attend(step.problem, Operands(q, k, v, step.given.out, step.given.lengths))

    def call() -> Sequence[torch.Tensor]:
        with _deterministic(deterministic):
            return torch.autograd.grad(out, leaves, step.dout, retain_graph=True)

    return call


@contextmanager
def _deterministic(wanted: bool) -> Iterator[None]:
    """Have torch choose deterministic algorithms, without filling what it allocates."""
    setting: Any = torch.utils.deterministic
    before, fills = torch.are_deterministic_algorithms_enabled(), setting.fill_uninitialized_memory
    torch.use_deterministic_algorithms(wanted or before, warn_only=True)
    setting.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        setting.fill_uninitialized_memory = fills
