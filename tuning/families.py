"""What tuning asks of a family: its untuned choice, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warploom.errors import UnknownNameError
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule
from warploom.runtime import dispatch
from warploom.runtime.families.attention_backward.trial import AttentionBackwardTrial
from warploom.runtime.families.attention_forward.trial import AttentionTrial
from warploom.runtime.families.gemm.trial import GemmTrial
from warploom.runtime.trial import Trial

_TRIALS: dict[str, Callable[[Any, Any, str, int], Trial]] = {
    "gemm": GemmTrial,
    "attention_forward": AttentionTrial,
    "attention_backward": AttentionBackwardTrial,
}


def trial(operation: Operation, shape: Shape, device: str, seed: int) -> Trial:
    """Random operands of a problem, to verify and time kernels on."""
    try:
        kind = _TRIALS[operation.family]
    except KeyError:
        raise UnknownNameError(
            f"family {operation.family!r}",
            rule=f"tuning knows {', '.join(_TRIALS)}",
            fix="tune one of them",
        ) from None
    return kind(operation, shape, device, seed)


def default(operation: Operation, shape: Shape, device: DeviceLimits) -> KernelSpec:
    """The kernel of dense tensors that is run without tuning."""
    requires = family(operation.family).table.required(operation, shape)
    return dispatch.untuned(operation, shape, device, requires).spec


def fitting(operation: Operation, shape: Shape, schedule: Schedule, arch: str) -> KernelSpec | None:
    """A schedule's kernel where dense tensors can have it, else None."""
    requires = family(operation.family).table.required(operation, shape)
    return dispatch.fitting(operation, shape, schedule, arch, requires)
