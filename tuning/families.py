"""What tuning knows of each family: its untuned choice, and how it is tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from warploom.errors import UnknownNameError
from warploom.generator.elements import element
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.gemm import GemmOperation, GemmProblem, GemmShape
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec, Schedule
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.runtime import dispatch
from warploom.runtime.families._attention import dispatch as attention_dispatch
from warploom.runtime.families._attention.dispatch import Operation as AttentionOperation
from warploom.runtime.families._attention.problem import Extents
from warploom.runtime.families.attention_backward.trial import AttentionBackwardTrial
from warploom.runtime.families.attention_forward.trial import AttentionTrial
from warploom.runtime.families.gemm.trial import GemmTrial
from warploom.runtime.trial import Trial


@dataclass(frozen=True, slots=True)
class Tuned:
    """What tuning needs of a family; operations and shapes are its own.

    default   the spec that is run without tuning
    fitting   a schedule's kernel, for an architecture, where a problem can have it, else None
    trial     random operands of a problem, to verify and time kernels on
    """

    default: Callable[[Any, Any, DeviceLimits], KernelSpec]
    fitting: Callable[[Any, Any, Schedule, str], KernelSpec | None]
    trial: Callable[[Any, Any, str, int], Trial]


def tuned(family: str) -> Tuned:
    """Return what tuning knows of a family, or raise UnknownNameError."""
    try:
        return FAMILIES[family]
    except KeyError:
        raise UnknownNameError(
            f"family {family!r}", rule=f"tuning knows {', '.join(FAMILIES)}", fix="tune one of them"
        ) from None


# ---- GEMM ----------------------------------------------------------------------------------------


def _gemm_store(operation: GemmOperation, shape: GemmShape) -> str:
    return "direct" if shape.n * element(operation.d).bytes % PITCH_BYTES else "tma"


def _gemm_default(operation: GemmOperation, shape: GemmShape, device: DeviceLimits) -> KernelSpec:
    problem = GemmProblem(
        *(shape.m, shape.n, shape.k),
        *(shape.k, shape.k, shape.n),
        batches=shape.batches,
    )
    return dispatch.untuned(operation, problem, _gemm_store(operation, shape), device).spec


def _gemm_fitting(
    operation: GemmOperation, shape: GemmShape, schedule: Schedule, arch: str
) -> KernelSpec | None:
    return dispatch.fitting(operation, schedule, _gemm_store(operation, shape), arch)


# ---- Attention -----------------------------------------------------------------------------------


def _attention_default(
    operation: AttentionOperation, shape: AttentionShape, device: DeviceLimits
) -> KernelSpec:
    packed = operation.lengths == "packed"
    sizes = Extents(
        *(shape.batch, shape.heads, shape.kv_heads, shape.seq_q, shape.seq_k, shape.dim),
        total_q=shape.total_q if packed else shape.seq_q,
        total_k=shape.total_k if packed else shape.seq_k,
        packed=packed,
    )
    return attention_dispatch.untuned(operation, sizes, device.arch).spec


def _attention_fitting(
    operation: AttentionOperation, shape: AttentionShape, schedule: Schedule, arch: str
) -> KernelSpec | None:
    return attention_dispatch.fitting(operation, schedule, shape.sharing, arch)


FAMILIES: dict[str, Tuned] = {
    "gemm": Tuned(_gemm_default, _gemm_fitting, GemmTrial),
    "attention_forward": Tuned(
        _attention_default,
        _attention_fitting,
        AttentionTrial,
    ),
    "attention_backward": Tuned(
        _attention_default,
        _attention_fitting,
        AttentionBackwardTrial,
    ),
}
