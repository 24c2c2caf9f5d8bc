"""How attention's operators take distributed tensors: a split of the batch, or of heads.

Heads of k and v are split with those of q that read them. Importing this registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Placement, Replicate, Shard

from warploom.runtime.sharding import Rule, register


class _Split(NamedTuple):
    """How q, k, v, their gradients and the result lie; the log-sum-exp, and offsets of packed."""

    values: Placement
    lse: Placement
    offsets: Placement


def _splits(size: int, q: torch.Tensor, k: torch.Tensor) -> Iterator[_Split]:
    whole = Replicate()
    yield _Split(whole, whole, whole)
    packed = q.dim() == 3  # [total, heads, dim]
    if not packed:
        yield _Split(Shard(0), Shard(0), whole)
    if q.shape[1] == k.shape[1] or k.shape[1] % size == 0:
        yield _Split(Shard(1), Shard(0 if packed else 1), whole)


def _offsets(one: _Split, given: tuple[object, ...]) -> tuple[Placement, ...]:
    """Those of the tensors behind q, k and v: only offsets are any."""
    return tuple(one.offsets for value in given if isinstance(value, torch.Tensor))


def _attention(
    size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> list[Rule]:
    return [
        Rule((*[one.values] * 3, *_offsets(one, given)), (one.values, one.lse))
        for one in _splits(size, q, k)
    ]


def _attention_into(
    size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *given: Any
) -> list[Rule]:
    return [
        Rule((*[one.values] * 3, *_offsets(one, given[:-1]), one.values), (one.lse,), written=1)
        for one in _splits(size, q, k)
    ]


def _attention_backward(
    size: int,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *given: Any,
) -> list[Rule]:
    return [
        Rule(
            tuple(
                chain(
                    [one.values] + [one.lse] * (dlse is not None),
                    [one.values] * 4 + [one.lse],
                    _offsets(one, given),
                )
            ),
            (one.values,) * 3,
        )
        for one in _splits(size, q, k)
    ]


register("attention", _attention)
register("attention_into", _attention_into)
register("attention_backward", _attention_backward)
