"""One call of `warploom.mixed_gemm`: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, get_args, get_type_hints

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import gate_of
from warploom.generator.families.mixed_gemm import (
    MixedGemmOperation,
    MixedGemmProblem,
    MixedGemmShape,
)
from warploom.generator.formats import activations_of
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.quantization import Metadata, PackedWeight
from warploom.runtime.arguments import (
    Compound,
    compound,
    declared,
    dtype,
    named_spec,
    result,
    tensor,
)
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.call import Checked, ProductCall
from warploom.runtime.families._product.epilogue import ITEMS, unseen
from warploom.runtime.families._product.operands import (
    Operand,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.steps import KINDS, OUTPUTS, step_of
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.mixed_gemm import reference
from warploom.runtime.tensors import refuse_negated, shown

INPUTS: tuple[str, ...] = get_args(get_type_hints(MixedGemmOperation)["a"])


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
        rule="must have the rows of one matrix [M, N], as all batches of a together are one",
        fix="make a tensor with batches contiguous; pass a vector [.., N] as a residual",
    )


class Weight(Compound):
    """A PackedWeight: its tensors, and what its metadata say."""

    schema = (
        "Tensor data, Tensor? channel_scales, Tensor? channel_zeros, str format, int? group, "
        "str scale, str activations, int n, int k"
    )

    values = ("weight.data", "weight.channel_scales", "weight.channel_zeros")

    def key(self, value: PackedWeight) -> object:
        """What its metadata say, and where it is: its tensors lie as that has it."""
        scales, zeros = value.channel_scales, value.channel_zeros
        return (
            value.metadata,
            value.slabs.get_device(),
            value.slabs.is_neg(),
            scales is not None and scales.is_neg(),
            zeros is not None and zeros.is_neg(),
        )

    def named(self, value: PackedWeight) -> list[tuple[str, torch.Tensor]]:
        """Its tensors."""
        return [(f"weight.{name}", tensor) for name, tensor in value.tensors().items()]

    def kernels(self, value: PackedWeight) -> tuple[str, ...]:
        """B, and what lies beside it."""
        return ("b", *[*value.tensors()][1:])

    def addresses(self, value: PackedWeight) -> tuple[int, ...]:
        """The addresses of its tensors."""
        addresses: tuple[int, ...] = (value.slabs.data_ptr(),)
        if value.channel_scales is not None:
            addresses += (value.channel_scales.data_ptr(),)
        if value.channel_zeros is not None:
            addresses += (value.channel_zeros.data_ptr(),)
        return addresses

    def encode(self, value: PackedWeight) -> Sequence[object]:
        """Its tensors and what its metadata say."""
        told = value.metadata
        what = told.format, told.group, told.scale, told.activations, told.n, told.k
        return value.slabs, value.channel_scales, value.channel_zeros, *what

    def decode(
        self, values: Sequence[Any], written: Mapping[str, torch.Tensor | None]
    ) -> PackedWeight:
        """The packed weight again."""
        data, scales, zeros, *what = values
        return PackedWeight(data, Metadata(*what), scales, zeros)


WEIGHT = Weight()


@declared
class MixedGemmCall(ProductCall):
    """The arguments of one call. `listed` are the items of the epilogue, in order."""

    function = "warploom.mixed_gemm"

    a: torch.Tensor = tensor()
    weight: PackedWeight = compound(WEIGHT)
    listed: Sequence[Item] = compound(ITEMS, default=())
    out: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None, schema="ScalarType")
    spec: KernelSpec | None = named_spec(default=None)

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        if not isinstance(self.weight, PackedWeight):
            raise ProblemError(
                f"weight {shown(self.weight)} of type {type(self.weight).__name__}",
                rule="must be a PackedWeight",
                fix="make one of a weight with warploom.quantize; warploom.gemm takes tensors",
            )
        ProductCall.require(self)

    def refuse(self) -> None:
        """Raise ProblemError for what autograd is to know of, and what has no gradient."""
        if not torch.is_grad_enabled():
            return
        weight = self.weight
        for part in (weight.slabs, weight.channel_scales, weight.channel_zeros):
            if part is not None and part.requires_grad:
                name = next(name for name, one in WEIGHT.named(weight) if one is part)
                raise ProblemError(
                    f"{name} that requires grad",
                    rule="must not require grad: a quantized weight is fixed, and has no gradient",
                    fix="differentiate a matmul by weight.dequantize(dtype), and quantize the "
                    "result again",
                )
        if self.out is not None and self.requires_grad:
            raise unseen("out")
        for item in self.listed:
            if item[0] in OUTPUTS and item[-1].requires_grad:
                raise unseen(item[0])
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

    def checked(self) -> Checked:
        """Check the tensors and place a.

        Raises ProblemError naming the tensor, the rule and the fix.
        """
        rule = "must not be: a quantized weight is read as it is stored"
        refuse_negated(WEIGHT.named(self.weight), rule)
        a, weight, listed, out = self.a, self.weight, self.listed, self.out
        check_operands(a, weight, self.spec)
        n, k = weight.shape
        *lead, m = a.shape[:-1]
        device = a.get_device()
        bound = epilogue.bind(listed, tuple(lead), m, n, device, batched=False, k=k)
        if bound.batched:
            raise _beside_batches(listed, tuple(lead))
        shape = (*lead, m, bound.columns)
        d_type = result_type(a, out, self.out_dtype, has_epilogue=True)  # int32 is gemm's alone
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
        return Checked(
            operation=operation,
            problem=problem,
            shape=MixedGemmShape(problem.m, problem.n, problem.k),
            empty=not problem.m,  # W has neither 0 rows nor 0 columns
            epilogue=bound,
            store="direct"
            if gate_of(bound.steps)
            else storing(out, bound.columns, (pitch_d, 0), d_type, paired=bound.paired),
            out_shape=shape,
            out_dtype=d_type,
            operands={"a": left},
        )

    def check(self, details: Checked, results: torch.Tensor) -> None:
        """Raise ProblemError, too, for a weight that is not what its metadata say."""
        ProductCall.check(self, details, results)
        weight = self.weight
        PackedWeight.from_tensors(weight.tensors(), weight.metadata)
        for name, part in WEIGHT.named(weight):
            if part.data_ptr() % PITCH_BYTES:
                raise ProblemError(
                    f"{name} at the address {part.data_ptr():#x}",
                    rule=f"must begin at a multiple of {PITCH_BYTES} bytes: it is copied in bulk",
                    fix="clone it, where it is a part of a larger tensor",
                )

    def reference(self, dtype: torch.dtype) -> torch.Tensor:
        """D by plain torch operations."""
        return reference.mixed_gemm(self.a, self.weight, self.listed, dtype)

    def fake(self) -> torch.Tensor:
        """D of an unchecked call, without contents."""
        n = self.weight.metadata.n
        for item in self.listed:
            n = step_of(item).columns(n)
        return self.a.new_empty((*self.a.shape[:-1], n), dtype=self.out_dtype)
