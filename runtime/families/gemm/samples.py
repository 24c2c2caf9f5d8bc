"""Random operands of a GEMM, as calls of an operation at a shape have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import torch

from warploom.generator.epilogue import GATES, Residual, columns, scatters
from warploom.generator.families.gemm import SCALE_BLOCK, GemmOperation, GemmShape, Sparse
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product import steps
from warploom.runtime.families._product.steps.gate import gate_options, layout_of
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item
from warploom.runtime.families.gemm import api, reference
from warploom.runtime.families.gemm.block_masks import size_of
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.families.gemm.block_sparse import BlockSparseCall
from warploom.runtime.families.gemm.grouped_call import GroupedCall
from warploom.runtime.families.gemm.tf32 import Tf32Call, rounded_to_tf32
from warploom.runtime.measure import Call, largest_share
from warploom.runtime.plan import run
from warploom.runtime.trial import generator, sets_for, wrong


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of buffers: a, b, the items of the epilogue, and the output.

    mask   of the blocks that count of the matrix that is sparse, if one is
    offs   where groups end, if there are some, or how many rows of each count
    expected_m   that count on average, of groups of which only some rows do
    """

    a: torch.Tensor
    b: torch.Tensor
    listed: tuple[Item, ...]
    out: torch.Tensor
    mask: torch.Tensor | None = None
    offs: torch.Tensor | None = None
    expected_m: int | None = None


