"""Scales of earlier steps, and quantised weights that last for a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from warploom.runtime import driver

HISTORY = 1024  # steps whose largest magnitudes decide a scale, as Transformer Engine has it

KeptT = TypeVar("KeptT")
_steps = 0  # of optimizers: some write to parameters in ways that no version counts


def _count(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count)


class DelayedScaling(torch.nn.Module):
    """Scales of a layer's input, weight and gradient by the largest magnitudes of HISTORY steps.

    They begin at 1, and nothing of them is in a state dict.
    """

    amax: torch.Tensor
    history: torch.Tensor
    scale: torch.Tensor
    limit: torch.Tensor

    def __init__(self, *limits: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        count = len(limits)
        buffers = {
            "amax": torch.zeros(count, device=device),
            "history": torch.zeros(count, HISTORY, device=device),
            "scale": torch.ones(count, device=device),
            "limit": torch.tensor(limits, device=device),
        }
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=False)

    def advance(self) -> None:
        """Begin a step: what was seen since the last decides the scales. Waits for nothing."""
        with torch.no_grad():
            self.history.copy_(self.history.roll(1, 1))
            self.history[:, 0] = self.amax
            self.amax.zero_()
            peak = self.history.amax(1)
            fits = (peak > 0) & peak.isfinite()
            self.scale.copy_(torch.where(fits, peak / self.limit, self.scale))

    def of(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The scale of an operand, which later steps leave as it is, and where its amax goes."""
        return self.scale[index].clone(), self.amax[index : index + 1]


class Kept(Generic[KeptT]):
    """What is made of a parameter, until the parameter changes.

    It changes where torch counts a version, where any optimizer of torch makes a step, and where
    its memory is another. A copy of this is empty. Nothing is kept while a compiler traces or a
    CUDA graph is captured, which replays what makes it.
    """

    __slots__ = ("_made",)

    def __init__(self) -> None:
        self._made: tuple[tuple[object, ...], KeptT] | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def of(self, parameter: torch.Tensor, make: Callable[[], KeptT], *options: object) -> KeptT:
        """What was made of a parameter with these options, or is made now."""
        if (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or type(parameter) not in (torch.Tensor, torch.nn.Parameter)
            or (parameter.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return make()
        stream = driver.current_stream(parameter.get_device()) if parameter.is_cuda else -1
        key = (parameter.data_ptr(), parameter._version, _steps, stream, *options)
        kept = self._made
        if kept is not None and kept[0] == key:
            return kept[1]
        made = make()
        self._made = (key, made)
        return made
