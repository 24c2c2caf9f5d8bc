"""The examples of torch.func.vmap, as the first batch of what a product's call is given."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from warploom.errors import ProblemError
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.operand import Extents, natural
from warploom.runtime.families._product.steps.step import Item

Dimension = int | None  # of vmap, in a tensor
_VECTORS = {"row": "scale_row", "column": "scale_column"}


@dataclass(frozen=True, slots=True)
class Examples:
    """How many there are, and the D of each."""

    count: int
    at: Extents

    def first(self, tensor: torch.Tensor, dimension: int, trailing: int) -> torch.Tensor:
        """Bring the examples before all batches of D."""
        moved = tensor.movedim(dimension, 0)
        missing = len(self.at.batches) - (moved.dim() - 1 - trailing)
        return moved[(slice(None), *[None] * missing)]

    def each(self, tensor: torch.Tensor, own: Sequence[int]) -> torch.Tensor:
        """Give a tensor [examples, .., *own] all batches of D."""
        return tensor.expand(self.count, *self.at.batches, *own).contiguous()


def items(listed: Sequence[Item], dims: Iterator[Dimension], examples: Examples) -> Iterator[Item]:
    """The items of all examples' call."""
    for item in listed:
        one = step_of(item)
        if not isinstance(item[1], torch.Tensor) or one.step.auxiliary:
            yield item
            left = one.columns(examples.at.n)
            examples = replace(examples, at=replace(examples.at, n=left))
            continue
        kind, value, *rest = item
        dim = next(dims)
        example = value if dim is None else value.select(dim, 0)
        reads = one.reads((kind, example, *rest))
        seen = None if one.step.prepared else natural(reads, example, examples.at)
        own = examples.at.own(reads)
        if seen is None:  # the call says what is wrong
            yield item
        elif dim is None:
            yield (kind, examples.each(seen, own) if seen.dim() > len(own) > 0 else seen, *rest)
        elif reads == "nothing":  # a number for each example is one for each of its rows
            value = value.movedim(dim, 0).reshape(-1, *[1] * (len(examples.at.batches) + 1))
            yield ("scale_row", examples.each(value, (examples.at.m,)))
        else:
            value = value.movedim(dim, 0).reshape(-1, *seen.shape)
            value = examples.each(examples.first(value, 0, len(own)), own)
            yield (_VECTORS.get(reads, kind) if kind.startswith("scale") else kind, value, *rest)


def unfit(names: str) -> ProblemError:
    """The error of an output that examples would share."""
    return ProblemError(
        f"{names} inside of torch.func's vmap",
        rule="must be left out: all examples would write to it",
        fix="give batches as leading dimensions, or compute it outside",
    )
