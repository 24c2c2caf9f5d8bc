"""The operators that torch.compile sees, registered with torch.library; eager calls pass them by.

A packed weight crosses as its tensors and what its metadata say, an epilogue as its steps flatten
it: a word for each, and their tensors and numbers; outputs of steps, which are written, cross
beside `out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.runtime.arguments import places_of
from warploom.runtime.families._product.call import written_keywords
from warploom.runtime.families._product.epilogue import ITEMS, unseen
from warploom.runtime.families._product.examples import Dimension, Examples, items
from warploom.runtime.families._product.operands import result_type
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.mixed_gemm import gradient
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.operator import no_gradient, register
from warploom.runtime.plan import run

_SCHEMA = MixedGemmCall.declaration.schema
_PLACES = places_of(MixedGemmCall.declaration.crossing)
_A, _OPERANDS = _PLACES["a"], _PLACES["operands"]


def _mixed_gemm(*values: Any, **written: torch.Tensor | None) -> torch.Tensor:
    call = MixedGemmCall.crossed(*values, **written)
    with torch.no_grad():
        return run(call)


def _mixed_gemm_out(*values: Any, **written: torch.Tensor | None) -> None:
    _mixed_gemm(*values, **written)


def _refuse_grad(*values: Any, **written: torch.Tensor | None) -> None:
    MixedGemmCall.crossed(*values, **written).refuse()


def _fake(*values: Any) -> torch.Tensor:
    return MixedGemmCall.crossed(*values).fake()


def _fake_out(*values: Any, **written: torch.Tensor | None) -> None:
    return None


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:  # noqa: ANN401
    call = MixedGemmCall.crossed(*inputs)
    read = (call.a, *inputs[_OPERANDS])
    needed = tuple(one.requires_grad for one in read)
    gradient.keep(ctx, call.weight, call.listed, read, needed)
    ctx.none = list(map(no_gradient, inputs))


def _backward(ctx: Any, dd: torch.Tensor | None) -> tuple[object, ...]:  # noqa: ANN401
    results = [*ctx.none]
    results[_A], *results[_OPERANDS] = gradient.gradients(ctx, dd)
    return tuple(results)


def _vmap(info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[torch.Tensor, int]:  # noqa: ANN401
    """All examples are rows of one product."""
    call = MixedGemmCall.crossed(*given)
    if any(dim is not None for dim in in_dims[1:4]):
        raise ProblemError(
            "a packed weight inside of torch.func's vmap",
            rule="must be one for all examples",
            fix="call warploom.mixed_gemm for each",
        )
    dim: Dimension = in_dims[_A]
    a = call.a.expand(info.batch_size, *call.a.shape) if dim is None else call.a.movedim(dim, 0)
    n = call.weight.metadata.n
    examples = Examples(info.batch_size, Extents(tuple(a.shape[1:-2]), a.shape[-2], n))
    own: Sequence[Any] = in_dims[_OPERANDS] or [None] * len(given[_OPERANDS])
    folded = [_in_rows(item, examples) for item in items(call.listed, iter(own), examples)]
    values, _ = replace(call, a=a, listed=folded).crossing()
    return torch.ops.warploom.mixed_gemm(*values), 0


def _in_rows(item: Item, examples: Examples) -> Item:
    """An item that all examples share, with what it has for each row again for each of them."""
    kind, value, *rest = item
    reads = step_of(item).reads(item)
    own = examples.at.own(reads)
    if reads not in ("row", "fragment") or value.dim() > len(own):
        return item
    return (kind, examples.each(value, own), *rest)


register(
    "mixed_gemm",
    _SCHEMA,
    returns="Tensor",
    run=_mixed_gemm,
    fake=_fake,
    backward=_backward,
    save=_save,
    vmap=_vmap,
)
register(
    "mixed_gemm_out",
    _SCHEMA,
    returns="()",
    run=_mixed_gemm_out,
    fake=_fake_out,
    written=written_keywords(),
    refuse=_refuse_grad,
)


def call(mixed: MixedGemmCall) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace.

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    outputs where a gradient is wanted.
    """
    mixed.out_dtype = result_type(mixed.a, mixed.out, mixed.out_dtype, has_epilogue=True)
    out, kinds = mixed.out, [kind for kind, _ in ITEMS.written(mixed.listed)]
    values, written = mixed.crossing()
    if len(written) < len(kinds):
        raise ProblemError(
            f"an epilogue with {len(kinds)} outputs of {len(written)} kinds",
            rule="must have one of a kind at most under torch.compile",
            fix="call warploom.mixed_gemm outside of the compiled function",
        )
    writing = [*written, *(() if out is None else ("out",))]
    wanted = torch.is_grad_enabled() and mixed.requires_grad
    if wanted and (kind := mixed.unseen_kind) is not None:
        raise unseen(kind)
    if writing and wanted:
        raise ProblemError(
            f"{', '.join(writing)} under torch.compile, with tensors that require grad",
            rule="must be left out: operators that autograd differentiates cannot write to their "
            "arguments",
            fix="call it under torch.no_grad(), or outside of the compiled function",
        )
    if out is None and not written:
        result: torch.Tensor = torch.ops.warploom.mixed_gemm(*values)
        return result
    out = mixed.fake() if out is None else out
    torch.ops.warploom.mixed_gemm_out(*values, out=out, **written)
    return out