class GemmData:
    """Floats are normal, int8 uniform, scales in [0.5, 1.5); on `meta`, only shapes and strides."""

    def __init__(self, operation: GemmOperation, shape: GemmShape, device: str, seed: int) -> None:
        self.operation, self.shape, self.device = operation, shape, device
        self._batches = (shape.batches,) * operation.batched
        self._draws = Draws(device, generator(device, seed))

    def operands(self) -> Operands:
        """Draw one set, with an output full of what no right result is full of."""
        operation, shape = self.operation, self.shape
        if operation.groups != "none":
            return self._grouped()
        a = self._matrix(operation.a, shape.m, shape.k, across=operation.layout_a == "col")
        b = self._matrix(operation.b, shape.k, shape.n, across=operation.layout_b == "col")
        at = Extents(self._batches, shape.m, shape.n, shape.k)
        extents = (*self._batches, shape.m, columns(operation.epilogue, shape.n))
        out = torch.empty(extents, dtype=TORCH[operation.d], device=self.device)
        items = steps.samples(operation.epilogue, self._draws, at)
        scales = self._block_scales(shape.m, shape.k)
        return Operands(a, b, (*scales, *items), wrong(out), self._mask())

    def _grouped(self) -> Operands:
        """Groups of as many rows, or of k, on average as the shape says: each row draws its own."""
        operation, shape = self.operation, self.shape
        m, n, k, groups = shape.m, shape.n, shape.k, shape.batches
        by_rows, masked = operation.by_rows, operation.groups == "masked"
        m += (m + 1) // 2 if masked else 0  # which is more than count of any group
        total = groups * (m if by_rows else k)
        m, k = (total, k) if by_rows else (m, total)
        whole = operation.groups == "k" and operation.layout_a == "row"  # groups of whole k tiles
        a = self._draws.values(operation.a, (m, k) if by_rows or whole else (k, m))
        weight = (n, k) if operation.layout_b == "col" else (k, n)
        b = self._draws.values(operation.b, (groups, *weight) if by_rows else weight)
        columns_of_d = columns(operation.epilogue, n)
        extents = (m, columns_of_d) if by_rows else (groups, m, columns_of_d)
        out = torch.empty(extents, dtype=TORCH[operation.d], device=self.device)
        scatter = operation.epilogue[-1:] if scatters(operation.epilogue) else ()
        listed = operation.epilogue[: len(operation.epilogue) - len(scatter)]
        last = listed[-1:]
        of_rows = by_rows and any(isinstance(one, Residual) for one in last)  # of no group alone
        drawn = steps.samples(listed[: -of_rows or None], self._draws, Extents((groups,), m, n, k))
        items = [*drawn]
        if of_rows:
            items += steps.samples(last, self._draws, Extents((), m, columns_of_d, k))
        items += steps.samples(scatter, self._draws, Extents((), m, columns_of_d, k))
        if masked:
            ends = (self._draws.scales(groups) * shape.m).to(torch.int32)
        else:
            each = SCALE_BLOCK if whole else 1  # rows of k that are of one group
            chosen = (self._draws.scales(-(-total // each)) - 0.5) * groups  # of [0, groups)
            at = torch.arange(groups, device=self.device)
            ends = (chosen.to(torch.int64)[:, None] <= at).sum(0, dtype=torch.int32)
            ends = (ends * each).clamp(max=total)
        return Operands(
            a if by_rows or whole else a.t(),
            b.mT if operation.layout_b == "col" else b,
            (*self._block_scales(m, k), *items),
            wrong(out),
            offs=ends,
            expected_m=shape.m if masked else None,
        )

    def _mask(self) -> torch.Tensor | None:
        """A mask of the sparse matrix, if there is one, of which half of the blocks count."""
        shape, sparse = self.shape, self.operation.sparse
        if sparse == "none":
            return None
        rows, columns = map(blocks_of, size_of(sparse, shape.m, shape.n, shape.k))
        return self._draws.scales(rows, columns) < 1  # of [0.5, 1.5)

    def _block_scales(self, m: int, k: int) -> Iterator[Item]:
        """The block scales of A and B, if any: those of rows as `warploom.cast` lays them out, one
        column after the other, those of 128x128 blocks side by side along k as in checkpoints.
        """
        operation, shape = self.operation, self.shape
        if operation.block_scales == "none":
            return
        operands: tuple[tuple[Literal["a", "b"], int, str], ...] = (
            ("a", m, operation.block_scale_a),
            ("b", shape.n, operation.block_scale_b),
        )
        for operand, rows, kind in operands:
            each = operation.scale_rows(operand)
            rows_of_all = operation.groups == "k" or (operand == "a" and operation.by_rows)
            batches = () if rows_of_all else self._batches
            extents = (*batches, -(-rows // each), blocks_of(k))
            drawn = self._draws.scales(*extents)
            if kind == "e8m0":  # 2^-1 to 2^2, by the exponents of 126 to 129
                drawn = (124 + 4 * drawn).to(torch.uint8).view(torch.float8_e8m0fnu)
            yield f"scale_{operand}", along_rows(drawn) if each == 1 else drawn

    def _matrix(self, element: str, rows: int, columns: int, *, across: bool) -> torch.Tensor:
        """A matrix of so many rows and columns, column by column in memory if `across`."""
        extents = (columns, rows) if across else (rows, columns)
        found = self._draws.values(element, (*self._batches, *extents))
        return found.mT if across else found


class GemmTrial(GemmData):
    """A GEMM on random data."""

    def __init__(self, operation: GemmOperation, shape: GemmShape, device: str, seed: int) -> None:
        super().__init__(operation, shape, device, seed)
        one = self.operands()
        moved = sum(t.numel() * t.element_size() for t in (one.a, one.b, one.out))
        more = sets_for(moved, device) - 1
        self.sets = [one, *(self.operands() for _ in range(more))]

    def calls(self, spec: KernelSpec) -> list[Call]:
        """One call of `spec` for each set of operands."""
        if own_call(self.operation, self.sets[0]) is not None:
            return [partial(_run_own, self.operation, one, spec) for one in self.sets]
        if self.operation.a == "tf32":
            dtype = TORCH[self.operation.d]
            return [
                partial(run, Tf32Call(one.a, one.b, one.listed, one.out, dtype, spec=spec))
                for one in self.sets
            ]
        return [
            partial(
                api.gemm,
                one.a,
                one.b,
                out=one.out,
                epilogue=one.listed,
                use_fast_accum=self.operation.accumulation == "fast",
                spec=spec,
            )
            for one in self.sets
        ]

    def error_share(self, spec: KernelSpec) -> float:
        """Run `spec` on the first set and return its largest error as a share of its bound."""
        self.sets[0].out.copy_(wrong(self.sets[0].out))
        self.calls(spec)[0]()
        return self.held_share()

    def held_share(self) -> float:
        """The largest error of what the first set holds, as a share of its bound."""
        exact, bound = self._expected
        d = self.sets[0].out.reshape(exact.shape)
        if self.operation.groups == "masked":
            counted = grouped_call(self.operation, self.sets[0]).counted()
            d, exact, bound = d[counted], exact[counted], bound[counted]
        return largest_share(d, exact, bound)

    @property
    def results(self) -> list[torch.Tensor]:
        """D of the first set."""
        return [self.sets[0].out]

    @cached_property
    def _expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        one = self.sets[0]
        call = own_call(self.operation, one)
        if call is not None:
            return call.bound()
        a, b = one.a, one.b
        if self.operation.a == "tf32":
            a, b = rounded_to_tf32(a), rounded_to_tf32(b)
        return reference.gemm_bound(a, b, one.listed, one.out.dtype, self.operation.accumulation)


def sparse_call(sparse: Sparse, one: Operands, spec: KernelSpec | None = None) -> BlockSparseCall:
    """The call of a product of which one matrix is sparse by blocks."""
    assert one.mask is not None  # noqa: S101 (for type checkers)
    values: dict[str, Any] = dict(item[:2] for item in one.listed)
    return BlockSparseCall(
        one.a,
        one.b,
        one.mask,
        values.get("bias"),
        sparse,
        values["scale"],
        one.out,
        spec=spec,
    )


def grouped_call(
    operation: GemmOperation, one: Operands, spec: KernelSpec | None = None
) -> GroupedCall:
    """The call of a grouped GEMM, whose epilogue is in the order of the function's keywords."""
    values: dict[str, Any] = {item[0]: item[1] for item in one.listed}
    rows = [item[1] for item in one.listed if item[0] == "scale_row"]
    leading = bool(one.listed) and one.listed[0][0] == "scale_row"  # of A, not of the result
    whole = [item[1] for item in one.listed if item[0] == "scale"]  # of one element each
    gates = [item for item in one.listed if steps.step_of(item).step in GATES]
    return GroupedCall(
        *(one.a, one.b, one.offs),  # type: ignore[arg-type]
        bias=values.get("bias"),
        scale_a=values.get("scale_a", rows[0] if leading else next(iter(whole), None)),
        scale_b=values.get("scale_b", values.get("scale_column", next(iter(whole[1:]), None))),
        row_scale=rows[-1] if len(rows) > leading else None,
        residual=values.get("residual"),
        activation=values.get("activation"),
        gate_layout=layout_of(gates[0]) if gates else "halves",
        use_fast_accum=operation.accumulation == "fast",
        expected_m=one.expected_m,
        out=one.out,
        out_dtype=one.out.dtype,
        spec=spec,
        scatter=values.get("scatter"),
        **gate_options(one.listed),
    )


def own_call(
    operation: GemmOperation, one: Operands, spec: KernelSpec | None = None
) -> GroupedCall | BlockSparseCall | None:
    """The call of a product that `warploom.gemm` does not compute; None of one that it does."""
    if operation.groups != "none":
        return grouped_call(operation, one, spec)
    return None if operation.sparse == "none" else sparse_call(operation.sparse, one, spec)


def _run_own(operation: GemmOperation, one: Operands, spec: KernelSpec) -> torch.Tensor:
    call = own_call(operation, one, spec)
    assert call is not None  # noqa: S101 (for type checkers)
    return run(call)[0]


def along_rows(scales: torch.Tensor) -> torch.Tensor:
    """The same scales [.., R, K/128], one column after the other, at multiples of 16 bytes."""
    *batches, rows, blocks = scales.shape
    step = -(-rows * scales.element_size() // 16) * 16 // scales.element_size()
    found = torch.empty((*batches, blocks, step), dtype=scales.dtype, device=scales.device)
    return found[..., :rows].mT.copy_(scales)
