"""How this operator takes distributed tensors: any split of dy; sums of columns are terms of a sum.

Importing this registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from warploom.runtime.sharding import Rule, register


def _rules(
    size: int,
    dy: torch.Tensor,
    z: torch.Tensor | None,
    activation: str | None,
    sums: bool,
    *_: object,
) -> list[Rule]:
    given = 1 if z is None else 2
    return [Rule.replicated(given, 2), *_splits(dy, given, stored=z is not None, sums=sums)]


def _splits(dy: torch.Tensor, given: int, *, stored: bool, sums: bool) -> Iterator[Rule]:
    """A split by each dimension; of a result that is not asked for each process has nothing."""
    whole, last = Replicate(), dy.dim() - 1
    for axis in range(dy.dim()):
        place = Shard(axis)
        summed = Shard(0) if axis == last else Partial()
        yield Rule((place,) * given, (place if stored else whole, summed if sums else whole))


register("activation_backward", _rules)
