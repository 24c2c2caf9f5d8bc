"""One call of `warploom.gemm`: its arguments, what they ask for, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, cast, get_args, get_type_hints

import torch

from warploom.arguments import require_dtype, shown
from warploom.errors import ProblemError
from warploom.generator.families._product import Store
from warploom.generator.families.gemm import (
    Accumulation,
    GemmOperation,
    GemmProblem,
    GemmShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments, Draft, Key
from warploom.runtime.elements import BY_DTYPE, NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import BoundEpilogue, Keywords, check_apart, unseen
from warploom.runtime.families._product.operands import (
    Operand,
    broadcast,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.steps import KINDS, OUTPUTS
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm import block_scales, reference
from warploom.runtime.families.gemm.gradient_rule import GradientOptions, Preactivation
from warploom.runtime.negation import refuse_negated
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.tensors import (
    Named,
    refuse_dual,
    require_memory,
    require_one_device,
    require_tensors,
)


def layouts(a: torch.Tensor, spec: KernelSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts in which A and B may be read in place, the one that a copy takes first."""
    if spec is not None:
        operation = cast("GemmOperation", spec.operation)
        return (operation.layout_a,), (operation.layout_b,)
    if BY_DTYPE[a.dtype].bits == 16:
        return ("row", "col"), ("col", "row")
    return ("row",), ("col",)


def refuse_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> None:
    """Raise ProblemError where a call would write what autograd is to know of."""
    name = written_unseen(a, b, out, listed)
    if name is not None:
        raise unseen(name)


