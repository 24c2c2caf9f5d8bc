"""One call of `warploom.gemm`: its arguments, what they ask for, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, ClassVar, cast, get_args, get_type_hints

import torch

from warploom.arguments import require_boolean, shown
from warploom.errors import ProblemError
from warploom.generator.families.gemm import (
    Accumulation,
    GemmOperation,
    GemmProblem,
    GemmShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime.arguments import (
    compound,
    declared,
    dtype,
    named_spec,
    option,
    places_of,
    result,
    tensor,
)
from warploom.runtime.elements import BY_DTYPE, NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.call import Checked, ProductCall
from warploom.runtime.families._product.epilogue import ITEMS, unseen
from warploom.runtime.families._product.operands import (
    Operand,
    broadcast,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.steps import KINDS, OUTPUTS, step_of
from warploom.runtime.families._product.steps.scatter import refuse_batches
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm import block_scales, reference
from warploom.runtime.families.gemm.gradient_rule import GradientOptions, Preactivation
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.tensors import refuse_negated, require_one_device


def layouts(a: torch.Tensor, spec: KernelSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts in which A and B may be read in place, the one that a copy takes first."""
    if spec is not None:
        operation = cast("GemmOperation", spec.operation)
        return (operation.layout_a,), (operation.layout_b,)
    if BY_DTYPE[a.dtype].bits == 16:
        return ("row", "col"), ("col", "row")
    return ("row",), ("col",)


def check_gradient_options(
    b: torch.Tensor,
    preactivation: object,
    main_grad: torch.Tensor | None,
    gradient_dtype: torch.dtype | None,
) -> None:
    """Raise ProblemError for what gradients cannot be computed by, or added to."""
    if preactivation not in ("save", "recompute"):
        raise ProblemError(
            f"preactivation {shown(preactivation)}",
            rule="must be save or recompute",
            fix='leave it out: "save" keeps the input of the activation for backward',
        )
    if gradient_dtype not in (None, torch.bfloat16, torch.float8_e5m2):
        raise ProblemError(
            f"gradient_dtype {shown(gradient_dtype)}",
            rule="must be torch.bfloat16 or torch.float8_e5m2",
            fix="leave it out for bf16; operands of 16 bits are multiplied in their own type",
        )
    if main_grad is not None:
        _check_main_grad(b, main_grad)


def _check_main_grad(b: torch.Tensor, into: torch.Tensor) -> None:
    if not isinstance(into, torch.Tensor) or into.dtype != torch.float32:
        told = into.dtype if isinstance(into, torch.Tensor) else shown(into)
        raise ProblemError(
            f"main_grad of {told}", rule="must be an fp32 tensor", fix="use .float()"
        )
    if into.shape != b.shape or into.device != b.device:
        raise ProblemError(
            f"main_grad {list(into.shape)} on {into.device}",
            rule=f"must be as b, {list(b.shape)} on {b.device}",
            fix="a weight [N, K] that is passed as b by .t() has its sums passed by .t() too",
        )
    if into.requires_grad:
        raise ProblemError(
            f"main_grad {list(into.shape)} that requires grad",
            rule="must not require grad: gradients are added to it in place",
            fix="pass main_grad.detach()",
        )
    if torch.is_grad_enabled() and not b.requires_grad:
        raise ProblemError(
            f"main_grad with b {list(b.shape)} that does not require grad",
            rule="needs a b that requires grad: its gradient is added to main_grad",
            fix="leave it out, or call under torch.no_grad()",
        )
    if not torch.compiler.is_dynamo_compiling():  # which does not trace is_neg()
        refuse_negated([("main_grad", into)])
    refuse_repeated("main_grad", into)


INPUTS: Mapping[str, Any] = {
    name: name for name in get_args(get_type_hints(GemmOperation)["a"]) if name in NAMES.values()
}
"""What operations call the elements of operands, by what the table calls those of a tensor."""


