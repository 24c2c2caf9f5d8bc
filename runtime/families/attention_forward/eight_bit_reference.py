"""Attention on q, k and v of 8 bits in plain torch: what CPU tensors get, kernels are held against.

Operands are fp32, the products of 8-bit numbers and their scales; v may be of 16 bits in truth, and
then no weight is rounded to e4m3. All return out and lse, as the functions of reference.py do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch

from warploom.runtime.accumulation import accumulated
from warploom.runtime.families._attention.function import Function, chunks
from warploom.runtime.families._attention.modifiers.modifier import EXP2_ERROR, FLOAT_ROUNDOFF
from warploom.runtime.families._attention.reference import Attention, Pair, times_values
from warploom.runtime.families._attention.scores import largest, products, scores, softmax

E4M3 = torch.float8_e4m3fn
TILE = 128  # keys whose weights are rounded relative to one maximum
OFFSET = 8  # of the exponents of weights: the largest of a row are 256, of e4m3's 448
_ROUNDOFF = 2.0**-4  # of a weight that is a normal number of e4m3
_SMALLEST = 2.0**-10 * 2.0**-4  # half of e4m3's smallest, beside the least largest weight, 2^4


def rounded(weights: str) -> Attention:
    """The function that rounds as kernels do: each tile's weights, to their type."""
    return partial(_rounded, keep=_e4m3 if weights == "e4m3" else _wide)


def _rounded(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    function: Function,
    *,
    keep: Callable[[torch.Tensor], torch.Tensor],
) -> Pair:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1])
    keys = k.shape[2]
    for chunk in chunks(q, k):
        s = scores(q, k, function, chunk, torch.float32)
        values = v[chunk.batch]
        top = s.new_full((*s.shape[:-1], 1), -torch.inf)
        total, sums = torch.zeros_like(top), s.new_zeros((*s.shape[:-1], v.shape[-1]))
        for begin in range((keys - 1) // TILE * TILE, -1, -TILE):  # as kernels go
            columns = slice(begin, min(begin + TILE, keys))
            tile = s[..., columns]
            largest_yet = torch.maximum(top, tile.amax(-1, keepdim=True))
            base = largest_yet.masked_fill(largest_yet == -torch.inf, 0)
            weights = torch.exp2((tile - base) / math.log(2) + OFFSET)
            shrunk = (top - base).exp()
            total = total * shrunk + weights.sum(-1, keepdim=True)
            sums = sums * shrunk + keep(weights) @ values[:, :, None, columns]
            top = largest_yet
        if (column := function.column(s)) is not None:
            larger = torch.maximum(top, column)
            base = larger.masked_fill(larger == -torch.inf, 0)
            factor, top = (top - base).exp(), base
            total, sums = total * factor + (column - base).exp() * 2**OFFSET, sums * factor
        result = sums / total.masked_fill(total == 0, 1)
        found = top + total.log() - OFFSET * math.log(2)
        out[chunk.batch, :, chunk.rows] = result.flatten(1, 2)
        lse[chunk.batch, :, chunk.rows] = found.squeeze(-1).flatten(1, 2)
    return out, lse


def _e4m3(weights: torch.Tensor) -> torch.Tensor:
    return weights.to(E4M3).float()


def _wide(weights: torch.Tensor) -> torch.Tensor:
    return weights


def bound(scored: torch.dtype, weights: str, sums: str, unit: float) -> Attention:
    """The function of how far out and lse may be from float64's, element by element.

    Args:
        scored: The type of q and k.
        weights: "e4m3", or "same" where they are of 16 bits.
        sums: "promoted" or "fast": who adds up weights of e4m3 with v.
        unit: The relative error of one rounding to the type of the output.
    """
    return partial(_bound, scored=scored, weights=weights, sums=sums, unit=unit)


def _bound(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    function: Function,
    *,
    scored: torch.dtype,
    weights: str,
    sums: str,
    unit: float,
) -> Pair:
    keys = k.shape[2]
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float64, device=q.device)
    is_wide = weights == "same"
    added = accumulated(torch.bfloat16 if is_wide else E4M3, keys, sums)
    added += 2 * FLOAT_ROUNDOFF * keys
    roundoff, smallest = (unit, 2.0**-24) if is_wide else (_ROUNDOFF, _SMALLEST)
    for chunk in chunks(q, k):
        s = scores(q, k, function, chunk, torch.float64)
        top = largest(s)
        p, total = softmax(s, function)
        p = p.nan_to_num(0.0)
        size = products(q, k, chunk, torch.float64, magnitude=True) * function.scale
        finite = s.masked_fill(s == -torch.inf, 0)
        off = accumulated(scored, q.shape[-1]) * size + EXP2_ERROR
        off = off + 8 * FLOAT_ROUNDOFF * (size + finite.abs() + top.abs())
        off = off + function.cap_error * finite.abs()
        error = torch.expm1(off) * p
        relative = error.sum(-1, keepdim=True)
        if (column := function.column(s)) is not None:
            apart = EXP2_ERROR + 8 * FLOAT_ROUNDOFF * (column.abs() + top.abs())
            relative = relative + torch.expm1(apart) * (column - total).exp().nan_to_num(0.0)
        heaviest = p.amax(-1, keepdim=True)
        inexact = error + roundoff * p * (1 + torch.expm1(off)) + smallest * heaviest * (p > 0)
        values = v[chunk.batch].double()
        exact, mass = times_values(p, values), times_values(p, values.abs())
        wrong = times_values(inexact, values.abs())
        relative = relative.flatten(1, 2)
        wrong = wrong + exact.abs() * relative + added * mass
        out[chunk.batch, :, chunk.rows] = wrong + unit * (exact.abs() + wrong) + 2.0**-126
        of_sum = 2 * FLOAT_ROUNDOFF * keys + EXP2_ERROR * (1 + total.abs().nan_to_num(posinf=0.0))
        lse[chunk.batch, :, chunk.rows] = relative.squeeze(-1) + of_sum.squeeze(-1).flatten(1, 2)
    return out, lse
