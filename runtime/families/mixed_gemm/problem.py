"""A product with a packed weight as the generator sees it: checked, its operands placed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple, get_args, get_type_hints

import torch

from warploom.errors import ProblemError
from warploom.generator.families._product import Store
from warploom.generator.families.mixed_gemm import (
    MixedGemmOperation,
    MixedGemmProblem,
    MixedGemmShape,
)
from warploom.generator.formats import activations_of
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedWeight
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import BoundEpilogue
from warploom.runtime.families._product.operands import Copy, place_operand
from warploom.runtime.families._product.result import check_out, result_type, storing
from warploom.runtime.families._product.steps.step import Item

INPUTS: tuple[str, ...] = get_args(get_type_hints(MixedGemmOperation)["a"])


class Options(NamedTuple):
    """What a call asks for beside its tensors."""

    out_dtype: torch.dtype | None = None
    spec: KernelSpec | None = None


@dataclass(frozen=True, slots=True)
class CheckedCall:
    """A call that kernels can run: what it computes, on which extents and pitches, and how."""

    operation: MixedGemmOperation
    problem: MixedGemmProblem
    epilogue: BoundEpilogue
    store: Store  # how D can be stored where it lies
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    copy: Copy | None  # of a, where TMA cannot read it

    @property
    def shape(self) -> MixedGemmShape:
        """What of the problem decides its time."""
        return MixedGemmShape(self.problem.m, self.problem.n, self.problem.k)

    @property
    def empty(self) -> bool:
        """True when D has no element: W has neither 0 rows nor 0 columns."""
        return not self.problem.m


def check_call(
    a: torch.Tensor,
    weight: PackedWeight,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
) -> CheckedCall:
    """Check the tensors of a call and place its operands.

    Raises ProblemError naming the tensor, the rule and the fix.
    """
    check_operands(a, weight, options.spec)
    n, k = weight.shape
    *lead, m = a.shape[:-1]
    device = a.get_device()
    bound = epilogue.bind(listed, tuple(lead), m, n, device, batched=False)
    if bound.batched:
        raise _beside_batches(listed, tuple(lead))
    shape = (*lead, m, bound.columns)
    d_type = result_type(a, out, options.out_dtype, has_epilogue=True)  # int32 is gemm's alone
    pitch_d, _ = check_out(out, shape, d_type, device, None)
    at, _, copy = place_operand(a, ("row",), None)
    metadata = weight.metadata
    operation = MixedGemmOperation(
        a=NAMES[a.dtype],  # type: ignore[arg-type]
        b=metadata.format,  # type: ignore[arg-type]
        d=NAMES[d_type],  # type: ignore[arg-type]
        group=metadata.group or 0,  # type: ignore[arg-type]
        scale=metadata.scale,  # type: ignore[arg-type]
        epilogue=bound.steps,
    )
    problem = MixedGemmProblem(
        prod(lead) * m, n, k, pitch_a=at.pitch, pitch_d=pitch_d, pitch_c=bound.pitch_c
    )
    return CheckedCall(
        operation=operation,
        problem=problem,
        epilogue=bound,
        store=storing(out, bound.columns, (pitch_d, 0), d_type, paired=bound.paired),
        out_shape=shape,
        out_dtype=d_type,
        copy=copy,
    )


def check_operands(a: torch.Tensor, weight: PackedWeight, spec: KernelSpec | None) -> None:
    """Raise ProblemError for activations and a weight that no kernel multiplies."""
    n, k = weight.shape
    if a.dim() < 2 or a.shape[-1] != k:
        raise ProblemError(
            f"a {list(a.shape)} by a packed weight {[n, k]}",
            rule=f"a must be [.., M, K], K being the weight's {k}",
            fix="a single row is a[None]; a weight is packed [N, K], as torch's are",
        )
    if NAMES.get(a.dtype) not in INPUTS:
        raise ProblemError(
            f"a of {a.dtype}",
            rule=f"element types of a are {', '.join(INPUTS)}",
            fix="convert with a.to(torch.bfloat16)",
        )
    packed, needed = weight.metadata.activations, activations_of(NAMES[a.dtype])
    if packed != needed:
        raise ProblemError(
            f"a of {a.dtype} by a weight that is packed for activations {packed!r}",
            rule=f"must be packed for {needed!r}",
            fix=f"pack the weight with activations={needed!r}",
        )
    if weight.device != a.device:
        raise ProblemError(
            f"a on {a.device}, weight on {weight.device}",
            rule="must be on one device",
            fix="move them together",
        )
    if spec is not None and not isinstance(spec.operation, MixedGemmOperation):
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"must be a kernel of mixed_gemm, not of {spec.operation.family}",
            fix="leave spec out, or pass one of this operation",
        )


def _beside_batches(listed: Sequence[Item], batches: tuple[int, ...]) -> ProblemError:
    """The error of what has batches of its own that are no rows of one matrix."""
    given = [(item[0], item[1]) for item in listed if isinstance(item[1], torch.Tensor)]
    told = ", ".join(f"{kind} {list(value.shape)}" for kind, value in given)
    return ProblemError(
        f"{told} in batches of D {list(batches)}",
        rule="must be read beside the rows of one matrix [M, N], which all batches of a are",
        fix="make what has batches contiguous, of D's rows; of a vector [.., N] make a residual",
    )
