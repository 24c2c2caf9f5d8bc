"""The gradients of scores on any device, which those of a bias are summed from, and their bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families.attention_backward.reference import (
    Tensors,
    chunk_of,
    probability_error,
    score_gradient_error,
    sequence_of,
)
from warploom.runtime.families.attention_forward import reference as forward
from warploom.runtime.families.attention_forward.reference import Function
from warploom.runtime.families.attention_forward.scores import Rows, chunks

if TYPE_CHECKING:
    from warploom.runtime.families.attention_backward.call import BackwardCall

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
    none = torch.zeros((), dtype=torch.float64, device=given.q.device).expand(given.q.shape)
    p_error = probability_error(wide, function, rows, one, none[at][..., 0])
    ds, error = score_gradient_error(wide, function, rows, one, p_error, none[at])
    return error + unit * (ds.abs() + error + smallest * (one.p > 0))


def _wide(given: Tensors) -> Tensors:
    return replace(given, out=given.out.double(), lse=given.lse.double())


def ds_of_call(call: BackwardCall, band: Band, compute: OfRows = ds_rows) -> torch.Tensor:
    """Apply `compute` to a call's tensors, scores by scores as `room_of_ds` has them; else 0."""
    shape = () if call.ds is None else call.ds.shape
    wide = torch.float32 if compute is ds_rows else torch.float64
    found = torch.zeros(shape, dtype=wide, device=call.out.device)

    def fill(index: slice, given: Tensors, function: Function) -> None:
        for rows in chunks(given.q, given.k):
            ds = compute(given, function, rows).flatten(1, 2)
            found[index][rows.batch, :, rows.rows, : ds.shape[-1]] = ds

    q, k, v = call.forward.q, call.forward.k, call.forward.v
    function = forward.function_of(call.forward, band)
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
            own = forward.of_sequence(function, index, rows, columns)
            fill(slice(index, index + 1), sequence_of(given, queries, keys), own)
    return found
