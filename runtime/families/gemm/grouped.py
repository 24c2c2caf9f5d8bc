"""Grouped GEMM: the function that users call, and its gradients.

Gradients are grouped GEMMs again. Of groups of rows, that of A has the same groups and transposed
matrices, and that of B has groups of k, as has the sum over rows for a bias.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.epilogue import GateLayout
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.reference import apply, rounded
from warploom.runtime.families._product.steps.gate import ALPHA, LIMIT
from warploom.runtime.families._product.steps.scatter import check_index, scattered
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.gemm.gradient import once
from warploom.runtime.families.gemm.grouped_call import GroupedCall
from warploom.runtime.function import Function
from warploom.runtime.tensors import explained, lowered, shown

_grouped = Function("grouped_gemm", GroupedCall, into=True)


def _plain(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The grouped GEMM without an epilogue, of which autograd knows nothing."""
    return _grouped(
        *(a, b, offs, None, None, None, None, None, None, None, "halves", True, None),
        *(out, out_dtype, None, ALPHA, LIMIT, None),
    )[0]


class _Grouped(torch.autograd.Function):
    """D, differentiable in a, b and bias."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        a: torch.Tensor,
        b: torch.Tensor,
        bias: torch.Tensor | None,
        offs: torch.Tensor,
        out_dtype: torch.dtype | None,
        spec: KernelSpec | str | None,
    ) -> torch.Tensor:
        needs_a, needs_b, needs_bias = ctx.needs_input_grad[:3]
        ctx.save_for_backward(b if needs_a else None, a if needs_b else None, offs)
        ctx.set_materialize_grads(False)
        ctx.by_rows, ctx.dtype = b.dim() == 3, a.dtype
        ctx.bias = (bias.dtype, bias.dim()) if needs_bias and bias is not None else None
        return _grouped(
            *(a, b, offs, bias, None, None, None, None, None, None, "halves", True, None),
            *(None, out_dtype, spec, ALPHA, LIMIT, None),
        )[0]

    @staticmethod
    def backward(ctx: Any, dd: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        """Return the gradients that are wanted."""
        if dd is None:
            return (None,) * 6
        compute = partial(_Grouped.gradients, ctx)
        if torch.compiler.is_compiling():
            return compute(dd, *ctx.saved_tensors)
        return once(compute, dd, *ctx.saved_tensors)

    @staticmethod
    def gradients(
        ctx: Any,  # noqa: ANN401
        dd: torch.Tensor,
        b: torch.Tensor | None,
        a: torch.Tensor | None,
        offs: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Those of all arguments of a call."""
        dd = dd.to(ctx.dtype)
        if not ctx.by_rows:
            # D[g] = A[:, g] B[g, :]: both gradients have groups of rows.
            da = None if b is None else _plain(b, dd.mT, offs, out=_zeros(b, dd.mT)).t()
            db = None if a is None else _plain(a.t(), dd, offs, out=_zeros(a.t(), dd))
            return da, db, None, None, None, None
        da = None if b is None else _plain(dd, b.mT, offs, out=_zeros(dd, b.mT))
        db = None
        if a is not None:
            # In the layout of a weight [G, N, K], which b is the transpose of.
            db = _plain(dd.t(), a, offs).mT
        dbias = None
        if ctx.bias is not None:
            dtype, dimensions = ctx.bias
            ones = dd.new_ones(dd.shape[0], _EIGHT)  # of one row of A, whose pitch is 16 bytes
            sums = _plain(ones.t(), dd, offs, out_dtype=torch.float32)[:, 0]
            dbias = (sums if dimensions == 2 else sums.sum(0)).to(dtype)
        return da, db, dbias, None, None, None


_EIGHT = 8  # elements of 16 bits


