"""How GEMM's operators take distributed tensors: a split of M, N, K or of a batch each.

Each dimension of a tensor goes along an axis: one of D's, or that of k. Where k is split, the
results are terms of a sum, if the epilogue is linear: then a bias or a residual is in one of them.
Importing this registers the rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import Partial, Placement, Replicate

from warploom.generator.epilogue import (
    GATES,
    Bias,
    Residual,
    RmsScale,
    Scale,
    Scatter,
    StochasticRounding,
)
from warploom.generator.step import Reads
from warploom.runtime.arguments import places_of
from warploom.runtime.families._product.steps import step_of
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm import gradient, gradient_rule
from warploom.runtime.families.gemm.block_scales import block_scales
from warploom.runtime.families.gemm.call import PRODUCT, GemmCall
from warploom.runtime.families.gemm.gradient_rule import A, B, GradientOptions
from warploom.runtime.sharding import Layout, Rule, register, split

Axes = tuple[int | None, ...]  # of each dimension of a tensor; None: it has one element there
Placements = tuple[Placement, ...]
_WIDTH = len(places_of(PRODUCT))
_Asked = tuple[Reads, Sequence[int]]  # what of D an item's tensor lies beside, and its shape


class _Axes(NamedTuple):
    """The axes of a call's tensors.

    extents   of every axis: those of D in order, then k
    read      the axes of a, b and what items read, in order; None: of none that there are
    stored    the same of outputs of steps
    """

    extents: tuple[int, ...]
    read: tuple[Axes | None, ...]
    stored: tuple[Axes | None, ...] = ()

    @classmethod
    def of(
        cls, a: Sequence[int], b: Sequence[int], read: Sequence[_Asked], stored: Sequence[_Asked]
    ) -> _Axes:
        """Those of a call, from the shapes of a and b."""
        lead = torch.broadcast_shapes(a[:-2], b[:-2])  # type: ignore[no-untyped-call]
        at = Extents(tuple(lead), a[-2], b[-1])
        k = len(lead) + 2
        extents = (*at.batches, at.m, at.n, a[-1])
        operands = _along(a, (k - 2, k), extents), _along(b, (k, k - 1), extents)
        own = (tuple(_of_item(*asked, at, extents) for asked in group) for group in (read, stored))
        of_items, of_stored = own
        return cls(extents, (*operands, *of_items), of_stored)

    @property
    def k(self) -> int:
        """The axis that is summed over."""
        return len(self.extents) - 1

    def shared(self) -> list[int]:
        """The axes of D that a call can be split along, which outputs of steps must have."""
        if None in (*self.read, *self.stored):
            return []
        stored = [one for one in self.stored if one is not None]
        return [
            axis
            for axis in range(self.k)
            if self.extents[axis] > 1 and all(axis in one for one in stored)
        ]


def _asked(item: Item) -> _Asked:
    return step_of(item).reads(item), item[1].shape


def _read(listed: Sequence[Item]) -> list[Item]:
    return [
        item
        for item in listed
        if isinstance(item[1], torch.Tensor)
        and (step_of(item).step.loads or not step_of(item).step.auxiliary)
    ]


def _places(axes: Sequence[Axes | None], axis: int) -> Placements:
    return tuple(split(one or (), axis) for one in axes)


def _of_item(
    reads: Reads, shape: Sequence[int], at: Extents, extents: Sequence[int]
) -> Axes | None:
    """The axes of an item's tensor, in one of the forms that it may have; None for another."""
    if not at.own(reads):
        return (None,) * len(shape)
    m, n = len(at.batches), len(at.batches) + 1
    forms: dict[Reads, list[Axes]] = {
        "row": [(m,), (m, None)],
        "column": [(n,), (None, n)],
        "fragment": [(m, n)],
    }
    found = (_along(shape, own, extents) for own in forms[reads])
    return next((one for one in found if one is not None), None)


def _along(shape: Sequence[int], own: Axes, extents: Sequence[int]) -> Axes | None:
    """The axes of a tensor that has batches of D before its `own`; None where it does not fit."""
    leading, batches = len(shape) - len(own), len(extents) - 3
    if not 0 <= leading <= batches:
        return None
    axes = (*range(batches - leading, batches), *own)
    counts = zip(shape, axes, strict=True)
    fits = all(count in (1, 1 if axis is None else extents[axis]) for count, axis in counts)
    if not fits:
        return None
    return tuple(
        axis if axis is not None and count == extents[axis] else None
        for count, axis in zip(shape, axes, strict=True)
    )


def _split_axes(axes: _Axes, listed: Sequence[Item]) -> list[int]:
    """The axes of D that a call can be split along: not its columns, where a gate pairs them, nor
    rows, where one tensor has something for all of them.
    """
    columns = axes.k - 1
    gated = any(step_of(item).step in GATES for item in listed)
    of_rows = any(step_of(item).step in (RmsScale, Scatter) for item in listed)
    return [
        axis
        for axis in axes.shared()
        if not (gated and axis == columns) and not (of_rows and axis != columns)
    ]


# ---- Operators -----------------------------------------------------------------------------------


