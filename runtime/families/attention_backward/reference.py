"""The gradients of attention in plain torch: for CPU tensors, and what kernels are held against.

Each function takes the `Tensors` of a backward pass, [batch, heads, seq, dim] each, and a
`Function`, and returns dq, dk and dv; `of_call` applies one to the tensors of a call, sequence by
sequence where they are packed. With s the scores before the cap, p = exp(cap(s) - lse):

    dv = p^T dout
    ds = scale p cap'(s) (dout v^T - rowsum(dout out) + dlse)
    dq = ds k    dk = ds^T q
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from warploom.generator.families.attention_backward import COARSE_LSE
from warploom.runtime.accumulation import accumulated
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention import reference as forward
from warploom.runtime.families._attention.function import (
    Function,
    chunks,
    function_of,
    of_sequence,
)
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import (
    FLOAT_ROUNDOFF,
    Modifier,
    Rows,
    RowSums,
    grouped,
)
from warploom.runtime.families._attention.scores import (
    MOST_DISTANT,
    SMALLEST,
    capped,
    changed,
    products,
    score_error,
)
from warploom.runtime.families.attention_backward.arguments import BackwardArguments


@dataclass(frozen=True, slots=True)
class Tensors:
    """What gradients are computed from: out and lse of the forward pass, and their gradients."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None


Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # dq, dk and dv
Backward = Callable[[Tensors, Function], Gradients]


def gradients(given: Tensors, function: Function) -> Gradients:
    """Return the gradients in the type of q, computed in fp32 and rounded once."""
    dq, dk, dv = _gradients(given, function, torch.float32)
    return dq.to(given.q.dtype), dk.to(given.q.dtype), dv.to(given.q.dtype)


def exact(given: Tensors, function: Function) -> Gradients:
    """Return the gradients in float64, of an exact forward pass: out and lse are not looked at."""
    out, lse = forward.exact(given.q, given.k, given.v, function)
    return _gradients(replace(given, out=out, lse=lse), function, torch.float64)


def plain(given: Tensors, function: Function) -> Gradients:
    """Return what autograd makes of the plain torch expression in the type of q.

    Each step of it is rounded to that type, the sums over chunks of rows are not.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (given.q, given.k, given.v)]
    sums = [torch.zeros(t.shape, dtype=torch.float32, device=t.device) for t in leaves]
    for chunk in chunks(given.q, given.k):
        at = (chunk.batch, slice(None), chunk.rows)
        with torch.enable_grad():
            results = list(forward.plain_rows(leaves[0], leaves[1], leaves[2], function, chunk))
        arriving = [given.dout[at]]
        if given.dlse is None:
            results.pop()
        else:
            arriving.append(given.dlse[at])
        for total, found in zip(sums, torch.autograd.grad(results, leaves, arriving), strict=True):
            total += found
    dq, dk, dv = (total.to(given.q.dtype) for total in sums)
    return dq, dk, dv


def of_call(call: BackwardArguments, band: Band, compute: Backward) -> Gradients:
    """Apply `compute` to a call's tensors. Reads cu_seqlens, and so waits for a GPU.

    Rows of no packed sequence, and of sequences with nothing to attend to, get gradients of 0.
    """
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    function = function_of(call.forward, band)
    given = Tensors(q, k, v, call.out, call.lse, call.dout, call.dlse)
    if not call.forward.offsets:
        return compute(given, function)
    starts_q, starts_k = (offsets.tolist() for offsets in call.forward.offsets)
    found: list[torch.Tensor] = []
    for index in range(len(starts_q) - 1):
        queries = slice(starts_q[index], starts_q[index + 1])
        keys = slice(starts_k[index], starts_k[index + 1])
        if queries.start == queries.stop or keys.start == keys.stop:
            continue
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        own = of_sequence(function, index, rows, columns)
        one = compute(sequence_of(given, queries, keys), own)
        found = found or [part.new_zeros(t.shape) for part, t in zip(one, (q, k, v), strict=True)]
        for total, rows, part in zip(found, (queries, keys, keys), one, strict=True):
            total[rows] = part[0].transpose(0, 1)
    dq, dk, dv = found or (tensor.new_zeros(tensor.shape) for tensor in (q, k, v))
    return dq, dk, dv


def sequence_of(given: Tensors, queries: slice, keys: slice) -> Tensors:
    """One packed sequence as a batch of one."""

    def rows(tensor: torch.Tensor, at: slice) -> torch.Tensor:
        return tensor[at].transpose(0, 1)[None]

    return Tensors(
        rows(given.q, queries),
        rows(given.k, keys),
        rows(given.v, keys),
        rows(given.out, queries),
        given.lse[None, :, queries],
        rows(given.dout, queries),
        None if given.dlse is None else given.dlse[None, :, queries],
    )


# ---- Steps ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Chunk:
    """The operands of one chunk of rows in a wide type: q, dout and p of every group of heads.

    They are [batch, kv_heads, heads of one, rows, ..], keys and values [batch, kv_heads, 1, ..].
    Where dout or dlse of fully masked rows has NaN or Inf, they are 0.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None
    s: torch.Tensor  # the scores, masked ones being -inf
    p: torch.Tensor
    coarse: torch.Tensor  # rows whose weights are divided by what they sum to
    difference: torch.Tensor  # dout v^T behind the dropout - rowsum(dout out) + dlse
    capped: torch.Tensor  # the scores before anything is added or masked


