"""One grouped GEMM: what its arguments ask for, and what is done with them.

The kernels are gemm's. Groups end at `offs`, which only the device reads: groups of rows of A and D
have a B each, and groups of k have a D each. In 8 bits the latter begin at multiples of 128, where
k tiles do; zeros are behind a group that is shorter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.families.gemm import (
    SCALE_BLOCK,
    GemmOperation,
    GemmProblem,
    GemmShape,
    Groups,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch
from warploom.runtime.accumulation import accumulated
from warploom.runtime.arguments import (
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
from warploom.runtime.families._product.groups import (
    Details,
    GroupedProduct,
    in_groups,
    operand_of_groups,
)
from warploom.runtime.families._product.operands import (
    Operand,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.reference import apply, bound, rounded
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.gate import ALPHA, LIMIT
from warploom.runtime.families._product.steps.scatter import written
from warploom.runtime.families._product.steps.step import ROUNDOFF, Item
from warploom.runtime.families.gemm import block_scales
from warploom.runtime.families.gemm.call import INPUTS, accumulation_of
from warploom.runtime.tensors import shown


@declared
class GroupedCall(GroupedProduct):
    """The arguments of one grouped GEMM: see `warploom.grouped_gemm`.

    b has three dimensions where groups are of rows, and two where they are of k.

    expected_m   None where rows of a follow each other; else groups of rows have one size, and
                 `offs` are lengths: how many rows of each count, of which so many are expected
    """

    function = "warploom.grouped_gemm"
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
    residual: torch.Tensor | None = tensor(default=None)
    activation: str | None = option(default=None, schema="str?")
    gate: str | None = option(default=None, schema="str?")
    gate_layout: str = option(default="halves", schema="str")
    use_fast_accum: bool = option(default=True, schema="bool")
    expected_m: int | None = option(default=None, schema="int?")
    out: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)
    gate_alpha: float = option(default=ALPHA, schema=f"float={ALPHA}")
    gate_limit: float = option(default=LIMIT, schema=f"float={LIMIT}")
    scatter: torch.Tensor | None = tensor(default=None, schema="Tensor?=None", aligned=False)

    @property
    def by_rows(self) -> bool:
        """Whether groups are of rows of A and D, not of k."""
        return self.b.dim() == 3

    @property
    def grouping(self) -> Groups:
        """What operations call such groups."""
        if not self.by_rows:
            return "k"
        return "rows" if self.expected_m is None else "masked"

    @property
    def scaled(self) -> block_scales.Pair | None:
        """scale_a and scale_b, where they are block scales."""
        if self.scale_b is None or self.scale_b.dim() != self.b.dim():
            return None
        return block_scales.block_scales(self.a, self.b, self.items, vectors=False)

    @property
    def items(self) -> Sequence[Item]:
        """The epilogue."""
        listed = epilogue.items(
            scale_a=self.scale_a,
            scale_b=self.scale_b,
            bias=self.bias,
            activation=self.activation,
            gate=self.gate,
            gate_alpha=self.gate_alpha,
            gate_limit=self.gate_limit,
            gate_layout=self.gate_layout,  # type: ignore[arg-type]
        )
        listed = [*self.with_row_scale(listed)]
        if self.residual is not None:
            listed.append(("residual", self.residual, 1.0))
        return listed if self.scatter is None else [*listed, ("scatter", self.scatter)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        GroupedProduct.require(self)
        require_boolean("use_fast_accum", self.use_fast_accum)

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        spec = self.kernel
        self._check(spec)
        a, b, groups, device = self.a, self.b, self.groups, self.a.get_device()
        (m, k), n, shared = a.shape, b.shape[-1], (groups,)
        items, scaled, scales = self.items, self.scaled, block_scales.NONE
        if scaled is not None:
            block_scales.check(scaled, a, b, items)
            lead = shared if self.by_rows else ()
            scales = block_scales.bind(scaled, b, lead, lead or None)
            if n <= 1 and not self.by_rows:  # whose only column is a block as well
                scales = replace(scales, scaling="row_row")
            self._check_blocks(scales.scaling)
        else:
            block_scales.refuse_partner(a, b, items)
        steps = items if scaled is None else items[2:]
        bound = self.bind(steps, n)
        for item in steps:
            step_of(item).check_finite(item)
        shape = (m, bound.columns) if self.by_rows else (groups, m, bound.columns)
        if self.scatter is not None and self.out is not None and self.out.dim() == 2:
            shape = (self.out.shape[0], bound.columns)
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
            accumulation=accumulation if scaled is None else "promoted",
            batched=True,
            block_scales=scales.scaling,
            block_scale_a=scales.a,
            block_scale_b=scales.b,
            groups=self.grouping,
        )
        each = max(1, groups)
        rows, sums = (-(-m // each), k) if self.by_rows else (m, -(-k // each))
        rows = rows if self.expected_m is None else min(self.expected_m, rows)
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
            scales_a=scales.strides[0],
            scales_b=scales.strides[1],
            rows_d=0 if self.scatter is None else shape[0],
        )
        operands = {"a": left, "b": right}
        copies = tuple(name for name, one in operands.items() if one.copy is not None)
        return Draft(
            choice,
            problem if m and n and k and groups and shape[0] else None,
            self.addressed(),
            bound.scalars,
            copies,
            Details(shape, d_type, operands, copies),
        )

    def _placed(self, spec: KernelSpec | None, *, gated: bool) -> tuple[Operand, Operand]:
        """A and B where TMA reads them."""
        if not self.by_rows:
            own, other = ("row", "col") if self.a.dtype.itemsize == 1 else ("col", "row")
            return Operand.of(self.a, (own,), None), Operand.of(self.b, (other,), None)
        allowed: tuple[str, ...] = ("col",)
        if spec is not None:
            allowed = (spec.operation.layout_b,)  # type: ignore[attr-defined]
        elif self.a.dtype.itemsize > 1 and not gated:
            allowed = ("col", "row")
        return Operand.of(self.a, ("row",), None), operand_of_groups(self.b, allowed)

    def _check(self, spec: KernelSpec | None) -> None:
        """Raise ProblemError for tensors that are not those of a grouped GEMM."""
        a, b, masked = self.a, self.b, self.expected_m is not None
        if a.dim() != 2 or b.dim() not in (2, 3) or a.shape[1] != b.shape[-2]:
            raise ProblemError(
                f"a {list(a.shape)} by b {list(b.shape)} with offs",
                rule="must be [S, K] by [G, K, N], whose groups are of rows, or [M, S] by [S, N], "
                "whose groups are of k",
                fix="weights [G, N, K] are b after .mT; without groups use warploom.gemm",
            )
        self.check_groups(b.shape[0] if self.by_rows else None, lengths=masked)
        if masked and self.groups and a.shape[0] % self.groups:
            raise ProblemError(
                f"a {list(a.shape)} with lengths {list(self.offs.shape)}",
                rule="must be of batches with as many rows each",
                fix="pass a [G, M, K] to warploom.grouped_gemm",
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
        if spec is not None:
            self._check_spec(spec)

    def check_epilogue(self) -> None:
        """Raise ProblemError for what `draft` refuses, of a call whose epilogue torch computes."""
        if torch.compiler.is_dynamo_compiling():
            return
        self.require()
        self._check(None)
        self.bind(self.items if self.scaled is None else self.items[2:], self.b.shape[-1])

    def _check_blocks(self, scaling: str) -> None:
        if scaling == ("row_block" if self.by_rows else "row_row"):
            return
        assert self.scale_b is not None  # noqa: S101 (for type checkers)
        k, n = self.b.shape[-2:]
        rule = "[G, N/128, K/128], rounded up: one for each 128x128 of a weight [G, N, K]"
        fix = "quantize the weights by blocks of 128x128"
        if not self.by_rows:
            rule = f"{[n, -(-k // SCALE_BLOCK)]}: one for each 1x128 of b.T"
            fix = "use warploom.cast(.., block=(1, 128), transpose=True, offsets=offs)"
        raise ProblemError(
            f"scale_b {list(self.scale_b.shape)} with b {list(self.b.shape)}",
            rule=f"block scales of groups must be {rule}",
            fix=fix,
        )

    def _check_spec(self, spec: KernelSpec) -> None:
        operation, groups = spec.operation, self.grouping
        if not isinstance(operation, GemmOperation) or operation.groups != groups:
            raise ProblemError(
                f"spec {spec.name}",
                rule=f"must be a kernel of gemm with groups {groups}",
                fix="leave spec out, or pass one of this operation",
            )

    def addressed(self) -> tuple[str, ...]:
        """What kernels call the tensors: those of the epilogue by their places in it."""
        if self.scaled is None:
            steps = self.steps_addressed(self.items)
        else:
            blocks = {"scale_a": "a_scales", "scale_b": "b_scales"}
            steps = self.steps_addressed(self.items[2:], **blocks)
        return ("a", "b", "offsets", *steps, "d")

    def fake(self) -> tuple[torch.Tensor]:
        """D of an unchecked call, without contents."""
        kind = result_type(self.a, self.out, self.out_dtype, has_epilogue=bool(self.items))
        n = self.b.shape[-1] // (1 if self.gate is None else 2)
        groups = () if self.by_rows else (self.groups,)
        return (self.a.new_empty((*groups, self.a.shape[0], n), dtype=kind),)

    # ---- By plain torch --------------------------------------------------------------------------

    def ranges(self) -> list[tuple[int, int]]:
        """Where groups begin and end, read on the host: with a wait where that is on a GPU.

        Raises ProblemError for offsets that decrease or lie outside of what is divided, and for
        lengths outside of a batch.
        """
        size = self.a.shape[0 if self.by_rows else 1]
        if self.expected_m is None:
            found = self.ends(size)
            if not self.by_rows and self.a.dtype.itemsize == 1:
                self._check_ends(found, size)
            return list(zip([0, *found], found, strict=False))
        found, each = self.offs.tolist(), size // max(1, self.groups)
        if any(not 0 <= one <= each for one in found):
            raise ProblemError(
                f"lengths {shown(found)}",
                rule=f"must be from 0 to {each}, the rows of a batch",
                fix="use counts.clamp(0, a.shape[1]).int()",
            )
        return [(group * each, group * each + one) for group, one in enumerate(found)]

    def _check_ends(self, ends: list[int], size: int) -> None:
        """Raise ProblemError for groups of k in 8 bits that begin where no k tile does."""
        if any(one % SCALE_BLOCK and one != size for one in ends):
            raise ProblemError(
                f"offs {shown(ends)} of groups of k in {self.a.dtype}",
                rule=f"must be multiples of {SCALE_BLOCK}, at which k tiles of 8 bits begin",
                fix="use what warploom.cast(x, .., transpose=True, offsets=offs) returns: it puts "
                "zeros behind each group",
            )

    def counted(self) -> torch.Tensor:
        """Which rows are of a group: bool [S], as the device says."""
        count = self.a.shape[0]
        if self.expected_m is None:
            return in_groups(count, self.offs)
        each = count // max(1, self.groups)
        rows = torch.arange(count, device=self.a.device)
        return rows % max(1, each) < self.offs.repeat_interleave(each, output_size=count)

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
                shape = (self.a.shape[0], self.b.shape[-1])
                x = out.new_zeros(shape if self.by_rows else out.shape, dtype=wide)
            else:
                x = self.products(wide)
            x, items = self._by_row(x.to(torch.float32) if self.items else x)
            found = rounded(apply(x, items), details.dtype, items)
            if not self.by_rows:
                out.copy_(found.reshape(out.shape))
            elif self.scatter is not None:
                index = torch.where(self.counted(), self.scatter, -1)
                out.copy_(written(out, found.flatten(0, 1), index))
            else:
                out.copy_(torch.where(self.counted()[:, None], found.flatten(0, 1), out))

    def bound(self) -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, NaN in rows that are not written, and how far a kernel's may be from it."""
        x, magnitude = self.products(torch.float64), self.products(torch.float64, magnitudes=True)
        kind = "fast" if self.use_fast_accum or self.a.dtype.itemsize > 1 else "promoted"
        share = accumulated(self.a.dtype, self.a.shape[1], kind)
        if self.scaled is not None:  # sums over blocks of k are scaled where they are added
            share = accumulated(self.a.dtype, self.a.shape[1], "promoted") + 2 * ROUNDOFF
        error = share * magnitude
        fake = self.fake()[0]
        (x, items), (error, _) = self._by_row(x), self._by_row(error)
        x, error = bound(x, error, items, fake.dtype)
        x, error = x.reshape(fake.shape), error.reshape(fake.shape)
        if self.by_rows:
            x[~self.counted()] = torch.nan
        if self.scatter is None:
            return x, error
        index = torch.where(self.counted(), self.scatter, -1)
        unwritten = x.new_full((fake if self.out is None else self.out).shape, torch.nan)
        return written(unwritten, x, index), written(torch.zeros_like(unwritten), error, index)

    def products(self, dtype: torch.dtype, *, magnitudes: bool = False) -> torch.Tensor:
        """The sums of products in a type; of absolute values if asked for. The rows of no group are
        zeros, and nothing is read that is opposite of no group.
        """
        a, b, scaled = self.a.to(dtype), self.b.to(dtype), self.scaled
        if scaled is not None:
            a = block_scales.dequantised(self.a, scaled[0], dtype)
            b = block_scales.dequantised(self.b.mT, scaled[1], dtype).mT
        if magnitudes:
            a, b = a.abs(), b.abs()
        ranges = list(enumerate(self.ranges()))
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
            return x, [*self.items[0 if self.scaled is None else 2 :]]
        rows = torch.arange(x.shape[0], device=x.device, dtype=torch.int32)
        if self.expected_m is None:
            group = torch.searchsorted(self.offs.cummax(0).values, rows, right=True)
            group = group.clamp(max=max(0, self.groups - 1))
        else:
            group = rows // max(1, x.shape[0] // max(1, self.groups))
        items: list[Item] = []
        for item in self.items[0 if self.scaled is None else 2 :]:
            kind, value = item[0], item[1]
            if kind == "scatter":  # which comes last, of all rows at once
                continue
            if isinstance(value, torch.Tensor) and value.numel() > 1:
                if kind in ("scale_a", "scale_row"):
                    value = value.reshape(-1, 1)
                elif kind == "residual":
                    value = value[:, None]
                else:
                    value = value.expand(self.groups, x.shape[-1])[group]
            items.append((kind, value, *item[2:]))
        return x[:, None], items
