"""torch.func.vmap of a gemm: its dimension becomes the first batch of the operands that have it.

B stays one matrix where it has no such dimension, so that all examples are rows of one product.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.runtime.families._product.examples import Dimension, Examples, items, unfit
from warploom.runtime.families._product.steps import flatten
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families.gemm.operator_gradients import WIDTH, Call, Outputs, listed_of


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


def _folded(count: int, dims: Call, call: Call) -> Call:
    """A call of all examples."""
    a, b = call.a, call.b
    dim_a: Dimension = dims.a  # type: ignore[assignment]
    dim_b: Dimension = dims.b  # type: ignore[assignment]
    one_a = a if dim_a is None else a.select(dim_a, 0)
    one_b = b if dim_b is None else b.select(dim_b, 0)
    batches = torch.broadcast_shapes(one_a.shape[:-2], one_b.shape[:-2])  # type: ignore[no-untyped-call]
    examples = Examples(count, Extents(tuple(batches), one_a.shape[-2], one_b.shape[-1]))
    if dim_a is None and dim_b is None:  # only items differ
        a, dim_a = a.expand(count, *a.shape), 0
    if dim_a is not None:
        a = examples.first(a, dim_a, 2)
    if dim_b is not None:
        b = examples.first(b, dim_b, 2)
    own: Sequence[Any] = dims.operands or [None] * len(call.operands)
    flat = flatten(list(items(listed_of(call, {}), iter(own), examples)))
    return call._replace(a=a, b=b, kinds=flat.words, operands=flat.tensors, numbers=flat.numbers)
