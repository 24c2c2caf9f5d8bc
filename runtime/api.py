"""The front door's functions that are of no family: load, warmup, explain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

import torch

from warploom.errors import DeviceError, ProblemError, WarploomError
from warploom.generator.build import build_many
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.renamed import todays
from warploom.runtime import kernel as kernels
from warploom.runtime.counters import counters
from warploom.runtime.dispatch import named
from warploom.runtime.explanation import Explainable, Explanation
from warploom.runtime.families import every
from warploom.runtime.plan import Plan, draft
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Keywords
    from warploom.runtime.families.gemm.api import PlanKeywords

__all__ = ["Explanation", "counters", "explain", "load", "warmup"]


def load(spec: KernelSpec | str) -> kernels.Kernel:
    """Return the loaded kernel of a spec or name, building it when the store lacks it.

    Raises DeviceError where there is no GPU to load it on.
    """
    found = named(spec)
    if found is None:
        raise ProblemError("spec None", rule="must be a KernelSpec or a kernel's name", fix="")
    if not torch.cuda.is_available():
        raise DeviceError(
            "no CUDA device here",
            rule="kernels are loaded on a GPU",
            fix="build them with `warploom compile`, or load them where there is a GPU",
        )
    loaded = kernels.kernel(found, torch.cuda.current_device())
    for entry in loaded.artifact.resources:
        loaded.load(entry, torch.cuda.current_device())
    return loaded


def warmup(path: str | Path, *, jobs: int | None = None) -> int:
    """Build every kernel of a configuration, in parallel, and load them on the current device.

    Returns their number. Raises the first CompilationError, after all have been tried.
    """
    if not isinstance(path, str | Path):
        raise ProblemError(
            f"path {shown(path)} of type {type(path).__name__}",
            rule="must be the path of a configuration",
            fix='for example "linear.yaml"',
        )
    from warploom.generator.space import expand_file  # brings pydantic, which no call needs

    specs = expand_file(Path(path)).specs
    for result in build_many(specs, kernels.store(), jobs):
        if isinstance(result, WarploomError):
            raise result
    if torch.cuda.is_available():
        for spec in specs:
            load(spec)
    return len(specs)


@overload
def explain(a: Plan[Any, Any]) -> Explanation: ...


@overload
def explain(
    a: Explainable,
    *operands: Any,
    gpu: str | None = None,
    **keywords: Any,
) -> Explanation: ...


@overload
def explain(
    a: Callable[..., object],
    *operands: Any,
    gpu: str | None = None,
    **keywords: Any,
) -> Explanation: ...


@overload
def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    gpu: str | None = None,
    **keywords: Unpack[PlanKeywords],
) -> Explanation: ...


@overload
def explain(
    a: torch.Tensor,
    b: torch.Tensor,
    v: torch.Tensor,
    *,
    gpu: str | None = None,
    **keywords: Unpack[Keywords],
) -> Explanation: ...


def explain(
    a: torch.Tensor | Plan[Any, Any] | Explainable | Callable[..., object],
    b: Any = None,
    v: Any = None,
    *more: Any,
    gpu: str | None = None,
    **keywords: Any,
) -> Explanation:
    """Say which kernel a call runs, why, and what it would copy.

    `explain(a, b, ...)` is about a gemm, `explain(q, k, v, ...)` about an attention and its
    gradients, with their keywords; `explain(plan)` about either. `explain(function, ...)` is about
    a call of that function, such as `warploom.gemm`, with these operands and keywords, and
    `explain(module, ...)` about one of an object that has a method `explanation`, such as a module
    of Warploom's, which may tell that torch's own kernel runs and why. Nothing is launched, but the
    kernel is built and loaded. With `gpu`, such as "NVIDIA H200", it says what that GPU would run,
    on any machine and of tensors on any device, also `meta`; then nothing is built.
    UnknownNameError for a GPU that nothing is known of.
    """
    if isinstance(a, Plan):
        return Explanation.of(a)
    if isinstance(a, Explainable) and not isinstance(a, type):
        given = [b, v, *more]
        while given and given[-1] is None:
            given.pop()
        return a.explanation(*given, gpu=gpu, **keywords)
    operands = () if b is None else (b,) if v is None else (b, v, *more)
    function = None if isinstance(a, torch.Tensor) or not callable(a) else a
    if function is None:
        operands = (cast("torch.Tensor", a), *operands)
    for known in every():
        meant = known.unnamed if function is None else known.function is function
        if meant and known.operands == len(operands):
            if known.function is not None:
                keywords = todays(known.function, keywords)
            told = known.explanation(operands, keywords, gpu)
            if told is not None:
                return told
            call = known.call(*operands, **keywords)
            if gpu is None:
                return Explanation.of(known.plan(call))
            found = target(gpu)
            call.require()
            drafted = draft(call, found)
            return Explanation.on(found, drafted, known.gradients(drafted, found))
    beside = len(operands) - (function is None)
    raise ProblemError(
        f"explain of {shown(a)} {f'and {beside} tensors' if beside else 'alone'}",
        rule="must be of a plan, of a and b, or of q, k and v",
        fix="pass the operands of the call; they may follow its function, such as warploom.gemm",
    )
