"""One grouped GEMM with quantized weights: what its arguments ask for, and what is done with them.

Rows of A and D have groups that end at `offs`, which only the device reads; each has a weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from warploom.errors import ProblemError
from warploom.generator.families.mixed_gemm import (
    MixedGemmOperation,
    MixedGemmProblem,
    MixedGemmShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import PITCH_BYTES
from warploom.quantization import Metadata
from warploom.quantization.packed_experts import PackedExperts
from warploom.runtime import dispatch
from warploom.runtime.arguments import (
    declared,
    dtype,
    named_spec,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.groups import Details, GroupedProduct
from warploom.runtime.families._product.operands import Operand, check_out, result_type
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.gate import ALPHA, LIMIT
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.mixed_gemm import reference
from warploom.runtime.families.mixed_gemm.call import check_operands
from warploom.runtime.tensors import refuse_negated

WEIGHT = ("slabs", "channel_scales", "channel_zeros")


def _written(metadata: Metadata) -> str:
    """What a weight is, as an operator takes it."""
    of = metadata
    return f"{of.format} {of.group} {of.scale} {of.activations} {of.n} {of.k}"


def _read(text: str) -> Metadata:
    kind, group, scale, activations, n, k = text.split(" ")
    each = None if group == "None" else int(group)
    return Metadata(kind, each, scale, activations, int(n), int(k))


@declared
class GroupedMixedCall(GroupedProduct):
    """The arguments of one grouped GEMM with quantized weights: see `grouped_mixed_gemm`."""

    function = "warploom.grouped_mixed_gemm"
    no_gradient = (
        "a tensor that requires grad",
        "must not: results of a grouped GEMM with quantized weights have no gradient",
        "call it under torch.no_grad(), or multiply by weight.dequantize()",
    )

    a: torch.Tensor = tensor()
    slabs: torch.Tensor = tensor(kernel="b")
    offs: torch.Tensor = tensor(aligned=False, kernel="offsets")
    metadata: Metadata = option(schema="str", encode=_written, decode=_read)
    channel_scales: torch.Tensor | None = tensor(default=None)
    channel_zeros: torch.Tensor | None = tensor(default=None)
    bias: torch.Tensor | None = tensor(default=None)
    scale_a: torch.Tensor | None = tensor(default=None)
    row_scale: torch.Tensor | None = tensor(default=None)
    activation: str | None = option(default=None, schema="str?")
    gate: str | None = option(default=None, schema="str?")
    out: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)
    gate_alpha: float = option(default=ALPHA, schema=f"float={ALPHA}")
    gate_limit: float = option(default=LIMIT, schema=f"float={LIMIT}")

    @property
    def weight(self) -> PackedExperts:
        """The weights of all groups."""
        return PackedExperts(self.slabs, self.metadata, self.channel_scales, self.channel_zeros)

    @property
    def items(self) -> Sequence[Item]:
        """The epilogue."""
        listed = epilogue.items(
            scale_a=self.scale_a,
            bias=self.bias,
            activation=self.activation,
            gate=self.gate,
            gate_alpha=self.gate_alpha,
            gate_limit=self.gate_limit,
            gate_layout="halves" if self.gate is None else "interleaved",
        )
        return self.with_row_scale(listed)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        spec = self.kernel
        self._check(spec)
        a, metadata, groups, device = self.a, self.metadata, self.groups, self.a.get_device()
        (m, k), n = a.shape, metadata.n
        bound = self.bind(self.items, n)
        for item in self.items:
            step_of(item).check_finite(item)
        shape = (m, bound.columns)
        d_type = result_type(a, self.out, self.out_dtype, has_epilogue=True)
        pitch_d, _ = check_out(self.out, shape, d_type, device, None)
        left = Operand.of(a, ("row",), None)
        operation = MixedGemmOperation(
            a=left.element.name,  # type: ignore[arg-type]
            b=metadata.format,  # type: ignore[arg-type]
            d=NAMES[d_type],  # type: ignore[arg-type]
            group=metadata.group or 0,  # type: ignore[arg-type]
            scale=metadata.scale,  # type: ignore[arg-type]
            epilogue=bound.steps,
            groups="rows",
        )
        choice = dispatch.choose(
            operation,
            MixedGemmShape(-(-m // max(1, groups)), n, k, groups),
            spec=spec,
            device=target,
            requires="direct",
        )
        problem = MixedGemmProblem(
            *(m, n, k, left.matrix.pitch, pitch_d, bound.pitch_c),
            batches=groups,
            batch_pitch_steps=bound.batch_pitches,
        )
        copies = () if left.copy is None else ("a",)
        return Draft(
            choice,
            problem if m and groups else None,
            self.addressed(),
            bound.scalars,
            copies,
            Details(shape, d_type, {"a": left}, copies),
        )

    def _check(self, spec: KernelSpec | None) -> None:
        """Raise ProblemError for tensors that are not those of a grouped GEMM."""
        self.check_groups(len(self.weight))
        parts = [(f"weight.{name}", getattr(self, name)) for name in WEIGHT]
        rule = "must not be: a quantized weight is read as it is stored"
        refuse_negated([(name, one) for name, one in parts if one is not None], rule)
        a, weight = self.a, self.weight
        if a.dim() != 2:
            raise ProblemError(
                f"a {list(a.shape)}",
                rule="must be [S, K], the rows of all groups",
                fix="flatten what comes before the last dimension",
            )
        if len(weight):
            check_operands(a, weight[0], spec)
        if spec is not None and spec.operation.groups != "rows":  # type: ignore[attr-defined]
            raise ProblemError(
                f"spec {spec.name}",
                rule="must be a kernel of mixed_gemm with groups rows",
                fix="leave spec out, or pass one of this operation",
            )

    def addressed(self) -> tuple[str, ...]:
        """What kernels call the tensors: those of the epilogue by their places in it."""
        channels = [name for name in WEIGHT[1:] if getattr(self, name) is not None]
        return ("a", "b", "offsets", *channels, *self.steps_addressed(self.items), "d")

    def fake(self) -> tuple[torch.Tensor]:
        """D of an unchecked call, without contents."""
        kind = result_type(self.a, self.out, self.out_dtype, has_epilogue=True)
        n = self.metadata.n // (1 if self.gate is None else 2)
        return (self.a.new_empty((self.a.shape[0], n), dtype=kind),)

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing or shared, and for weights that are not
        what their metadata say.
        """
        GroupedProduct.check(self, details, results)
        if self.groups:
            PackedExperts.from_tensors(self.weight.tensors(), self.metadata)
        for name in WEIGHT:
            part: torch.Tensor | None = getattr(self, name)
            if part is not None and part.data_ptr() % PITCH_BYTES:
                raise ProblemError(
                    f"weight.{name} at the address {part.data_ptr():#x}",
                    rule=f"must begin at a multiple of {PITCH_BYTES} bytes: it is copied in bulk",
                    fix="clone it, where it is a part of a larger tensor",
                )

    # ---- By plain torch --------------------------------------------------------------------------

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute D by plain torch operations, in float64; on a GPU that is of no row."""
        if self.a.is_cuda:
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for group, begin, end, items in self._hit():
                rows, weight = self.a[begin:end], self.weight[group]
                found = reference.mixed_gemm(rows, weight, items, details.dtype)
                results[0][begin:end] = found

    def bound(self, scaled: reference.Scaled = "sums") -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, and how far a kernel's may be from each element; rows of no group are NaN.

        `scaled` is what the kernel applies scales to.
        """
        fake = self.fake()[0]
        x = fake.new_full(fake.shape, torch.nan, dtype=torch.float64)
        error = torch.zeros_like(x)
        for group, begin, end, items in self._hit():
            rows, weight = self.a[begin:end], self.weight[group]
            exact, far = reference.bound(rows, weight, items, fake.dtype, scaled)
            x[begin:end], error[begin:end] = exact, far
        return x, error

    def _hit(self) -> Iterator[tuple[int, int, int, list[Item]]]:
        """Groups that have rows: their number, where they begin and end, and their epilogue."""
        ends = self.ends(self.a.shape[0])
        for group, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            if begin < end:
                yield group, begin, end, [self._of(item, group, begin, end) for item in self.items]

    def _of(self, item: Item, group: int, begin: int, end: int) -> Item:
        """An item as the rows of one group have it."""
        kind, value = item[0], item[1]
        if kind == "bias" and value.dim() == 2:
            value = value[group if value.shape[0] > 1 else 0]
        elif kind in ("scale_a", "scale_row") and value.numel() > 1:
            value = value.reshape(-1)[begin:end]
        return (kind, value, *item[2:])