def chunk_of(given: Tensors, function: Function, chunk: Rows, wide: torch.dtype) -> _Chunk:
    """Return what gradients of a chunk have in common, in `wide`."""

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        return grouped(tensor[chunk.batch, :, chunk.rows].to(wide), given.k)

    keys, values = (t[chunk.batch, :, None].to(wide) for t in (given.k, given.v))
    lse = rows(given.lse)[..., None]
    at = (chunk.batch, slice(None), chunk.rows)
    masked, bad = masked_rows(given.dout[at], given.out[at], given.lse[at], function)
    dout = rows(given.dout).masked_fill(grouped(bad, given.k)[..., None], 0)
    dlse = None if given.dlse is None else rows(given.dlse)[..., None]
    if dlse is not None:
        dlse = dlse.masked_fill(grouped(masked, given.k)[..., None] & ~dlse.isfinite(), 0)
    before = capped(given.q, given.k, function, chunk, wide)
    s = changed(before, given.q, given.k, function, chunk)
    delta = (dout * rows(given.out)).sum(-1, keepdim=True)  # of a fully masked row 0, as out
    if dlse is not None:
        delta = delta - dlse
    p, coarse = _weights(s, lse, function)
    difference = function.weighted(dout @ values.mT, chunk) - delta
    return _Chunk(rows(given.q), keys, values, dout, dlse, s, p, coarse, difference, before)