def _zeros(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Where the gradient of rows goes: those past the last group have none."""
    return a.new_zeros(a.shape[0], b.shape[-1])


_apply: Callable[..., torch.Tensor] = _Grouped.apply


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    offs: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
    expected_m: int | None = None,
    bias: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
    activation: str | None = None,
    gate: str | None = None,
    gate_layout: GateLayout = "halves",
    gate_alpha: float = ALPHA,
    gate_limit: float = LIMIT,
    row_scale: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scatter: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = True,
    spec: KernelSpec | str | None = None,
) -> torch.Tensor:
    """Multiply groups of matrices whose sizes only the device knows, as a mixture of experts has.

    Calls and results are those of `torch.nn.functional.grouped_mm`:

    a [S, K] by b [G, K, N]: groups of rows; the result [S, N] has those of group g times b[g].
    a [M, S] by b [S, N]: groups of k, as gradients of weights have; the result is [G, M, N].
    a [G, M, K] by b [K, S]: groups of columns; the result [M, S] has a[g] times those of group g.
    a [G, M, K] by b [G, K, N], without offs: batches, by `warploom.gemm`; the result is [G, M, N].
    a [G, M, K] by b [G, K, N], with lengths: masked batches, of which the first lengths[g] rows
        count; the other rows of the result [G, M, N] are not written.

    Args:
        a: fp16, bf16, e4m3, e5m2 or int8. Groups of k in 8 bits begin at multiples of 128, with
            zeros behind those that are shorter: `warploom.cast` writes both operands so, and
            where their groups end, from the offsets of rows.
        b: Of the type of a. A weight [G, N, K] is b after `.mT`; it is read in place, as is
            [G, K, N] of 16 bits.
        offs: int32 [G], on the device of a: where each group ends, in order; the first begins at 0.
            At most 1,024 groups, of any size, also of none. The host does not read it: one CUDA
            graph serves all routings. An offset below the one before it counts as that, and one
            past S as S.
        lengths: int32 [G], on the device of a: how many rows of each batch count. The host does not
            read it. A length below 0 counts as 0, and one past M as M.
        expected_m: With lengths: how many rows of a batch count on average, by which the kernel is
            chosen; by default M.
        bias: [G, N] or [N], fp16, bf16 or fp32: added to the rows of its group.
        scale_a: fp32 [S], or [G, M] with lengths: a scale of each row of a, or of one element. Or
            block scales of fp8 rows, fp32 or e8m0 [S, K/128] or [G, M, K/128], as those that
            `warploom.cast` makes: one for each 128 of k. With groups of k in 8 bits fp32 [M], of
            one element, or block scales [M, S/128].
        scale_b: fp32 [G, N], a scale of each column of b, or [G, 1] of each matrix, or of one
            element. With block scales of a, fp32 or e8m0 [G, N/128, K/128], rounded up: one for
            each 128x128 of a weight [G, N, K]. With groups of k in 8 bits [N], of one element, or
            block scales [N, S/128] of b.T.
        activation: relu, gelu, gelu_tanh or silu, applied behind the bias.
        gate: silu, gelu, gelu_tanh, relu or swiglu_oai: b has the columns of gate and up,
            and the result [S, N / 2] is gate(first half) * second half. b must be `.mT` of a weight
            [G, N, K].
        gate_layout: "halves", or "interleaved" where columns of gate and up take turns.
        gate_alpha: Of swiglu_oai, whose gate is g sigmoid(alpha g).
        gate_limit: Of swiglu_oai: gate is at most this, and up between minus this and this.
        row_scale: fp32 [S], or [G, M] with lengths: multiplies each row, behind the gate, as a
            routing weight does.
        residual: fp16, bf16 or fp32 [S, N], or [G, M, N]: added last; its rows are those of a.
        scatter: int32 or int64 [S], of groups of rows with offs: row i is written to row scatter[i]
            of the result, as those of tokens go back to (token, expert) order. `out` may have any
            number of rows, and keeps those that no index names; a result that is made has S rows,
            of which these are undefined (zeros where it is differentiated). Rows whose index is
            negative, or is no row of the result, are not written, nor are those of no group. Of
            rows with one index any may come last.
        out: Where the result is written; None: it is made.
        out_dtype: Of the result; by default that of 16-bit operands, else bf16.
        use_fast_accum: False adds fp8 products up in fp32 registers every 128 of k.
        spec: The kernel to run, or its name.

    Returns:
        The result. Rows (or columns) past the last offset belong to no group: they are not written.
        A group of k that is empty has zeros. It is differentiable in a and b of 16 bits, bias,
        row_scale and residual; gradients of rows that belong to no group are zeros.

    Runs on the current stream without waiting. On CPU tensors the reference computes the same.

    Raises:
        ProblemError: Before anything is launched, naming the value and the fix; for offsets that
            are not in order where they are on the CPU.

    Example:
        >>> tokens = torch.randn(6, 64).bfloat16()
        >>> experts = torch.randn(3, 128, 64).bfloat16()  # weights [G, N, K]
        >>> ends = torch.tensor([2, 2, 6], dtype=torch.int32)  # the second has no token
        >>> warploom.grouped_gemm(tokens, experts.mT, offs=ends).shape
        torch.Size([6, 128])
    """
    tensors = (bias, scale_a, scale_b, row_scale, residual)
    required = (a, b, a if offs is None else offs)
    if not all(isinstance(one, torch.Tensor) for one in (a, b)) or not all(
        one is None or isinstance(one, torch.Tensor) for one in (*tensors, scatter, out)
    ):
        GroupedCall(*required, *tensors, scatter=scatter, out=out).require()
    if a.is_nested or b.is_nested:
        GroupedCall(*required).require()
    if torch._C._is_any_autocast_enabled():
        a, b = lowered(a), lowered(b)
    if scatter is not None and (lengths is not None or (a.dim(), b.dim()) != (2, 3)):
        told = "lengths" if lengths is not None else f"a {list(a.shape)} by b {list(b.shape)}"
        raise ProblemError(
            f"scatter with {told}",
            rule="must be of groups of rows, a [S, K] by b [G, K, N] with offs",
            fix="write the result to out[index] afterwards",
        )
    if lengths is not None or expected_m is not None:
        options = (activation, gate, gate_layout, use_fast_accum)
        results = (out, out_dtype, spec, gate_alpha, gate_limit)
        if offs is not None:
            raise ProblemError(
                f"lengths with offs {shown(offs)}",
                rule="must be one of them: rows that follow each other, or batches of one size",
                fix="leave one out",
            )
        return _masked(a, b, lengths, expected_m, tensors, options, results)
    dimensions = (a.dim(), b.dim())
    if b.dim() == 3 and scale_b is not None:
        scale_b = _of_columns(scale_b, b)
    steps = {"scale_a": scale_a, "scale_b": scale_b, "bias": bias, "row_scale": row_scale}
    steps["residual"] = residual
    if dimensions != (2, 3):
        given = [name for name, one in steps.items() if one is not None]
        if dimensions == (2, 2) and a.dtype.itemsize == 1:
            given = [name for name in given if name not in ("scale_a", "scale_b")]
            scale_a, scale_b = _of_vectors(scale_a, scale_b, a, b)
        given += ["activation"] * (activation is not None) + ["gate"] * (gate is not None)
        if dimensions != (3, 3) and given:
            raise ProblemError(
                f"{given[0]} with a {list(a.shape)} by b {list(b.shape)}",
                rule="must be of groups of rows, a [S, K] by b [G, K, N]; those of k have scales "
                "in 8 bits alone",
                fix="apply it to the result",
            )
    if dimensions == (3, 3):
        if offs is not None or row_scale is not None:
            raise ProblemError(
                f"{'row_scale' if offs is None else 'offs'} with a {list(a.shape)} by b "
                f"{list(b.shape)}",
                rule="must be None: groups of one size are batches",
                fix="leave it out, or pass the rows of all groups as one matrix",
            )
        listed = epilogue.items(
            scale_a=scale_a,
            scale_b=scale_b,
            bias=bias if bias is None or bias.dim() != 2 else bias[:, None],
            activation=activation,
            gate=gate,
            gate_layout=gate_layout,
            gate_alpha=gate_alpha,
            gate_limit=gate_limit,
            residual=residual,
        )
        return gemm(
            *(a, b),
            epilogue=listed,
            out=out,
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            spec=spec,
        )
    if offs is None:
        raise ProblemError(
            f"a {list(a.shape)} by b {list(b.shape)} without offs",
            rule="must come with offs, int32 [G], where groups end",
            fix="pass counts.cumsum(0, dtype=torch.int32); without groups use warploom.gemm",
        )
    if dimensions == (3, 2):
        if out is not None and out.dim() != 2:
            raise ProblemError(
                f"out {list(out.shape)}",
                rule=f"must be {[a.shape[1], b.shape[1]]}, whose columns have groups",
                fix="leave out=None to have it made",
            )
        transposed = grouped_gemm(
            *(b.t(), a.mT),
            offs=offs,
            out=None if out is None else out.t(),
            out_dtype=out_dtype,
            use_fast_accum=use_fast_accum,
            spec=spec,
        )
        return transposed.t() if out is None else out
    read = (a, b, *tensors)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in read):
        eight_bits = a.dtype.itemsize == 1
        if out is None and not eight_bits and scale_a is None and scale_b is None:
            require_boolean("use_fast_accum", use_fast_accum)
            return _differentiable(
                *(a, b, offs, bias, activation, gate, gate_layout, row_scale, residual),
                *(out_dtype, spec, gate_alpha, gate_limit, scatter),
            )
    return _grouped(
        *(a, b, offs, bias, scale_a, scale_b, row_scale, residual),
        *(activation, gate, gate_layout, use_fast_accum, None, out, out_dtype, spec),
        *(gate_alpha, gate_limit, scatter),
    )[0]


def _masked(
    a: torch.Tensor,
    b: torch.Tensor,
    lengths: torch.Tensor | None,
    expected_m: int | None,
    steps: tuple[torch.Tensor | None, ...],
    options: tuple[object, ...],
    results: tuple[torch.Tensor | None, torch.dtype | None, KernelSpec | str | None, float, float],
) -> torch.Tensor:
    """The rows of batches that count: those of groups whose rows begin M apart."""
    if not isinstance(lengths, torch.Tensor) or a.dim() != 3 or b.dim() != 3:
        raise ProblemError(
            f"a {list(a.shape)} by b {list(b.shape)} with lengths {shown(lengths)}",
            rule="must be [G, M, K] by [G, K, N] with lengths, int32 [G]",
            fix="pass offs where the rows of groups follow each other",
        )
    groups, m, _ = a.shape
    if expected_m is not None and (type(expected_m) is not int or expected_m < 0):
        raise ProblemError(
            f"expected_m {shown(expected_m)}",
            rule="must be a number of rows, from 0 on",
            fix="leave it out for all rows of a batch",
        )
    bias, scale_a, scale_b, row_scale, residual = steps
    read = (a, b, *steps)
    if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in read):
        raise ProblemError(
            "lengths with a tensor that requires grad",
            rule="masked batches are not differentiated",
            fix="call under torch.no_grad(), or pass the rows that count with offs",
        )
    if scale_b is not None:
        scale_b = _of_columns(scale_b, b)
    try:
        rows_of = tuple(_rows_of(one, groups, m) for one in (a, scale_a, row_scale, residual))
    except RuntimeError as error:  # tensors that torch does not flatten, such as sparse ones
        call = GroupedCall(a, b, lengths, bias, scale_a, scale_b, row_scale, residual)
        raise explained(error, call.require) from error
    out, *how = results
    rows = None
    if out is not None:
        try:
            if out.dim() != 3 or out.shape[:2] != (groups, m):
                raise RuntimeError
            rows = out.view(groups * m, out.shape[2])
        except RuntimeError:
            raise ProblemError(
                f"out {list(out.shape)} with strides {list(out.stride())}",
                rule=f"must be [{groups}, {m}, N], its batches {m} rows apart",
                fix="use a contiguous tensor",
            ) from None
    expected = m if expected_m is None else expected_m
    d = _grouped(
        *(rows_of[0], b, lengths, bias, rows_of[1], scale_b, rows_of[2], rows_of[3]),
        *(*options, expected, rows, *how, None),
    )[0]
    return d.view(groups, m, d.shape[-1]) if out is None else out


def _of_columns(scale_b: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A scale [G, 1] of each matrix as that of its columns; any other as it is."""
    groups, _, n = b.shape
    if scale_b.shape == (groups, 1) and n > 1:
        return scale_b.expand(-1, n).contiguous()
    return scale_b


def _of_vectors(
    scale_a: torch.Tensor | None,
    scale_b: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Scales [M, 1] and [N, 1] of rows, as casts return them, as vectors; others as they are.

    Where k is one block of 128 they are block scales of fp8 as well: the result is the same.
    """
    scales = (scale_a, scale_b)
    of_rows = [one is not None and one.dim() == 2 and one.shape[1] == 1 for one in scales]
    if all(of_rows) and 0 < a.shape[1] <= SCALE_BLOCK and a.dtype != torch.int8:
        shapes = [None if one is None else one.shape[0] for one in scales]
        if shapes == [a.shape[0], b.shape[1]]:  # not [1, 1] of a tensor, with one of rows
            return scales
    first, second = (
        one[:, 0] if one is not None and is_vector else one
        for one, is_vector in zip(scales, of_rows, strict=True)
    )
    return first, second


def _rows_of(scale: torch.Tensor | None, groups: int, m: int) -> torch.Tensor | None:
    """A tensor [G, M, ..] as that of G M rows; any other as it is."""
    if scale is None or scale.dim() < 2 or scale.shape[:2] != (groups, m):
        return scale
    return scale.flatten(0, 1)


def _differentiable(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    gate: str | None,
    gate_layout: GateLayout,
    row_scale: torch.Tensor | None,
    residual: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | str | None,
    gate_alpha: float,
    gate_limit: float,
    scatter: torch.Tensor | None,
) -> torch.Tensor:
    """The GEMM and its bias, then in torch what comes behind them, for autograd."""
    if not torch.compiler.is_dynamo_compiling() and (
        torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    ):  # which would ask torch.autograd.Function for more than it has
        call = GroupedCall(a, b, offs, bias, row_scale=row_scale, residual=residual)
        call.scatter = scatter
        call.require()
        call.refuse_tangents()
    steps: dict[str, Any] = {
        "activation": activation,
        "gate": gate,
        "gate_layout": gate_layout,
        "gate_alpha": gate_alpha,
        "gate_limit": gate_limit,
    }
    listed = epilogue.items(**steps)
    plain = not listed and row_scale is None and residual is None
    if plain and scatter is None:
        return _apply(a, b, bias, offs, out_dtype, spec)
    if spec is not None:
        raise ProblemError(
            f"spec {shown(spec)} with an epilogue and a tensor that requires grad",
            rule="must be left out: torch computes the epilogue of what is differentiated",
            fix="leave it out, or call it under torch.no_grad()",
        )
    call = GroupedCall(
        *(a, b, offs, bias),
        row_scale=row_scale,
        residual=residual,
        out_dtype=out_dtype,
        scatter=scatter,
        **steps,
    )
    call.check_epilogue()
    if scatter is not None:  # compilers skip what is checked above: torch would take any type
        scatter = check_index(scatter, a.shape[0], a.get_device())
    x = _apply(a, b, bias, offs, out_dtype if plain else None, None)
    if plain and scatter is not None:
        return scattered(x, torch.where(call.counted(), scatter, -1))
    found = apply(x.float(), listed)
    if row_scale is not None:
        if row_scale.requires_grad:
            # Rows of no group were not written, and would add to the gradient of their scale.
            found = torch.where(call.counted()[:, None], found, 0.0)
        found = found * row_scale.reshape(-1, 1)
    if residual is not None:
        if residual.requires_grad:  # zeros where it has no group
            residual = torch.where(call.counted()[:, None], residual, 0.0)
        found = found + residual
    found = rounded(found, out_dtype or a.dtype, listed)
    if scatter is None:
        return found
    return scattered(found, torch.where(call.counted(), scatter, -1))