def written_unseen(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> str | None:
    """Return the name of what a call would write and autograd is to know of."""
    if out is not None and requiring_grad(a, b, out, listed) is not None:
        return "out"
    for item in listed:
        if item[0] in OUTPUTS and item[-1].requires_grad:
            return str(item[0])
        step = KINDS.get(item[0])  # None: refused where steps are bound
        if step and step.no_gradient and requiring_grad(a, b, None, listed) is not None:
            return str(item[0])
    return None


def requiring_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> torch.Tensor | None:
    """Return a tensor of a call that requires grad. Every call asks, so it is asked shortly."""
    if a.requires_grad:
        return a
    if b.requires_grad:
        return b
    if out is not None and out.requires_grad:
        return out
    for item in listed:
        if isinstance(item[1], torch.Tensor) and item[1].requires_grad:
            return item[1]
    return None


def check_gradient_options(
    b: torch.Tensor,
    preactivation: object,
    accumulate_into: torch.Tensor | None,
    gradient_dtype: torch.dtype | None,
) -> None:
    """Raise ProblemError for what gradients cannot be computed by, or added to."""
    if preactivation not in ("save", "recompute"):
        raise ProblemError(
            f"preactivation {shown(preactivation)}",
            rule="must be save or recompute",
            fix="leave it out: what the activation is given is then kept for the backward pass",
        )
    if gradient_dtype not in (None, torch.bfloat16, torch.float8_e5m2):
        raise ProblemError(
            f"gradient_dtype {shown(gradient_dtype)}",
            rule="must be torch.bfloat16 or torch.float8_e5m2",
            fix="leave it out for bf16; operands of 16 bits are multiplied in their own type",
        )
    if accumulate_into is not None:
        _check_accumulate_into(b, accumulate_into)


def _check_accumulate_into(b: torch.Tensor, into: torch.Tensor) -> None:
    if not isinstance(into, torch.Tensor) or into.dtype != torch.float32:
        told = into.dtype if isinstance(into, torch.Tensor) else shown(into)
        raise ProblemError(
            f"accumulate_into of {told}", rule="must be an fp32 tensor", fix="use .float()"
        )
    if into.shape != b.shape or into.device != b.device:
        raise ProblemError(
            f"accumulate_into {list(into.shape)} on {into.device}",
            rule=f"must be as b, {list(b.shape)} on {b.device}",
            fix="a weight [N, K] that is passed as b by .t() has its sums passed by .t() too",
        )
    if into.requires_grad:
        raise ProblemError(
            f"accumulate_into {list(into.shape)} that requires grad",
            rule="must not: gradients are added to it in place",
            fix="pass accumulate_into.detach()",
        )
    if torch.is_grad_enabled() and not b.requires_grad:
        raise ProblemError(
            f"accumulate_into beside b {list(b.shape)} that does not require grad",
            rule="must be of a b whose gradient is wanted",
            fix="leave it out, or call under torch.no_grad()",
        )
    if not torch.compiler.is_dynamo_compiling():  # which does not trace is_neg()
        refuse_negated([("accumulate_into", into)])
    refuse_repeated("accumulate_into", into)


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
    a: Operand
    b: Operand
    scales: tuple[str, ...]  # what launches call block scales, which come first among items

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
    scaled, scales = None, block_scales.NONE
    if len(listed) > 1:
        operations = [cast("GemmOperation", options.spec.operation)] if options.spec else []
        vectors = all(one.block_scales == "none" for one in operations)
        scaled = block_scales.block_scales(a, b, listed, vectors=vectors)
    rest, batched = listed, shared is not None
    if scaled is not None:
        block_scales.check(scaled, a, b)
        rest = listed[2:]
        batched = batched or not block_scales.in_rows(scaled[0], shape[:-2])
    elif len(listed) > 0:
        block_scales.refuse_partner(a, b, listed)
    bound = epilogue.bind(rest, shape[:-2], m, n, device, batched=batched, k=a.shape[-1])
    shared, shape = shape[:-2] if bound.batched else None, (*lead, m, bound.columns)
    m, k = (m if shared is not None else prod(lead) * m), a.shape[-1]
    d_type = result_type(a, out, options.out_dtype, len(listed) > 0)
    pitch_d, batch_pitch_d = check_out(out, shape, d_type, device, shared)
    allowed_a, allowed_b = layouts(a, options.spec)
    if bound.columns < n and options.spec is None:
        allowed_b = ("col",)  # boxes of 8 rows of the gate, then of up
    left, right = Operand.of(a, allowed_a, shared), Operand.of(b, allowed_b, shared)
    if scaled is not None:
        scales = block_scales.bind(scaled, b, shape[:-2], shared)
    operation = GemmOperation(
        a=left.element.name,  # type: ignore[arg-type]
        b=right.element.name,  # type: ignore[arg-type]
        d=NAMES[d_type],  # type: ignore[arg-type]
        layout_a=left.matrix.layout,  # type: ignore[arg-type]
        layout_b=right.matrix.layout,  # type: ignore[arg-type]
        accumulation="promoted" if scaled is not None else _accumulation(options),
        batched=shared is not None,
        epilogue=bound.steps,
        block_scales=scales.scaling,
        block_scale_a=scales.a,
        block_scale_b=scales.b,
    )
    problem = GemmProblem(
        *(m, n, k),
        *(left.matrix.pitch, right.matrix.pitch, pitch_d),
        pitch_c=bound.pitch_c,
        batches=prod(shared or ()),
        batches_a=left.batches,
        batches_b=right.batches,
        batch_pitch_d=batch_pitch_d,
        batch_pitch_steps=bound.batch_pitches,
        scales_a=scales.strides[0],
        scales_b=scales.strides[1],
    )
    return CheckedCall(
        operation=operation,
        problem=problem,
        epilogue=bound,
        options=options,
        store=storing(out, bound.columns, (pitch_d, batch_pitch_d), d_type, paired=bound.paired),
        out_shape=shape,
        out_dtype=d_type,
        a=left,
        b=right,
        scales=() if scaled is None else ("a_scales", "b_scales"),
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
    if a.dtype != b.dtype and not (BY_DTYPE[a.dtype].is_fp8 and BY_DTYPE[b.dtype].is_fp8):
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
    if options.spec is not None and options.accumulation == "fast":
        return cast("GemmOperation", options.spec.operation).accumulation
    return options.accumulation


@dataclass(slots=True)
class GemmCall:
    """The arguments of one call of `warploom.gemm`, which says what they mean.

    listed    the items of the epilogue, in order

    The last three are of its gradients, and decide no plan.
    """

    a: torch.Tensor
    b: torch.Tensor
    listed: Sequence[Item] = ()
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    accumulation: Accumulation = "fast"
    spec: KernelSpec | None = None
    preactivation: Preactivation = "save"
    accumulate_into: torch.Tensor | None = None
    gradient_dtype: torch.dtype | None = None

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.a.get_device()

    @property
    def options(self) -> Options:
        """What the call asks for beside its tensors."""
        return Options(self.out_dtype, self.accumulation, self.spec)

    @property
    def gradient_options(self) -> GradientOptions:
        """What the call asks of its gradients."""
        dtype = self.gradient_dtype or torch.bfloat16
        return GradientOptions(self.accumulation, dtype, self.accumulate_into)

    def signature(self) -> Key:
        """Everything that decides the plan; every call builds it, so nothing here is a loop."""
        a, b, out, listed = self.a, self.b, self.out, self.listed
        return (
            GemmCall,
            a.shape,
            a.stride(),
            a.dtype,
            a.data_ptr() & 15,
            a.get_device(),
            a.is_neg(),
            b.shape,
            b.stride(),
            b.dtype,
            b.data_ptr() & 15,
            b.get_device(),
            b.is_neg(),
            None
            if out is None
            else (
                out.shape,
                out.stride(),
                out.dtype,
                out.data_ptr() & 15,
                out.get_device(),
                out.is_neg(),
            ),
            epilogue.signature(listed) if listed else (),
            self.out_dtype,
            self.accumulation,
            self.spec,
        )

    def named(self) -> Named:
        """The tensors of the call, by the names that messages have for them."""
        read = epilogue.tensors(self.listed)
        return [("a", self.a), ("b", self.b), ("out", self.out), *read]

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out), *epilogue.outputs(self.listed)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        epilogue.check_items(self.listed)
        require_tensors("warploom.gemm", self.named(), ("a", "b"))
        require_accumulation(self.accumulation)
        if self.out_dtype is not None:  # which no key of a plan can be made with
            require_dtype("out_dtype", self.out_dtype, NAMES)

    def refuse(self) -> None:
        """Raise ProblemError for what the call would write and autograd is to know of."""
        if torch.is_grad_enabled():
            refuse_grad(self.a, self.b, self.out, self.listed)

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        epilogue.check_items(self.listed)
        values = (value for item in self.listed for value in item[1:])
        refuse_dual("warploom.gemm", (self.a, self.b, self.out, *values))

    def draft(self, target: DeviceLimits) -> Draft[CheckedCall]:
        """Check the call, place its operands, and choose its kernel for a GPU."""
        checked = check_call(self.a, self.b, self.listed, self.out, self.options)
        epilogue.check_finite(self.listed)
        choice = dispatch.choose(
            checked.operation,
            checked.shape,
            spec=self.spec,
            device=target,
            requires=checked.store,
        )
        return Draft(
            choice,
            None if checked.empty else checked.problem,
            ("a", "b", "d", *checked.scales, *checked.epilogue.tensors),
            checked.epilogue.scalars,
            ("a",) * bool(checked.a.copy) + ("b",) * bool(checked.b.copy),
            checked,
        )

    def results(self, details: CheckedCall) -> torch.Tensor:
        """D, as it was given, or new."""
        if self.out is not None:
            return self.out
        return self.a.new_empty(details.out_shape, dtype=details.out_dtype)

    def copied(self, details: CheckedCall) -> GemmCall:
        """The same call, with what TMA cannot read copied to where it can."""
        a = details.a.copy(self.a) if details.a.copy else self.a
        b = details.b.copy(self.b) if details.b.copy else self.b
        return replace(self, a=a, b=b)

    def arguments(self, details: CheckedCall, results: torch.Tensor) -> Arguments:
        """The addresses of A, B, D and the items' tensors, and the items' numbers."""
        addresses = (self.a.data_ptr(), self.b.data_ptr(), results.data_ptr())
        listed = self.listed
        if not listed:
            return addresses, ()
        return (*addresses, *epilogue.addresses(listed)), epilogue.scalars(listed)

    def check(self, details: CheckedCall, results: torch.Tensor) -> None:
        """Raise ProblemError for memory that is missing or shared, and for numbers not finite."""
        a, b, listed = self.a, self.b, self.listed
        require_memory(self.named())  # results that are new have some
        check_apart(results, (("a", a), ("b", b)), listed)
        epilogue.check_finite(listed)

    def compute(self, details: CheckedCall, results: torch.Tensor) -> None:
        """Compute D by plain torch operations."""
        with torch.no_grad(), torch.autocast(results.device.type, enabled=False):
            results.copy_(reference.gemm(self.a, self.b, self.listed, details.out_dtype))
