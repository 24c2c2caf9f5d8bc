"""One call of `warploom.mixed_gemm`: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple, get_args, get_type_hints

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families._product import Store
from warploom.generator.families.mixed_gemm import (
    MixedGemmOperation,
    MixedGemmProblem,
    MixedGemmShape,
)
from warploom.generator.formats import activations_of
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.quantization import PackedWeight
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments, Draft, Key
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import BoundEpilogue, check_apart, unseen
from warploom.runtime.families._product.operands import (
    Operand,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.steps import KINDS, OUTPUTS
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.mixed_gemm import reference
from warploom.runtime.negation import refuse_negated
from warploom.runtime.tensors import Named, refuse_dual, require_memory, require_tensors, shown

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
    a: Operand

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
    bound = epilogue.bind(listed, tuple(lead), m, n, device, batched=False, k=k)
    if bound.batched:
        raise _beside_batches(listed, tuple(lead))
    shape = (*lead, m, bound.columns)
    d_type = result_type(a, out, options.out_dtype, has_epilogue=True)  # int32 is gemm's alone
    pitch_d, _ = check_out(out, shape, d_type, device, None)
    left = Operand.of(a, ("row",), None)
    metadata = weight.metadata
    operation = MixedGemmOperation(
        a=left.element.name,  # type: ignore[arg-type]
        b=metadata.format,  # type: ignore[arg-type]
        d=NAMES[d_type],  # type: ignore[arg-type]
        group=metadata.group or 0,  # type: ignore[arg-type]
        scale=metadata.scale,  # type: ignore[arg-type]
        epilogue=bound.steps,
    )
    problem = MixedGemmProblem(
        prod(lead) * m, n, k, pitch_a=left.matrix.pitch, pitch_d=pitch_d, pitch_c=bound.pitch_c
    )
    return CheckedCall(
        operation=operation,
        problem=problem,
        epilogue=bound,
        store=storing(out, bound.columns, (pitch_d, 0), d_type, paired=bound.paired),
        out_shape=shape,
        out_dtype=d_type,
        a=left,
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


@dataclass(slots=True)
class MixedGemmCall:
    """The arguments of one call. `listed` are the items of the epilogue, in order."""

    a: torch.Tensor
    weight: PackedWeight
    listed: Sequence[Item] = ()
    out: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None
    spec: KernelSpec | None = None

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.a.get_device()

    def signature(self) -> Key:
        """Everything that decides the plan; every call builds it, so nothing here is a loop."""
        a, out, listed, weight = self.a, self.out, self.listed, self.weight
        scales, zeros = weight.channel_scales, weight.channel_zeros
        return (
            MixedGemmCall,
            a.shape,
            a.stride(),
            a.dtype,
            a.data_ptr() & 15,
            a.get_device(),
            a.is_neg(),
            weight.metadata,
            weight.slabs.get_device(),
            weight.slabs.is_neg(),
            scales is not None and scales.is_neg(),
            zeros is not None and zeros.is_neg(),
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
            self.spec,
        )

    def named(self) -> Named:
        """The tensors of the call, by the names that messages have for them."""
        read = [(item[0], item[1]) for item in self.listed if isinstance(item[1], torch.Tensor)]
        return [("a", self.a), *self._parts(), ("out", self.out), *read]

    def written(self) -> Named:
        """The tensors that are given for a kernel to write."""
        return [("out", self.out), *epilogue.outputs(self.listed)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        if not isinstance(self.weight, PackedWeight):
            raise ProblemError(
                f"weight {shown(self.weight)} of type {type(self.weight).__name__}",
                rule="must be a PackedWeight",
                fix="make one of a weight with warploom.quantize; warploom.gemm takes tensors",
            )
        epilogue.check_items(self.listed)
        require_tensors("warploom.mixed_gemm", self.named(), ("a", "weight.data"))
        if self.out_dtype is not None:  # which no key of a plan can be made with
            require_dtype("out_dtype", self.out_dtype, NAMES)

    def refuse(self) -> None:
        """Raise ProblemError for what autograd is to know of, and what has no gradient."""
        if not torch.is_grad_enabled():
            return
        for name, part in self._parts():
            if part.requires_grad:
                raise ProblemError(
                    f"{name} that requires grad",
                    rule="must not: a packed weight is fixed, and has no gradient",
                    fix="differentiate a product with weight.dequantize(dtype), and quantise anew",
                )
        if self.out is not None and self.requires_grad:
            raise unseen("out")
        for item in self.listed:
            if item[0] in OUTPUTS and item[1].requires_grad:
                raise unseen(str(item[0]))
        kind = self.unseen_kind
        if kind is not None:
            raise unseen(kind)

    @property
    def unseen_kind(self) -> str | None:
        """The kind of an item without a gradient, where a tensor of the call requires grad."""
        if not self.requires_grad:
            return None
        kinds = (str(item[0]) for item in self.listed)
        return next((kind for kind in kinds if kind in KINDS and KINDS[kind].no_gradient), None)

    @property
    def requires_grad(self) -> bool:
        """True where a tensor of the call requires grad. Every call asks, so shortly."""
        out, scales = self.out, self.weight.channel_scales
        if self.a.requires_grad or (out is not None and out.requires_grad):
            return True
        if scales is not None and scales.requires_grad:
            return True
        for item in self.listed:
            if isinstance(item[1], torch.Tensor) and item[1].requires_grad:
                return True
        return False

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        epilogue.check_items(self.listed)
        values = (item[1] for item in self.listed)
        refuse_dual("warploom.mixed_gemm", (self.a, self.out, *values))

    def draft(self, target: DeviceLimits) -> Draft[CheckedCall]:
        """Check the call, place its operands, and choose its kernel for a GPU."""
        refuse_negated(self._parts(), "must not be: a quantized weight is read as it is stored")
        options = Options(self.out_dtype, self.spec)
        checked = check_call(self.a, self.weight, self.listed, self.out, options)
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
            ("a", "b", *[*self.weight.tensors()][1:], "d", *checked.epilogue.tensors),
            checked.epilogue.scalars,
            ("a",) if checked.a.copy else (),
            checked,
        )

    def results(self, details: CheckedCall) -> torch.Tensor:
        """D, as it was given, or new."""
        if self.out is not None:
            return self.out
        return self.a.new_empty(details.out_shape, dtype=details.out_dtype)

    def copied(self, details: CheckedCall) -> MixedGemmCall:
        """The same call, with an a that TMA cannot read copied to where it can."""
        return replace(self, a=details.a.copy(self.a)) if details.a.copy else self

    def arguments(self, details: CheckedCall, results: torch.Tensor) -> Arguments:
        """The addresses of A, W's tensors, D and the items' tensors, and the items' numbers."""
        weight, listed = self.weight, self.listed
        addresses: tuple[int, ...] = (self.a.data_ptr(), weight.slabs.data_ptr())
        if weight.channel_scales is not None:
            addresses += (weight.channel_scales.data_ptr(),)
        if weight.channel_zeros is not None:
            addresses += (weight.channel_zeros.data_ptr(),)
        addresses += (results.data_ptr(),)
        if not listed:
            return addresses, ()
        return addresses + epilogue.addresses(listed), epilogue.scalars(listed)

    def check(self, details: CheckedCall, results: torch.Tensor) -> None:
        """Raise ProblemError for memory that is missing or shared, for a weight that is not what
        its metadata say, and for numbers that are not finite.
        """
        weight, listed = self.weight, self.listed
        require_memory(replace(self, out=results).named())
        PackedWeight.from_tensors(weight.tensors(), weight.metadata)
        for name, part in self._parts():
            if part.data_ptr() % PITCH_BYTES:
                raise ProblemError(
                    f"{name} at the address {part.data_ptr():#x}",
                    rule=f"must begin at a multiple of {PITCH_BYTES} bytes: it is copied in bulk",
                    fix="clone it, where it is a part of a larger tensor",
                )
        check_apart(results, [("a", self.a), *self._parts()], listed)
        epilogue.check_finite(listed)

    def compute(self, details: CheckedCall, results: torch.Tensor) -> None:
        """Compute D by plain torch operations."""
        with torch.no_grad(), torch.autocast(results.device.type, enabled=False):
            found = reference.mixed_gemm(self.a, self.weight, self.listed, details.out_dtype)
            results.copy_(found)

    def _parts(self) -> list[tuple[str, torch.Tensor]]:
        return [(f"weight.{name}", tensor) for name, tensor in self.weight.tensors().items()]
