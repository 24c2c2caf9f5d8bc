"""Scales of earlier steps, and quantised weights that last for a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Self, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from warploom.runtime import driver

HISTORY = 1024  # steps whose largest magnitudes decide a scale, as Transformer Engine has it

CachedT = TypeVar("CachedT")
_steps = 0  # of optimizers: some write to parameters in ways that no version counts


def _count(*_: object) -> None:
    global _steps
    _steps += 1


register_optimizer_step_post_hook(_count)


def in_backward() -> bool:
    """Whether autograd runs a backward pass: then a layer is called again, by a checkpoint."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1


class DelayedScaling(torch.nn.Module):
    """Scales of a layer's input, weight and gradient by the largest magnitudes of HISTORY steps.

    They begin at 1, and stay fp32 whatever the model is cast to. No state dict has them.
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

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and the like do, but for the type."""
        super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)  # type: ignore[no-untyped-call]
        return self

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


class ParameterCache(Generic[CachedT]):
    """What is computed of a parameter, until the parameter changes.

    It changes where torch counts a version, where any optimizer of torch makes a step, and where
    its memory is another, be it at the address of memory that was freed. A copy of this is empty.
    Nothing is cached while a compiler traces or a CUDA graph is captured, which replays what
    computes it, nor of a parameter without versions.
    """

    __slots__ = ("_entry",)

    def __init__(self) -> None:
        # The weak reference keeps no memory: it keeps the identity of the storage from another.
        self._entry: tuple[tuple[object, ...], CachedT, StorageWeakRef] | None = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()

    def get(
        self, parameter: torch.Tensor, compute: Callable[[], CachedT], *options: object
    ) -> CachedT:
        """What was computed of a parameter with these options, or is computed now."""
        if (
            torch.compiler.is_compiling()
            or torch._C._len_torch_dispatch_stack() > 0
            or type(parameter) not in (torch.Tensor, torch.nn.Parameter)
            or parameter.is_inference()
            or (parameter.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return compute()
        stream = driver.current_stream(parameter.get_device()) if parameter.is_cuda else -1
        # Autograd cannot save what was computed in inference mode.
        modes = torch.is_inference_mode_enabled(), stream, _steps
        storage = parameter.untyped_storage()
        place = storage._cdata, parameter.data_ptr(), parameter.dtype, parameter.stride()
        key = (*place, parameter._version, *modes, *options)
        entry = self._entry
        if entry is not None and entry[0] == key:
            return entry[1]
        computed = compute()
        self._entry = (key, computed, StorageWeakRef(storage))  # type: ignore[no-untyped-call]
        return computed
