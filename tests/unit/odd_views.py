"""Views of the same values that lie in memory in every way that torch has.

Torch deems a tensor contiguous whatever the strides of its dimensions of size 1 are, and of one
without elements all strides mean nothing: both come out of transposes, slices and expansions.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

STEPS = (0, 3, 1 << 20)  # of dimensions of size 1


def dense(values: torch.Tensor) -> torch.Tensor:
    return values.detach().clone(memory_format=torch.contiguous_format)


def odd_views(values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The values as they are, and as views of each kind that their shape allows, by a name."""
    yield "dense", dense(values)
    if values.dim() > 1:
        yield "transposed", dense(values.mT).mT
    if 1 in values.shape:
        for step in STEPS:
            made = dense(values)
            sizes = zip(made.shape, made.stride(), strict=True)
            strides = [step if size == 1 else own for size, own in sizes]
            yield f"strides {step} of size 1", made.as_strided(made.shape, strides)
    for dim, size in enumerate(values.shape):
        shape = [2 * one + 3 if at == dim else one for at, one in enumerate(values.shape)]
        before = (slice(None),) * dim
        for kind, part in (("a slice", slice(1, 1 + size)), ("a step", slice(1, 1 + 2 * size, 2))):
            room = values.new_full(shape, 99)[(*before, part)]
            yield f"{kind} of dimension {dim}", room.copy_(values)
        once = values.narrow(dim, 0, min(1, size))
        if size and torch.equal(once.expand_as(values), values):
            yield f"expanded in dimension {dim}", dense(once).expand_as(values)
