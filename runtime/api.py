"""The front door's functions that are of no family: load, warmup, explain."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack, cast, overload

import torch
from torch.utils._pytree import tree_leaves

from warploom.errors import DeviceError, ProblemError, WarploomError
from warploom.generator.build import build_many
from warploom.generator.specification import KernelSpec
from warploom.generator.targets import target
from warploom.renamed import todays
from warploom.runtime import kernel as kernels
from warploom.runtime import targets
from warploom.runtime.counters import counters
from warploom.runtime.dispatch import named
from warploom.runtime.explanation import Explainable, Explanation, calls_of, of_several
from warploom.runtime.families import every
from warploom.runtime.plan import Plan, draft
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Keywords
    from warploom.runtime.families.gemm.api import PlanKeywords

__all__ = ["Explanation", "counters", "explain", "load", "warmup"]


def load(spec: KernelSpec | str) -> kernels.Kernel:
    """Build a kernel if the kernel cache lacks it, and load it on the current device.

    Args:
        spec: The kernel, a KernelSpec or its name.

    Returns:
        The loaded kernel.

    Raises:
        DeviceError: There is no GPU to load it on.
        KernelMissingError: It is not in the kernel cache, and compiling is forbidden.
        CompilationError: It cannot be compiled.

    Example:
        kernel = warploom.load("gemm_sm90a_bf16_128x256x64_cluster2x1_0ad9c3d1")
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
    """Build all kernels of a configuration in parallel, and load them on the current GPU, if any.

    Args:
        path: The configuration, a YAML file.
        jobs: Kernels that are compiled at a time; by default one for each core.

    Returns:
        The number of kernels.

    Raises:
        ConfigurationError: The file has a mistake, which is named with its line.
        CompilationError: A kernel cannot be compiled; raised after all have been tried.

    Example:
        warploom.warmup("linear.yaml")  # before the first request is served
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
    """Say which kernel a call runs, why, and what it would copy, without launching it.

    Args:
        a: What is explained: the first operand of a GEMM, q of an attention, a plan, a function
            such as `warploom.mixed_gemm` or `warploom.experts`, or an object with a method
            `explanation`, such as a `warploom.nn.Linear`.
        b: The second operand, k, or the first argument of the function or layer.
        v: v of an attention, or the next argument.
        more: Further arguments of the function or layer.
        gpu: The name of a GPU, such as "NVIDIA H200": says what that GPU would run, on any machine
            and for tensors on any device, also `meta`; nothing is built then. By default the
            current GPU is meant, and the kernel is built and loaded.
        keywords: The keywords of the call.

    Returns:
        The explanation; `print` shows it. An attention's has its gradients' kernel as well, and
        that of `warploom.experts` an explanation of each operation; these are not built.

    Raises:
        ProblemError: For a call that would raise it.
        UnknownNameError: For a GPU that Warploom does not know.

    Example:
        >>> x, weight = torch.randn(16, 64).bfloat16(), torch.randn(32, 64).bfloat16()
        >>> warploom.explain(x, weight.t(), gpu="NVIDIA H200").copies
        ()
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
    if function is not None and (told := _of_calls(function, operands, keywords, gpu)):
        return told
    beside = len(operands) - (function is None)
    raise ProblemError(
        f"explain of {shown(a)} {f'and {beside} tensors' if beside else 'alone'}",
        rule="must be of a plan, of a and b, or of q, k and v",
        fix="pass the operands of the call; they may follow its function, such as warploom.gemm",
    )


def _of_calls(
    function: Callable[..., object],
    operands: Sequence[Any],
    keywords: Mapping[str, Any],
    gpu: str | None,
) -> Explanation | None:
    """What a function of Warploom does by calls of declared ones; None where it makes none."""
    if isinstance(function, torch.nn.Module):
        names = [name for name, one in function.named_children() if isinstance(one, Explainable)]
        raise ProblemError(
            f"explain of a {type(function).__name__}",
            rule="must be of a layer of one call, such as a warploom.nn.Linear",
            fix=f"explain what it consists of: {', '.join(names) or 'the functions that it calls'}",
        )
    if isinstance(function, type) or not getattr(function, "__module__", "").startswith("warploom"):
        return None
    try:
        inspect.signature(function).bind(*operands, **keywords)
    except TypeError:
        return None
    leaves = tree_leaves([*operands, keywords])
    device = next((one.get_device() for one in leaves if isinstance(one, torch.Tensor)), -1)
    there = targets.at_hand(device) if gpu is None else target(gpu)
    told = []
    for name, call in calls_of(function, operands, keywords):
        call.require()
        one = Explanation.on(there, draft(call, there))
        told.append((name, replace(one, reference=gpu is None and device < 0)))
    return told[0][1] if len(told) == 1 else of_several(told) if told else None
