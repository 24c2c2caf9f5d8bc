"""One grouped GEMM: what its arguments ask for, and what is done with them.

The kernels are gemm's. Groups end at `offs`, which only the device reads: groups of rows of A and D
have a B each, and groups of k have a D each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from warploom.arguments import require_boolean, require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.gemm import (
    MOST_GROUPS,
    GemmOperation,
    GemmProblem,
    GemmShape,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.accumulation import accumulated
from warploom.runtime.arguments import (
    Arguments,
    declared,
    dtype,
    named_spec,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.elements import BY_DTYPE, NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.operands import (
    Operand,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.reference import apply, bound, rounded
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm.call import INPUTS, accumulation_of
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import require_memory, require_one_device, shown


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    operands: Mapping[str, Operand]
    copies: tuple[str, ...]


@declared
class GroupedCall(Arguments[Details, tuple[torch.Tensor]]):
    """The arguments of one grouped GEMM: see `warploom.grouped_gemm`.

    b has three dimensions where groups are of rows, and two where they are of k.
    """

    function = "warploom.grouped_gemm"
    outputs = ("d",)
    no_gradient = (
        "a tensor that requires grad, with out, or of 8 bits",
        "must be of 16 bits, without out, to be differentiated",
        "leave out=None, or call it under torch.no_grad()",
    )

    a: torch.Tensor = tensor()
    b: torch.Tensor = tensor()
    offs: torch.Tensor = tensor(aligned=False, kernel="offsets")
    bias: torch.Tensor | None = tensor(default=None)
    scale_a: torch.Tensor | None = tensor(default=None)
    scale_b: torch.Tensor | None = tensor(default=None)
    row_scale: torch.Tensor | None = tensor(default=None)
    activation: str | None = option(default=None, schema="str?")
    gate: str | None = option(default=None, schema="str?")
    gate_layout: str = option(default="halves", schema="str")
    use_fast_accum: bool = option(default=True, schema="bool")
    out: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    @property
    def by_rows(self) -> bool:
        """Whether groups are of rows of A and D, not of k."""
        return self.b.dim() == 3

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.offs.shape[0]

    @property
    def items(self) -> Sequence[Item]:
        """The epilogue."""
        listed = epilogue.items(
            scale_a=self.scale_a,
            scale_b=self.scale_b,
            bias=self.bias,
            activation=self.activation,
            gate=self.gate,
            gate_layout=self.gate_layout,  # type: ignore[arg-type]
        )
        return listed if self.row_scale is None else [*listed, ("scale_row", self.row_scale)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        require_boolean("use_fast_accum", self.use_fast_accum)
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, NAMES)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        spec = self.kernel
        self._check(spec)
        a, b, groups, device = self.a, self.b, self.groups, self.a.get_device()
        (m, k), n, shared = a.shape, b.shape[-1], (groups,)
        items = self.items
        bound = epilogue.bind(items, shared, m, n, device, batched=True)
        for item in items:
            step_of(item).check_finite(item)
        shape = (m, bound.columns) if self.by_rows else (groups, m, bound.columns)
        d_type = result_type(a, self.out, self.out_dtype, has_epilogue=bool(items))
        pitch_d, batch_pitch_d = check_out(
            self.out, shape, d_type, device, None if self.by_rows else shared
        )
        left, right = self._placed(spec, gated=bound.columns < n)
        accumulation = accumulation_of(self.use_fast_accum or a.dtype.itemsize > 1)
        if spec is not None and accumulation == "fast":
            accumulation = spec.operation.accumulation  # type: ignore[attr-defined]
        operation = GemmOperation(
            a=left.element.name,  # type: ignore[arg-type]
            b=right.element.name,  # type: ignore[arg-type]
            d=NAMES[d_type],  # type: ignore[arg-type]
            layout_a=left.matrix.layout,  # type: ignore[arg-type]
            layout_b=right.matrix.layout,  # type: ignore[arg-type]
            epilogue=bound.steps,
            accumulation=accumulation,
            batched=True,
            groups="rows" if self.by_rows else "k",
        )
        each = max(1, groups)
        rows, sums = (-(-m // each), k) if self.by_rows else (m, -(-k // each))
        pitches = pitch_d, 0 if self.by_rows else batch_pitch_d
        choice = dispatch.choose(
            operation,
            GemmShape(rows, n, sums, groups),
            spec=spec,
            device=target,
            requires=storing(self.out, bound.columns, pitches, d_type, paired=bound.paired),
        )
        problem = GemmProblem(
            *(m, n, k, left.matrix.pitch, right.matrix.pitch, pitch_d),
            pitch_c=bound.pitch_c,
            batches=groups,
            batches_b=right.batches,
            batch_pitch_d=batch_pitch_d,
            batch_pitch_steps=bound.batch_pitches,
        )
        operands = {"a": left, "b": right}
        copies = tuple(name for name, one in operands.items() if one.copy is not None)
        return Draft(
            choice,
            problem if m and n and k and groups else None,
            self.addressed(),
            bound.scalars,
            copies,
            Details(shape, d_type, operands, copies),
        )

    def _placed(self, spec: KernelSpec | None, *, gated: bool) -> tuple[Operand, Operand]:
        """A and B where TMA reads them."""
        if not self.by_rows:
            return Operand.of(self.a, ("col",), None), Operand.of(self.b, ("row",), None)
        allowed: tuple[str, ...] = ("col",)
        if spec is not None:
            allowed = (spec.operation.layout_b,)  # type: ignore[attr-defined]
        elif self.a.dtype.itemsize > 1 and not gated:
            allowed = ("col", "row")
        return Operand.of(self.a, ("row",), None), Operand.of(self.b, allowed, (self.groups,))

    def _check(self, spec: KernelSpec | None) -> None:
        """Raise ProblemError for tensors that are not those of a grouped GEMM."""
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        a, b, offs = self.a, self.b, self.offs
        if a.dim() != 2 or b.dim() not in (2, 3) or a.shape[1] != b.shape[-2]:
            raise ProblemError(
                f"a {list(a.shape)} by b {list(b.shape)} with offs",
                rule="must be [S, K] by [G, K, N], whose groups are of rows, or [M, S] by [S, N], "
                "whose groups are of k",
                fix="weights [G, N, K] are b after .mT; without groups use warploom.gemm",
            )
        if offs.dtype != torch.int32 or offs.dim() != 1 or not offs.is_contiguous():
            raise ProblemError(
                f"offs {list(offs.shape)} of {offs.dtype} with strides {list(offs.stride())}",
                rule="must be contiguous int32 [G]: where each group ends",
                fix="use counts.cumsum(0, dtype=torch.int32)",
            )
        if self.by_rows and b.shape[0] != offs.shape[0]:
            raise ProblemError(
                f"b {list(b.shape)} with offs {list(offs.shape)}",
                rule="must have one matrix for each group",
                fix="pass an end for every group: of an empty one it is that of the one before",
            )
        if offs.shape[0] > MOST_GROUPS:
            raise ProblemError(
                f"offs {list(offs.shape)}",
                rule=f"must be of at most {MOST_GROUPS} groups, whose ends a CTA keeps in shared "
                "memory",
                fix="call it for some of the groups at a time",
            )
        for name, one in (("a", a), ("b", b)):
            if NAMES.get(one.dtype) not in INPUTS:
                raise ProblemError(
                    f"{name} of {one.dtype}",
                    rule=f"element types of operands are {', '.join(INPUTS)}",
                    fix=f"convert with {name}.to(torch.bfloat16)",
                )
        if a.dtype != b.dtype and not (BY_DTYPE[a.dtype].is_fp8 and BY_DTYPE[b.dtype].is_fp8):
            raise ProblemError(
                f"a {a.dtype} by b {b.dtype}",
                rule="must have one type, or are both fp8",
                fix="convert one",
            )
        if not self.by_rows and a.dtype.itemsize == 1:
            raise ProblemError(
                f"a of {a.dtype} with groups of k",
                rule="must be of 16 bits: 8-bit operands of wgmma have contiguous k, in which a "
                "group cannot begin anywhere",
                fix="convert a and b to torch.bfloat16",
            )
        if spec is not None:
            self._check_spec(spec)

    def check_epilogue(self) -> None:
        """Raise ProblemError for what `draft` refuses, of a call whose epilogue torch computes."""
        if torch.compiler.is_dynamo_compiling():
            return
        self.require()
        self._check(None)
        (m, _), n = self.a.shape, self.b.shape[-1]
        epilogue.bind(self.items, (self.groups,), m, n, self.a.get_device(), batched=True)

    def _check_spec(self, spec: KernelSpec) -> None:
        operation, groups = spec.operation, "rows" if self.by_rows else "k"
        if not isinstance(operation, GemmOperation) or operation.groups != groups:
            raise ProblemError(
                f"spec {spec.name}",
                rule=f"must be a kernel of gemm with groups {groups}",
                fix="leave spec out, or pass one of this operation",
            )

    def addressed(self) -> tuple[str, ...]:
        """What kernels call the tensors: those of the epilogue by their places in it."""
        fields = {
            _TENSORS[item[0]]: f"{item[0] if item[0] == 'bias' else 'scale'}_{index}"
            for index, item in enumerate(self.items)
            if item[0] in _TENSORS
        }
        given = ("bias", "scale_a", "scale_b", "row_scale")  # in the order of their declarations
        return ("a", "b", "offsets", *(fields[name] for name in given if name in fields), "d")

    def results(self, details: Details) -> tuple[torch.Tensor]:
        """D, as it was given, or new."""
        if self.out is not None:
            return (self.out,)
        return (self.a.new_empty(details.shape, dtype=details.dtype),)

    def copied(self, details: Details) -> Self:
        """The same call, with what TMA cannot read copied to where it can."""
        copies: dict[str, Any] = {
            name: one.copy(getattr(self, name))
            for name, one in details.operands.items()
            if one.copy is not None
        }
        return replace(self, **copies)

    def fake(self) -> tuple[torch.Tensor]:
        """D of an unchecked call, without contents."""
        kind = result_type(self.a, self.out, self.out_dtype, has_epilogue=bool(self.items))
        n = self.b.shape[-1] // (1 if self.gate is None else 2)
        groups = () if self.by_rows else (self.groups,)
        return (self.a.new_empty((*groups, self.a.shape[0], n), dtype=kind),)

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        require_memory([*self.named(), ("out", results[0])])
        refuse_overlap(results[0], self.read(), "do not overlap")

    # ---- By plain torch --------------------------------------------------------------------------

    def ends(self) -> list[int]:
        """Where groups end, read on the host: with a wait where they are on a GPU.

        Raises ProblemError for offsets that decrease or lie outside of what is divided.
        """
        found, size = self.offs.tolist(), self.a.shape[0 if self.by_rows else 1]
        if any(one < before for before, one in zip([0, *found], [*found, size], strict=True)):
            raise ProblemError(
                f"offs {shown(found)}",
                rule=f"must not decrease, from 0 on to at most {size}",
                fix="use counts.cumsum(0, dtype=torch.int32)",
            )
        return found

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute D by plain torch operations, in fp32; int8 in float64.

        On a GPU this is for products of nothing, and the host does not read `offs`.
        """
        if self.by_rows and not self.groups:  # rows of no group are left as they are
            return
        wide = torch.float64 if self.a.dtype == torch.int8 else torch.float32
        out = results[0]
        with torch.no_grad(), torch.autocast(self.a.device.type, enabled=False):
            if self.a.is_cuda:
                x = out.new_zeros((*out.shape[:-1], self.b.shape[-1]), dtype=wide)
            else:
                x = self.products(wide)
            x, items = self._by_row(x.to(torch.float32) if self.items else x)
            found = rounded(apply(x, items), details.dtype, items).reshape(out.shape)
            if not self.by_rows:
                out.copy_(found)
            elif self.groups:
                rows = torch.arange(out.shape[0], device=out.device)[:, None]
                out.copy_(torch.where(rows < self.offs[-1], found, out))

    def bound(self) -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, and how far a kernel's may be from each element; rows past the last group
        are NaN.
        """
        x, magnitude = self.products(torch.float64), self.products(torch.float64, magnitudes=True)
        kind = "fast" if self.use_fast_accum or self.a.dtype.itemsize > 1 else "promoted"
        error = accumulated(self.a.dtype, self.a.shape[1], kind) * magnitude
        fake = self.fake()[0]
        (x, items), (error, _) = self._by_row(x), self._by_row(error)
        x, error = bound(x, error, items, fake.dtype)
        x, error = x.reshape(fake.shape), error.reshape(fake.shape)
        if self.by_rows:
            last = self.ends()[-1] if self.groups else 0
            x[last:] = torch.nan
        return x, error

    def products(self, dtype: torch.dtype, *, magnitudes: bool = False) -> torch.Tensor:
        """The sums of products in a type; of absolute values if asked for. The rows past the last
        group are zeros, and nothing is read that is opposite of no group.
        """
        a, b, ends = self.a.to(dtype), self.b.to(dtype), self.ends()
        if magnitudes:
            a, b = a.abs(), b.abs()
        ranges = list(enumerate(zip([0, *ends], ends, strict=False)))
        if self.by_rows:
            x = a.new_zeros(a.shape[0], b.shape[-1])
            for group, (begin, end) in ranges:
                x[begin:end] = a[begin:end] @ b[group]
            return x
        sums = [a[:, begin:end] @ b[begin:end] for _, (begin, end) in ranges]
        return torch.stack(sums) if sums else a.new_zeros(0, a.shape[0], b.shape[-1])

    def _by_row(self, x: torch.Tensor) -> tuple[torch.Tensor, list[Item]]:
        """Accumulators, and the epilogue, as batches of which each has one group: of groups of
        rows each row is a batch of its own.
        """
        if not self.by_rows:
            return x, [*self.items]
        rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        group = torch.searchsorted(self.offs, rows, right=True).clamp(max=max(0, self.groups - 1))
        items: list[Item] = []
        for item in self.items:
            kind, value = item[0], item[1]
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                if kind in ("scale_a", "scale_row"):
                    value = value.reshape(-1, 1)
                else:
                    value = value.expand(self.groups, x.shape[-1])[group]
            items.append((kind, value, *item[2:]))
        return x[:, None], items


_TENSORS = {"bias": "bias", "scale_a": "scale_a", "scale_b": "scale_b", "scale_row": "row_scale"}
"""Items that have tensors, and what calls have for them."""
