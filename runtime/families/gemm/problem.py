"""A GEMM call as the generator sees it: checked, its operands placed where TMA can read them.

This is for calls that are planned; the checks of every call are in operands.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, cast, get_args, get_type_hints

import torch

from warploom.arguments import shown
from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families._product import Store
from warploom.generator.families.gemm import (
    Accumulation,
    GemmOperation,
    GemmProblem,
    GemmShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import NAMES, name_of
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.batches import broadcast
from warploom.runtime.families._product.epilogue import BoundEpilogue, Item, Keywords
from warploom.runtime.families._product.operands import Copy, place_operand
from warploom.runtime.families._product.result import check_out, result_type, storing
from warploom.runtime.families.gemm.operands import layouts
from warploom.runtime.tensors import require_one_device

INPUTS: tuple[str, ...] = get_args(get_type_hints(GemmOperation)["a"])


class Options(NamedTuple):
    """What a call asks for beside its tensors."""

    out_dtype: torch.dtype | None = None
    accumulation: Accumulation = "fast"
    spec: KernelSpec | None = None


class PlanKeywords(Keywords, total=False):
    """The keywords of `warploom.plan`: those of the epilogue, `out` and the fields of Options."""

    out: torch.Tensor | None
    out_dtype: torch.dtype | None
    accumulation: Accumulation
    spec: KernelSpec | str | None


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that kernels can run: what it computes, on which extents and pitches, and how."""

    operation: GemmOperation
    problem: GemmProblem
    epilogue: BoundEpilogue
    options: Options
    store: Store  # how D can be stored where it lies
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    copy_a: Copy | None  # where TMA cannot read it
    copy_b: Copy | None

    @property
    def shape(self) -> GemmShape:
        """What of the problem decides its time."""
        problem = self.problem
        return GemmShape(problem.m, problem.n, problem.k, problem.batches)

    @property
    def empty(self) -> bool:
        """True when D has no element, or no product is left to compute."""
        problem = self.problem
        return not all((problem.m, problem.n, problem.k, problem.batches))


def check_call(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
) -> CheckedCall:
    """Check the tensors of a call and place its operands, in the layouts of a spec if given.

    Raises ProblemError naming the tensor, the rule and the fix.
    """
    shape, shared = _extents(a, b, options.spec)
    *lead, m, n = shape
    device = a.get_device()
    bound = epilogue.bind(listed, shape[:-2], m, n, device, batched=shared is not None)
    shared, shape = shape[:-2] if bound.batched else None, (*lead, m, bound.columns)
    m, k = (m if shared is not None else prod(lead) * m), a.shape[-1]
    d_type = result_type(a, out, options.out_dtype, len(listed) > 0)
    pitch_d, batch_pitch_d = check_out(out, shape, d_type, device, shared)
    allowed_a, allowed_b = layouts(a, options.spec)
    at_a, batches_a, copy_a = place_operand(a, allowed_a, shared)
    at_b, batches_b, copy_b = place_operand(b, allowed_b, shared)
    operation = GemmOperation(
        a=name_of(a.dtype, "a"),  # type: ignore[arg-type]
        b=name_of(b.dtype, "b"),  # type: ignore[arg-type]
        d=NAMES[d_type],  # type: ignore[arg-type]
        layout_a=at_a.layout,  # type: ignore[arg-type]
        layout_b=at_b.layout,  # type: ignore[arg-type]
        accumulation=_accumulation(options),
        batched=shared is not None,
        epilogue=bound.steps,
    )
    problem = GemmProblem(
        *(m, n, k),
        *(at_a.pitch, at_b.pitch, pitch_d),
        pitch_c=bound.pitch_c,
        batches=prod(shared or ()),
        batches_a=batches_a,
        batches_b=batches_b,
        batch_pitch_d=batch_pitch_d,
        batch_pitch_steps=bound.batch_pitches,
    )
    return CheckedCall(
        operation=operation,
        problem=problem,
        epilogue=bound,
        options=options,
        store=storing(out, bound.columns, (pitch_d, batch_pitch_d), d_type, paired=bound.paired),
        out_shape=shape,
        out_dtype=d_type,
        copy_a=copy_a,
        copy_b=copy_b,
    )


def _extents(
    a: torch.Tensor, b: torch.Tensor, spec: KernelSpec | None
) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """The shape of D, and its batches; None where B has none, and A's are rows of one matrix."""
    try:
        if min(a.dim(), b.dim()) < 2 or a.shape[-1] != b.shape[-2]:
            raise RuntimeError
        shared = broadcast(a, b)
    except RuntimeError:
        raise ProblemError(
            f"a {list(a.shape)} by b {list(b.shape)}",
            rule="a is [.., M, K] and b is [.., K, N], with one K, and batches that broadcast",
            fix="a torch weight [N, K] is b after .t()",
        ) from None
    for name, operand in (("a", a), ("b", b)):
        if NAMES.get(operand.dtype) not in INPUTS:
            raise ProblemError(
                f"{name} of {operand.dtype}",
                rule=f"element types of operands are {', '.join(INPUTS)}",
                fix=f"convert with {name}.to(torch.bfloat16)",
            )
    mixed = a.dtype != b.dtype
    if mixed and not all(element(name_of(t.dtype, "an operand")).is_fp8 for t in (a, b)):
        raise ProblemError(
            f"a {a.dtype} by b {b.dtype}",
            rule="must have one type, or are both fp8",
            fix="convert one",
        )
    require_one_device((("a", a), ("b", b)))
    if spec is not None and not isinstance(spec.operation, GemmOperation):
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"must be a kernel of gemm, not of {spec.operation.family}",
            fix="leave spec out, or pass one of this operation",
        )
    asked = spec is not None and cast("GemmOperation", spec.operation).batched
    batched = b.dim() > 2 or (asked and a.dim() == 2)
    return (*shared, a.shape[-2], b.shape[-1]), shared if batched else None


def require_accumulation(given: object) -> None:
    """Raise ProblemError for no name of a way to accumulate."""
    if given not in get_args(Accumulation):
        raise ProblemError(
            f"accumulation {shown(given)}",
            rule=f"must be one of {', '.join(get_args(Accumulation))}",
            fix="leave it out for the fast one",
        )


def _accumulation(options: Options) -> Accumulation:
    require_accumulation(options.accumulation)
    if options.spec is not None and options.accumulation == "fast":
        return cast("GemmOperation", options.spec.operation).accumulation
    return options.accumulation
