"""torch.func.vmap of a gemm: its dimension becomes the first batch of the operands that have it.

B stays one matrix where it has no such dimension, so that all examples are rows of one product.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.runtime.families._product.steps import flatten, step_of
from warploom.runtime.families._product.steps.operand import Extents, natural
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm.operator_gradients import WIDTH, Call, Outputs, listed_of

Dimension = int | None  # of vmap, in a tensor
_VECTORS = {"row": "scale_row", "column": "scale_column"}


@dataclass(frozen=True, slots=True)
class _Examples:
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


def gemm(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[torch.Tensor, int]:  # noqa: ANN401
    """The rule of `warploom::gemm`."""
    folded = _folded(info.batch_size, Call(*in_dims), Call(*given))
    return torch.ops.warploom.gemm(*folded), 0


def gemm_outputs(
    info: Any,  # noqa: ANN401
    in_dims: tuple[Any, ...],
    *given: Any,
) -> tuple[list[torch.Tensor], list[int]]:
    """The rule of `warploom::gemm_outputs`, of which each example may store a preactivation."""
    call, outputs = Call(*given[:WIDTH]), Outputs(*given[WIDTH : WIDTH + 2])
    folded = _folded(info.batch_size, Call(*in_dims[:WIDTH]), call)
    shape = (*torch.broadcast_shapes(folded.a.shape[:-2], folded.b.shape[:-2]),)  # type: ignore[no-untyped-call]
    shape = (*shape, folded.a.shape[-2], folded.b.shape[-1])
    if any(kind != "preactivation" for kind in outputs.written_kinds):
        raise unfit(", ".join(outputs.written_kinds))
    written = [one.new_empty((), device=folded.a.device).expand(shape) for one in outputs.written]
    into = given[WIDTH + 3]
    if into is not None:
        raise unfit("accumulate_into")
    results: list[torch.Tensor] = torch.ops.warploom.gemm_outputs(
        *folded, outputs.written_kinds, written, *given[WIDTH + 2 :]
    )
    return results, [0] * len(results)


def unfit(names: str) -> ProblemError:
    """The error of an output that examples would share."""
    return ProblemError(
        f"{names} inside of torch.func's vmap",
        rule="must be left out: all examples would write to it",
        fix="give batches as leading dimensions, or compute it outside",
    )


def _folded(count: int, dims: Call, call: Call) -> Call:
    """A call of all examples."""
    a, b = call.a, call.b
    dim_a: Dimension = dims.a  # type: ignore[assignment]
    dim_b: Dimension = dims.b  # type: ignore[assignment]
    one_a = a if dim_a is None else a.select(dim_a, 0)
    one_b = b if dim_b is None else b.select(dim_b, 0)
    batches = torch.broadcast_shapes(one_a.shape[:-2], one_b.shape[:-2])  # type: ignore[no-untyped-call]
    examples = _Examples(count, Extents(tuple(batches), one_a.shape[-2], one_b.shape[-1]))
    if dim_a is None and dim_b is None:  # only items differ
        a, dim_a = a.expand(count, *a.shape), 0
    if dim_a is not None:
        a = examples.first(a, dim_a, 2)
    if dim_b is not None:
        b = examples.first(b, dim_b, 2)
    own: Sequence[Any] = dims.operands or [None] * len(call.operands)
    flat = flatten(list(_items(listed_of(call, {}), iter(own), examples)))
    return call._replace(a=a, b=b, kinds=flat.words, operands=flat.tensors, numbers=flat.numbers)


def _items(
    listed: Sequence[Item], dims: Iterator[Dimension], examples: _Examples
) -> Iterator[Item]:
    """The items of all examples' call."""
    for item in listed:
        one = step_of(item)
        if not isinstance(item[1], torch.Tensor) or one.step.auxiliary:
            yield item
            continue
        kind, value, *rest = item
        dim = next(dims)
        example = value if dim is None else value.select(dim, 0)
        reads = one.reads((kind, example, *rest))
        seen = natural(reads, example, examples.at)
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