def masked_rows(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, function: Function
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows are fully masked, and in which of these dout has NaN or Inf: as lse."""
    masked = function.fully_masked(lse)
    delta = (dout.float() * out.float()).sum(-1)
    return masked, masked & ~delta.isfinite()


def _weights(
    s: torch.Tensor, lse: torch.Tensor, function: Function
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of rows, and in which rows lse is too coarse for them, as kernels have them."""
    p = (s - lse.masked_fill(lse == -torch.inf, 0)).exp()
    coarse = (lse.abs() >= COARSE_LSE) & lse.isfinite()
    if not function.rounds:
        return p, torch.zeros_like(coarse)
    total = p.sum(-1, keepdim=True)
    if (column := function.column(s)) is not None:
        total = total + (column - lse).exp()
    return torch.where(coarse, p / total, p), coarse


def _slopes(one: _Chunk, function: Function) -> Iterator[tuple[Modifier, torch.Tensor]]:
    """The derivatives of what changes scores before anything is added to them."""
    for modifier in function.modifiers:
        if (slope := modifier.slope(one.capped)) is not None:
            yield modifier, slope


def _gradients(given: Tensors, function: Function, wide: torch.dtype) -> Gradients:
    dq, dk, dv = (
        torch.zeros(t.shape, dtype=wide, device=t.device) for t in (given.q, given.k, given.v)
    )
    for rows in chunks(given.q, given.k):
        one = chunk_of(given, function, rows, wide)
        ds = one.p * one.difference
        for _, slope in _slopes(one, function):
            ds = ds * slope
        ds = ds * function.scale
        dq[rows.batch, :, rows.rows] = (ds @ one.keys).flatten(1, 2)
        dk[rows.batch] += (ds.mT @ one.queries).sum(2)
        dv[rows.batch] += (function.weighted(one.p, rows).mT @ one.dout).sum(2)
    return dq, dk, dv


# ---- Bounds --------------------------------------------------------------------------------------


def bound(given: Tensors, function: Function) -> Gradients:
    """Return how far a kernel's gradients may be from `exact`, by element, in float64.

    A probability has the errors of its score and of lse, what multiplies it those of the products
    dout v^T and of rowsum(dout out), where out is as far off as the forward pass may be. Both
    p and ds are rounded to the type of q before the second products, whose sums lose what the
    tensor core truncates. Each gradient is rounded once more.
    """
    q, k, v = given.q, given.k, given.v
    out, lse = forward.exact(q, k, v, function)
    errors = forward.bound(q, k, v, function)
    return _bound(replace(given, out=out, lse=lse), function, *errors)


def following(given: Tensors, function: Function) -> tuple[Gradients, Gradients]:
    """Return the gradients in float64 of out and lse as they are, and how far off a kernel may be.

    No forward pass is computed: this is cheap for some rows, or some columns, of long sequences.
    """
    out_error = torch.zeros((), dtype=torch.float64, device=given.q.device).expand(given.out.shape)
    lse_error = out_error[..., 0]
    wide = replace(given, out=given.out.double(), lse=given.lse.double())
    found = _gradients(wide, function, torch.float64)
    return found, _bound(wide, function, out_error, lse_error)


def _bound(
    given: Tensors, function: Function, out_error: torch.Tensor, lse_error: torch.Tensor
) -> Gradients:
    q, k = given.q, given.k
    unit, smallest = unit_roundoff(q.dtype), torch.finfo(q.dtype).smallest_normal
    denormal = smallest * torch.finfo(q.dtype).eps / 2  # rounding below the normal numbers
    sharing = q.shape[1] // k.shape[1]
    over_rows, over_columns = (
        accumulated(q.dtype, length) + 2 * FLOAT_ROUNDOFF * length
        for length in (q.shape[2] * sharing, k.shape[2])
    )
    dq, dk, dv = (
        torch.zeros(t.shape, dtype=torch.float64, device=t.device) for t in (q, k, given.v)
    )
    for rows in chunks(q, k):
        one = chunk_of(given, function, rows, torch.float64)
        at = (rows.batch, slice(None), rows.rows)
        p_error = probability_error(given, function, rows, one, lse_error[at])
        ds, ds_error = score_gradient_error(given, function, rows, one, p_error, out_error[at])
        p_error += unit * (one.p + p_error) + denormal * (one.p > 0)
        ds_error += unit * (ds.abs() + ds_error) + denormal * (one.p > 0)
        of_columns = (ds_error + over_columns * ds.abs()) * function.scale
        of_rows = (ds_error + over_rows * ds.abs()) * function.scale
        dq[at] = (of_columns @ one.keys.abs()).flatten(1, 2)
        dk[rows.batch] += (of_rows.mT @ one.queries.abs()).sum(2)
        of_values = function.weighted(p_error + over_rows * one.p, rows)
        dv[rows.batch] += (of_values.mT @ one.dout.abs()).sum(2)
    for found, error in zip(_gradients(given, function, torch.float64), (dq, dk, dv), strict=True):
        error += unit * (found.abs() + error + smallest * (error > 0))
    return dq, dk, dv


def probability_error(
    given: Tensors, function: Function, rows: Rows, one: _Chunk, lse_error: torch.Tensor
) -> torch.Tensor:
    """How far p may be off: by its score, by lse and by exp2."""

    def column(tensor: torch.Tensor) -> torch.Tensor:
        return grouped(tensor, given.k)[..., None].nan_to_num(neginf=0.0)

    lse = column(given.lse[rows.batch, :, rows.rows])
    exponent = score_error(given.q, given.k, function, rows, one.s, lse)
    # What coarse rows are divided by is summed in fp32 from scores that are as far off.
    total = (torch.expm1(exponent) * one.p).sum(-1, keepdim=True)
    total = total + 2 * FLOAT_ROUNDOFF * one.p.shape[-1]
    off = torch.where(one.coarse, total, column(lse_error))
    exponent = (exponent + off).clamp(max=MOST_DISTANT)  # else infinity times a weight of 0
    return torch.expm1(exponent) * one.p + SMALLEST * (one.p > 0)


def score_gradient_error(
    given: Tensors,
    function: Function,
    rows: Rows,
    one: _Chunk,
    p_error: torch.Tensor,
    out_error: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the scores over `scale`, and how far it may be off before it is rounded."""
    dim, dim_v, dtype = given.q.shape[-1], given.v.shape[-1], given.q.dtype
    at = (rows.batch, slice(None), rows.rows)
    mass = (one.dout * grouped(given.out[at], given.k)).abs().sum(-1, keepdim=True)
    off = (one.dout.abs() * grouped(out_error, given.k)).sum(-1, keepdim=True)
    off = off + FLOAT_ROUNDOFF * (dim_v + 4) * mass
    if one.dlse is not None:
        off = off + FLOAT_ROUNDOFF * one.dlse.abs()
    size = function.weighted(one.dout.abs() @ one.values.mT.abs(), rows)
    off = off + (accumulated(dtype, dim_v) + 4 * FLOAT_ROUNDOFF) * size
    difference = one.difference.abs()
    error = p_error * difference + (one.p + p_error) * (off + 4 * FLOAT_ROUNDOFF * difference)
    ds = one.p * one.difference
    for modifier, slope in _slopes(one, function):
        argument = products(given.q, given.k, rows, torch.float64, magnitude=True) * function.scale
        slope_error = modifier.slope_error(slope, accumulated(dtype, dim) * argument)
        ds, error = ds * slope, error * slope + (ds.abs() + error) * slope_error
    return ds, error


# ---- The gradients of scores, which those of a bias are summed from ------------------------------

OfRows = Callable[[Tensors, Function, Rows], torch.Tensor]


def ds_rows(given: Tensors, function: Function, rows: Rows) -> torch.Tensor:
    """Return the gradients of a chunk of scores, as out and lse are, in fp32."""
    one = chunk_of(given, function, rows, torch.float32)
    return one.p * one.difference


def exact_ds(given: Tensors, function: Function, rows: Rows) -> torch.Tensor:
    """Return them in float64."""
    one = chunk_of(_wide(given), function, rows, torch.float64)
    return one.p * one.difference


def ds_bound(given: Tensors, function: Function, rows: Rows) -> torch.Tensor:
    """Return how far those of a kernel, which are in the type of q, may be from `exact_ds`."""
    unit, smallest = unit_roundoff(given.q.dtype), torch.finfo(given.q.dtype).smallest_normal
    wide = _wide(given)
    one = chunk_of(wide, function, rows, torch.float64)
    at = (rows.batch, slice(None), rows.rows)
    none = torch.zeros((), dtype=torch.float64, device=given.q.device).expand(given.out.shape)
    p_error = probability_error(wide, function, rows, one, none[at][..., 0])
    ds, error = score_gradient_error(wide, function, rows, one, p_error, none[at])
    return error + unit * (ds.abs() + error + smallest * (one.p > 0))


def _wide(given: Tensors) -> Tensors:
    return replace(given, out=given.out.double(), lse=given.lse.double())


def ds_of_call(call: BackwardArguments, band: Band, compute: OfRows = ds_rows) -> torch.Tensor:
    """Apply `compute` to a call's tensors, scores by scores as `room_of_ds` has them; else 0."""
    shape = () if call.ds is None else call.ds.shape
    wide = torch.float32 if compute is ds_rows else torch.float64
    found = torch.zeros(shape, dtype=wide, device=call.out.device)

    def fill(index: slice, given: Tensors, function: Function) -> None:
        for rows in chunks(given.q, given.k):
            ds = compute(given, function, rows).flatten(1, 2)
            found[index][rows.batch, :, rows.rows, : ds.shape[-1]] = ds

    q, k, v = call.forward.q, call.forward.k, call.forward.v
    function = function_of(call.forward, band)
    given = Tensors(q, k, v, call.out, call.lse, call.dout, call.dlse)
    if not call.forward.offsets:
        fill(slice(None), given, function)
        return found
    starts_q, starts_k = (offsets.tolist() for offsets in call.forward.offsets)
    for index in range(len(starts_q) - 1):
        queries = slice(starts_q[index], starts_q[index + 1])
        keys = slice(starts_k[index], starts_k[index + 1])
        rows, columns = queries.stop - queries.start, keys.stop - keys.start
        if rows and columns:
            own = of_sequence(function, index, rows, columns)
            fill(slice(index, index + 1), sequence_of(given, queries, keys), own)
    return found


# ---- What the gradient of a column follows from --------------------------------------------------


def row_sums(call: BackwardArguments, wide: torch.dtype) -> RowSums:
    """Return the sums of a call's rows in `wide`. Reads cu_seqlens, and so waits for a GPU.

    Where dout of fully masked rows has NaN or Inf, it is 0.
    """
    q, k, v = call.forward.q, call.forward.k, call.forward.v
    given = Tensors(q, k, v, call.out, call.lse, call.dout, call.dlse)
    if offsets := call.forward.offsets:  # every row of a sequence has its share, whichever it is of
        given = sequence_of(given, slice(0, int(offsets[0][-1])), slice(0, 0))
    function = Function(1.0, modifiers=call.forward.modifiers)
    _, bad = masked_rows(given.dout, given.out, given.lse, function)
    products = given.dout.masked_fill(bad[..., None], 0).to(wide) * given.out.to(wide)
    lse, delta, mass = given.lse.to(wide), products.sum(-1), products.abs().sum(-1)
    if given.dlse is not None:
        delta, mass = delta - given.dlse.to(wide), mass + given.dlse.to(wide).abs()
    return RowSums(lse, delta.masked_fill(lse == -torch.inf, 0), mass, given.out.shape[-1])
