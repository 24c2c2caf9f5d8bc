"""GEMMs of which one matrix is sparse by blocks of 128x128: `warploom.block_sparse_gemm`.

The kernels are gemm's: a first launch makes lists of the mask, and tiles take their k tiles from
these, or are blocks of D. Gradients are such products again, with the same mask: of a sparse A
those of A are wanted in its blocks alone, which is a sparse D, and those of B are a product of the
transposed A.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from warploom.arguments import require_dtype
from warploom.errors import ProblemError
from warploom.generator.families.gemm import (
    SPARSE_BLOCK,
    GemmOperation,
    GemmProblem,
    GemmShape,
    Sparse,
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
    number,
    option,
    result,
    tensor,
)
from warploom.runtime.call import Draft
from warploom.runtime.elements import NAMES
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.operands import (
    Operand,
    check_out,
    result_type,
    storing,
)
from warploom.runtime.families._product.reference import apply, bound, rounded
from warploom.runtime.families._product.steps import KINDS
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm.block_masks import expanded, size_of
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.families.gemm.call import extents, layouts
from warploom.runtime.function import Function
from warploom.runtime.operands import refuse_overlap
from warploom.runtime.tensors import (
    lowered,
    refuse_transforms,
    require_memory,
    require_one_device,
    shown,
)

SPARSE: Mapping[str, Sparse] = {"a": "a", "b": "b", "out": "d"}
"""What a call says is sparse, and how kernels are named by it."""
NAME: Mapping[str, str] = {kind: name for name, kind in SPARSE.items()}


@dataclass(frozen=True, slots=True)
class Details:
    """What calls of a kind have in common."""

    shape: tuple[int, int]
    dtype: torch.dtype
    operands: Mapping[str, Operand]
    copies: tuple[str, ...]


@declared
class BlockSparseCall(Arguments[Details, tuple[torch.Tensor]]):
    """The arguments of one product; the mask is of the matrix that is sparse."""

    function = "warploom.block_sparse_gemm"
    outputs = ("d",)
    no_gradient = (
        "a tensor that requires grad, with out or for a second derivative",
        "must be differentiated once, without out",
        "leave out=None, or call it under torch.no_grad()",
    )

    a: torch.Tensor = tensor()
    b: torch.Tensor = tensor()
    mask: torch.Tensor = tensor(aligned=False)
    bias: torch.Tensor | None = tensor(default=None, kernel="bias_1")
    sparse: str = option(default="a", schema="str")
    alpha: float = number(default=1.0)
    out: torch.Tensor | None = result(default=None)
    out_dtype: torch.dtype | None = dtype(default=None)
    spec: KernelSpec | str | None = named_spec(default=None)

    @property
    def items(self) -> list[Item]:
        """The epilogue."""
        scale: Item = ("scale", self.alpha)
        return [scale] if self.bias is None else [scale, ("bias", self.bias)]

    @property
    def _size(self) -> tuple[int, int]:
        """Rows and columns of the matrix that is sparse."""
        (m, k), n = self.a.shape, self.b.shape[1]
        return size_of(self.sparse, m, n, k)  # type: ignore[arg-type]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        Arguments.require(self)
        if self.out_dtype is not None:
            require_dtype("out_dtype", self.out_dtype, NAMES)
        if self.sparse not in SPARSE.values():
            raise ProblemError(
                f"sparse {shown(self.sparse)}",
                rule=f"must be one of {', '.join(SPARSE)}",
                fix='name the matrix that the mask is of: "a", "b" or "out"',
            )
        if not isinstance(self.alpha, int | float) or isinstance(self.alpha, bool):
            raise ProblemError(
                f"alpha {shown(self.alpha)}", rule="must be a number", fix="use float(alpha)"
            )

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel."""
        self.require()
        a, b = self.a, self.b
        if a.dim() != 2 or b.dim() != 2:
            raise ProblemError(
                f"a {list(a.shape)} by b {list(b.shape)}",
                rule="must be matrices, [M, K] and [K, N], where one is sparse",
                fix="use a.flatten(0, -2); call for each batch",
            )
        spec = self.kernel
        shape, _ = extents(a, b, spec)
        (m, n), k, device = shape, a.shape[1], a.get_device()
        self._check_mask()
        bound = epilogue.bind(self.items, (), m, n, device, batched=False)
        for item in self.items:
            KINDS[item[0]].check_finite(item)
        d_type = result_type(a, self.out, self.out_dtype, has_epilogue=True)
        pitch_d, _ = check_out(self.out, shape, d_type, device, None)
        allowed_a, allowed_b = layouts(a, spec)
        left, right = Operand.of(a, allowed_a, None), Operand.of(b, allowed_b, None)
        operation = GemmOperation(
            a=left.element.name,  # type: ignore[arg-type]
            b=right.element.name,  # type: ignore[arg-type]
            d=NAMES[d_type],  # type: ignore[arg-type]
            layout_a=left.matrix.layout,  # type: ignore[arg-type]
            layout_b=right.matrix.layout,  # type: ignore[arg-type]
            epilogue=bound.steps,
            sparse=self.sparse,  # type: ignore[arg-type]
        )
        choice = dispatch.choose(
            operation,
            GemmShape(m, n, k),
            spec=spec,
            device=target,
            requires=storing(self.out, n, (pitch_d, m * n), d_type, paired=bound.paired),
        )
        down, across = self.mask.stride()
        problem = GemmProblem(
            *(m, n, k, left.matrix.pitch, right.matrix.pitch, pitch_d),
            mask_strides=(across, down) if self.sparse == "b" else (down, across),
        )
        operands = {"a": left, "b": right}
        copies = tuple(name for name, one in operands.items() if one.copy is not None)
        return Draft(
            choice,
            problem if m and n and k else None,
            self.addressed(),
            bound.scalars,
            copies,
            Details((m, n), d_type, operands, copies),
        )

    def _check_mask(self) -> None:
        require_one_device([(name, one) for name, one in self.named() if one is not None])
        if self.sparse == "d" and self.bias is not None:
            raise ProblemError(
                "bias with a sparse result",
                rule="must be left out, as blocks that are left out are zeros",
                fix="add it to the result",
            )
        rows, columns = self._size
        wanted, mask = (blocks_of(rows), blocks_of(columns)), self.mask
        if mask.dtype != torch.bool or mask.shape != wanted:
            raise ProblemError(
                f"mask {list(mask.shape)} {mask.dtype} of {NAME[self.sparse]} [{rows}, {columns}]",
                rule=f"must be bool {list(wanted)}, for each block of "
                f"{SPARSE_BLOCK}x{SPARSE_BLOCK} whether it counts",
                fix=f"use mask != 0, of ceil(rows / {SPARSE_BLOCK}) by "
                f"ceil(columns / {SPARSE_BLOCK})",
            )

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

    def scalars(self, details: Details) -> tuple[float, ...]:
        """The number that products are multiplied by."""
        return (self.alpha,)

    def numbered(self, draft: Draft[Details]) -> tuple[str, ...]:
        """The argument that is the kernel's number."""
        return ("alpha",)

    def fake(self) -> tuple[torch.Tensor]:
        """D of an unchecked call, without contents."""
        kind = result_type(self.a, self.out, self.out_dtype, has_epilogue=True)
        return (self.a.new_empty((self.a.shape[0], self.b.shape[1]), dtype=kind),)

    def check(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Raise ProblemError for memory that is missing or shared."""
        require_memory([*self.named(), ("out", results[0])])
        for item in self.items:
            KINDS[item[0]].check_finite(item)
        refuse_overlap(results[0], self.read(), "do not overlap")

    def compute(self, details: Details, results: tuple[torch.Tensor]) -> None:
        """Compute D by plain torch operations, in fp32; int8 in float64."""
        wide = torch.float64 if self.a.dtype == torch.int8 else torch.float32
        with torch.no_grad(), torch.autocast(self.a.device.type, enabled=False):
            x = apply(self.products(wide).to(torch.float32), self.items)
            if self.sparse == "d":
                x = torch.where(self.blocks(), x, 0.0)
            results[0].copy_(rounded(x, details.dtype, self.items))

    def bound(self) -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, and how far a kernel's may be from each element."""
        x, magnitude = self.products(torch.float64), self.products(torch.float64, magnitudes=True)
        error = accumulated(self.a.dtype, self.a.shape[1], "fast") * magnitude
        x, error = bound(x, error, self.items, self.fake()[0].dtype)
        if self.sparse == "d":
            counts = self.blocks()
            x, error = torch.where(counts, x, 0.0), torch.where(counts, error, 0.0)
        return x, error

    def blocks(self) -> torch.Tensor:
        """Which elements of the sparse matrix count: bool, of its shape."""
        return expanded(self.mask, *self._size)

    def products(self, dtype: torch.dtype, *, magnitudes: bool = False) -> torch.Tensor:
        """The sums of products of blocks that count, in a type; of absolute values if asked for.

        What lies opposite of blocks that do not count is not read: it may be NaN.
        """
        a, b = self.a.to(dtype), self.b.to(dtype)
        if magnitudes:
            a, b = a.abs(), b.abs()
        if self.sparse == "d":
            return a @ b
        mask = self.blocks()
        sums = a.new_zeros(a.shape[0], b.shape[1])
        if self.sparse == "a":
            for first in range(0, a.shape[0], SPARSE_BLOCK):
                own = mask[first].nonzero().flatten()
                rows = slice(first, first + SPARSE_BLOCK)
                sums[rows] = a[rows, own] @ b[own]
        else:
            for first in range(0, b.shape[1], SPARSE_BLOCK):
                own = mask[:, first].nonzero().flatten()
                columns = slice(first, first + SPARSE_BLOCK)
                sums[:, columns] = a[:, own] @ b[own, columns]
        return sums


_block_sparse = Function("block_sparse_gemm", BlockSparseCall)


class _BlockSparse(torch.autograd.Function):
    """D, differentiable in a, b and bias."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        sparse: Sparse,
        alpha: float,
        out_dtype: torch.dtype | None,
        spec: KernelSpec | str | None,
        mask: torch.Tensor,
    ) -> torch.Tensor:
        needs_a, needs_b, needs_bias = ctx.needs_input_grad[:3]
        ctx.save_for_backward(b if needs_a else None, a if needs_b else None, mask)
        ctx.set_materialize_grads(False)
        ctx.options = sparse, alpha, a.dtype, b.stride(0) == 1 and b.shape[1] > 1
        ctx.bias_type = bias.dtype if needs_bias and bias is not None else None
        return _block_sparse(a, b, mask, bias, sparse, alpha, None, out_dtype, spec)[0]

    @staticmethod
    def backward(ctx: Any, dd: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients that are wanted."""
        others = (None,) * (len(ctx.needs_input_grad) - 3)
        if dd is None:
            return None, None, None, *others
        b, a, mask = ctx.saved_tensors
        sparse, alpha, kind, by_column = ctx.options
        da, db, dbias = None, None, None
        if ctx.bias_type is not None:
            dbias = dd.sum(0, dtype=torch.float32).to(ctx.bias_type)
        dd = dd.to(kind)

        def multiplied(
            left: torch.Tensor, right: torch.Tensor, own: torch.Tensor, which: Sparse
        ) -> torch.Tensor:
            return _block_sparse(left, right, own, None, which, alpha, None, None, None)[0]

        if b is not None:
            if sparse == "a":  # only blocks of A have a gradient
                da = multiplied(dd, b.t(), mask, "d")
            elif sparse == "b":
                da = multiplied(dd, b.t(), mask.t(), "b")
            else:
                da = multiplied(dd, b.t(), mask, "a")
        if a is not None:
            if sparse == "b":  # only blocks of B have a gradient
                db = multiplied(a.t(), dd, mask, "d")
            elif by_column and sparse == "a":  # as a weight's transpose is laid out
                db = multiplied(dd.t(), a, mask, "b").t()
            elif by_column:
                db = multiplied(dd.t(), a, mask.t(), "a").t()
            elif sparse == "a":
                db = multiplied(a.t(), dd, mask.t(), "a")
            else:
                db = multiplied(a.t(), dd, mask, "b")
        return da, db, dbias, *others


_apply: Callable[..., torch.Tensor] = _BlockSparse.apply


def block_sparse_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    mask: torch.Tensor,
    *,
    sparse: str = "a",
    alpha: float = 1.0,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Return alpha (a b) + bias, where only some blocks of 128x128 of one matrix count.

    Blocks that do not count are zeros: of a and b they are not read, and may hold anything; of the
    result they are not computed. Time is about the share of blocks that count.

    Args:
        a: [M, K], fp16, bf16, e4m3, e5m2 or int8. Matrices are dense in memory.
        b: [K, N], of the same type; a torch weight [N, K] is b after .t().
        mask: bool, on the device of a, of any strides: whether each block counts, of a
            [ceil(M / 128), ceil(K / 128)], of b [ceil(K / 128), ceil(N / 128)], or of the result
            [ceil(M / 128), ceil(N / 128)]. The last blocks may be short.
            `warploom.functional.csr_block_mask` makes one of the lists of a BSR tensor.
        sparse: The matrix that the mask is of: "a", "b" or "out".
        alpha: A number that products are multiplied by.
        bias: [N], fp16, bf16 or fp32; not with sparse="out".
        out: Where the result is written; None: it is made.
        out_dtype: Of the result; by default that of 16-bit operands, else bf16.
        spec: The kernel to run, or its name.

    Returns:
        The result [M, N]. It is differentiable, once, in a, b of 16 bits and bias: gradients of the
        sparse operand are zeros in blocks that do not count.

    Runs on the current stream without waiting: the mask is read on the device. On CPU tensors the
    reference computes the same.

    Raises:
        ProblemError: Before anything is launched.

    Example:
        >>> a, b = torch.randn(256, 256).bfloat16(), torch.randn(256, 64).bfloat16()
        >>> mask = torch.tensor([[True, False], [True, True]])  # of the 128x128 blocks of a
        >>> warploom.block_sparse_gemm(a, b, mask).shape
        torch.Size([256, 64])
    """
    if not isinstance(sparse, str) or sparse not in SPARSE:
        raise ProblemError(
            f"sparse {shown(sparse)}",
            rule=f"must be one of {', '.join(SPARSE)}",
            fix="name the matrix that the mask is of",
        )
    if torch._C._is_any_autocast_enabled():
        a, b = lowered(a), lowered(b)
    kind = SPARSE[sparse]
    if torch.is_grad_enabled() and out is None:
        read = (a, b) if bias is None else (a, b, bias)
        if any(isinstance(one, torch.Tensor) and one.requires_grad for one in read):
            refuse_transforms("warploom.block_sparse_gemm")
            return _apply(a, b, bias, kind, alpha, out_dtype, spec, mask)
    return _block_sparse(a, b, mask, bias, kind, alpha, out, out_dtype, spec)[0]