class _Split(NamedTuple):
    """How a, b and what items read lie, then outputs of steps, and D."""

    read: Placements
    stored: Placements
    d: Placement


def _splits(values: Sequence[Any], written: Mapping[str, torch.Tensor]) -> Iterator[_Split]:
    """Each way to share out a call: none, then by each dimension of D, then by k."""
    call = GemmCall.crossed(*values, **written)
    listed = call.listed
    read, whole = _read(listed), Replicate()
    stored = [item for kind in written for item in listed if item[0] == kind]
    yield _Split((whole,) * (2 + len(read)), (whole,) * len(stored), whole)
    if block_scales(call.a, call.b, listed) is not None:  # which no split of 128 follows
        return
    if listed and step_of(listed[-1]).step is StochasticRounding:  # parts would repeat numbers
        return
    asked = (map(_asked, group) for group in (read, stored))
    axes = _Axes.of(call.a.shape, call.b.shape, *map(list, asked))
    k = axes.k
    for axis in _split_axes(axes, listed):
        yield _Split(_places(axes.read, axis), _places(axes.stored, axis), split(range(k), axis))
    linear = all(step_of(item).step in (Scale, Bias, Residual) for item in listed)
    wide = cast("torch.dtype", call.out_dtype).itemsize > 1  # 8 bits would saturate
    if axes.extents[k] > 1 and linear and wide:
        added = (whole if step_of(item).step is Scale else Partial() for item in read)
        yield _Split((*_places(axes.read[:2], k), *added), (), Partial())


def _gemm(size: int, *given: Any) -> list[Rule]:
    return [Rule(one.read, (one.d,)) for one in _splits(given, {})]


def _gemm_outputs(size: int, *given: Any) -> list[Rule]:
    kinds, written, *gradients = given[_WIDTH:]
    into = [None for one in gradients if isinstance(one, torch.Tensor)]  # for the backward pass
    splits = _splits(given[:_WIDTH], dict(zip(kinds, written, strict=True)))
    return [Rule((*one.read, *one.stored, *into), (one.d, *one.stored)) for one in splits]


def _gemm_out(size: int, *given: Any, out: torch.Tensor, **written: torch.Tensor) -> list[Rule]:
    stored = {kind: one for kind, one in written.items() if one is not None}
    splits = _splits(given, stored)
    count = 1 + len(stored)
    return [Rule((*one.read, one.d, *one.stored), (), written=count) for one in splits]


register("gemm", _gemm)
register("gemm_outputs", _gemm_outputs)
register("gemm_out", _gemm_out)


# ---- Gradients -----------------------------------------------------------------------------------


@torch.no_grad()
def gradients(
    how: gradient_rule.Rule,
    numbers: tuple[float, ...],
    options: GradientOptions,
    dd: torch.Tensor,
    *kept: torch.Tensor,
) -> Sequence[torch.Tensor | None]:
    """What `gradient.gradients` returns, of distributed tensors."""
    into = options.accumulate_into
    whole = [torch.empty(one.shape, device="meta") for one in how.metadata]
    read = [_asked(item) for item in _read(how.listed(whole, numbers))]
    axes = _Axes.of(how.metadata[A].shape, how.metadata[B].shape, read, ())
    rules = list(_of_gradients(how, axes, accumulates=into is not None))
    layout = Layout.of([dd, *kept, *([] if into is None else [into])], lambda size: rules)
    local_dd, *local = layout.moved()
    if into is not None:
        options = options._replace(accumulate_into=local.pop())
    parts = zip(how.metadata, layout.outputs, strict=True)
    metadata = tuple(one._replace(shape=layout.part(one.shape, at)) for one, at in parts)
    found = gradient.gradients(replace(how, metadata=metadata), numbers, options, local_dd, *local)
    wholes = [_laid_out(*pair) for pair in zip(whole, how.metadata, strict=True)]
    results: Sequence[torch.Tensor | None] = layout.joined(found, wholes)
    return results


def _of_gradients(how: gradient_rule.Rule, axes: _Axes, *, accumulates: bool) -> Iterator[Rule]:
    """How dD lies, what is kept, and that which the gradient of B is added to; then gradients.

    Each is a sum over the axes that its tensor does not have.
    """
    written, stored = int(accumulates), how.way in ("save", "output")
    yield Rule.replicated(1 + len(how.kept) + stored + written, len(how.metadata), written)
    k = axes.k
    again = how.way in ("recompute", "composite")  # the products are needed themselves
    along_k = not again and None not in axes.read and axes.extents[k] > 1
    for axis in [*_split_axes(axes, how.items), *[k] * along_k]:
        places = _places(axes.read, axis)
        found = tuple(Partial() if axis < k and one.is_replicate() else one for one in places)
        kept = (places[place] for place in how.kept)
        of_d = split(range(k), axis)
        given = (of_d, *kept, *[of_d] * stored, *[found[B]] * written)
        yield Rule(given, found, written)


def _laid_out(whole: torch.Tensor, metadata: gradient_rule.Metadata) -> torch.Tensor:
    return whole.mT.contiguous().mT if metadata.column_major else whole