def extents(
    a: torch.Tensor,
    b: torch.Tensor,
    spec: KernelSpec | None,
    inputs: Mapping[str, Any] = INPUTS,
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
        if NAMES.get(operand.dtype) not in inputs:
            raise ProblemError(
                f"{name} of {operand.dtype}",
                rule=f"element types of operands are {', '.join(inputs)}",
                fix='pass precision="fp32"'
                if operand.dtype == torch.float32
                else f"convert with {name}.to(torch.bfloat16)",
            )
    if a.dtype != b.dtype and not (BY_DTYPE[a.dtype].is_fp8 and BY_DTYPE[b.dtype].is_fp8):
        raise ProblemError(
            f"a {a.dtype} by b {b.dtype}",
            rule="must have one type, or are both fp8",
            fix="convert one",
        )
    if a.device != b.device:
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


def accumulation_of(use_fast_accum: bool) -> Accumulation:
    """How an operation accumulates where `use_fast_accum` is this."""
    return "fast" if use_fast_accum else "promoted"


def _is_fast(accumulation: str) -> bool:
    return accumulation == "fast"


@declared
class GemmCall(ProductCall):
    """The arguments of one call of `warploom.gemm`, which says what they mean.

    listed    the items of the epilogue, in order
    """

    function = "warploom.gemm"
    inputs: ClassVar[Mapping[str, Any]] = INPUTS

    a: torch.Tensor = tensor()
    b: torch.Tensor = tensor()
    listed: Sequence[Item] = compound(ITEMS, default=())
    out: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None, schema="ScalarType")
    use_fast_accum: bool = option(
        default=True, schema="str accumulation", encode=accumulation_of, decode=_is_fast
    )
    spec: KernelSpec | None = named_spec(default=None)
    preactivation: Preactivation = option(default="save", schema="str", planned=False)
    main_grad: torch.Tensor | None = option(
        default=None, schema="Tensor? accumulate_into", planned=False
    )
    gradient_dtype: torch.dtype | None = option(default=None, schema="ScalarType?", planned=False)

    @property
    def gradient_options(self) -> GradientOptions:
        """What the call asks of its gradients."""
        dtype = self.gradient_dtype or torch.bfloat16
        return GradientOptions(accumulation_of(self.use_fast_accum), dtype, self.main_grad)

    @property
    def repeats(self) -> bool:
        """Whether another call like it launches the same: each, also of a kernel that is named."""
        return True

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        ProductCall.require(self)
        if type(self.use_fast_accum) is not bool:
            require_boolean("use_fast_accum", self.use_fast_accum)

    def requiring_grad(self) -> torch.Tensor | None:
        """Return a tensor of the call that requires grad. Every call asks, so shortly."""
        if self.a.requires_grad:
            return self.a
        if self.b.requires_grad:
            return self.b
        if self.out is not None and self.out.requires_grad:
            return self.out
        for item in self.listed:
            if isinstance(item[1], torch.Tensor) and item[1].requires_grad:
                return item[1]
        return None

    def written_unseen(self) -> str | None:
        """Return the name of what the call would write and autograd is to know of."""
        if self.out is not None and self.requiring_grad() is not None:
            return "out"
        for item in self.listed:
            if item[0] in OUTPUTS and item[-1].requires_grad:
                return str(item[0])
            step = KINDS.get(item[0])  # None: refused where steps are bound
            if step and step.no_gradient and self.requiring_grad() is not None:
                return str(item[0])
        return None

    def refuse(self) -> None:
        """Raise ProblemError for what the call would write and autograd is to know of."""
        name = self.written_unseen() if torch.is_grad_enabled() else None
        if name is not None:
            raise unseen(name)

    def checked(self) -> Checked:
        """Check the tensors and place the operands, in the layouts of a spec if there is one."""
        a, b, listed, out, spec = self.a, self.b, self.listed, self.out, self.spec
        shape, shared = extents(a, b, spec, self.inputs)
        *lead, m, n = shape
        device = a.get_device()
        scattered = len(listed) > 0 and listed[-1][0] == "scatter"
        if scattered:
            refuse_batches(a, b)
        scaled, scales = None, block_scales.NONE
        if len(listed) > 1:
            vectors = spec is None or cast("GemmOperation", spec.operation).block_scales == "none"
            scaled = block_scales.block_scales(a, b, listed, vectors=vectors)
        rest, batched = listed, shared is not None
        if scaled is not None:
            block_scales.check(scaled, a, b, listed)
            rest = listed[2:]
            batched = batched or not block_scales.in_rows(scaled[0], shape[:-2])
        elif len(listed) > 0:
            block_scales.refuse_partner(a, b, listed)
        bound = epilogue.bind(rest, shape[:-2], m, n, device, batched=batched, k=a.shape[-1])
        shared, shape = shape[:-2] if bound.batched else None, (*lead, m, bound.columns)
        if scattered and out is not None and out.dim() == 2:
            shape = (out.shape[0], bound.columns)
        m, k = (m if shared is not None else prod(lead) * m), a.shape[-1]
        d_type = result_type(a, out, self.out_dtype, len(listed) > 0)
        pitch_d, batch_pitch_d = check_out(out, shape, d_type, device, shared)
        allowed_a, allowed_b = layouts(a, spec)
        if bound.columns < n and spec is None:
            allowed_b = ("col",)  # boxes of 8 rows of the gate, then of up
        left, right = Operand.of(a, allowed_a, shared), Operand.of(b, allowed_b, shared)
        if scaled is not None:
            scales = block_scales.bind(scaled, b, shape[:-2], shared)
        accumulation = accumulation_of(self.use_fast_accum)
        if spec is not None and accumulation == "fast":
            accumulation = cast("GemmOperation", spec.operation).accumulation
        operation = GemmOperation(
            a=self.inputs[left.element.name],
            b=self.inputs[right.element.name],
            d=NAMES[d_type],  # type: ignore[arg-type]
            layout_a=left.matrix.layout,  # type: ignore[arg-type]
            layout_b=right.matrix.layout,  # type: ignore[arg-type]
            accumulation="promoted" if scaled is not None else accumulation,
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
            rows_d=shape[0] if scattered else 0,
        )
        return Checked(
            operation=operation,
            problem=problem,
            shape=GemmShape(problem.m, problem.n, problem.k, problem.batches),
            empty=not all((problem.m, problem.n, problem.k, problem.batches, *shape)),
            epilogue=bound,
            store=storing(
                out, bound.columns, (pitch_d, batch_pitch_d), d_type, paired=bound.paired
            ),
            out_shape=shape,
            out_dtype=d_type,
            operands={"a": left, "b": right},
            scales=() if scaled is None else ("a_scales", "b_scales"),
        )

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """D by plain torch operations."""
        return reference.gemm(self.a, self.b, self.listed, dtype)

    def fake(self) -> torch.Tensor:
        """D of an unchecked call, without contents."""
        n = self.b.shape[-1]
        for item in self.listed:
            n = step_of(item).columns(n)
        extents = (*broadcast(self.a, self.b), self.a.shape[-2], n)
        return self.a.new_empty(extents, dtype=self.out_dtype)

    def crossing(self) -> tuple[list[Any], dict[str, torch.Tensor | None]]:
        """What operators are handed, by position and by keyword, but for what is of gradients."""
        return self.encoded(PRODUCT), dict(ITEMS.written(self.listed))

    def dispatched(self) -> torch.Tensor:
        """Return D by torch's dispatcher, whatever autograd is to know of it."""
        values, written = self.crossing()
        if self.out is None and not written:
            d: torch.Tensor = torch.ops.warploom.gemm(*values)
            return d
        out = self.fake() if self.out is None else self.out
        # torch's inductor leaves an operator that writes beside e8m0, where it cannot compile it.
        operands = values[_OPERANDS]
        values[_OPERANDS] = [one.float() if one.dtype == _E8M0 else one for one in operands]
        torch.ops.warploom.gemm_out(*values, out=out, **written)
        return out


GRADIENT = GemmCall.declaration.part("preactivation", "main_grad", "gradient_dtype")
"""What operators take that say how gradients are computed."""
PRODUCT = tuple(one for one in GemmCall.declaration.crossing if one not in GRADIENT)
"""What all operators take first."""
_OPERANDS = places_of(PRODUCT)["operands"]
_E8M0 = torch.float8_e8m0fnu
