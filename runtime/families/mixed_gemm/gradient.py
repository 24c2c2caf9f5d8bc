"""A product with a packed weight as autograd sees it: it is differentiable once, but not in W.

The gradient of A is a product, by torch, with the weight that a kernel dequantizes to 16 bits.
Gradients of what the epilogue reads are torch's own of the reference's steps, on sums that are
computed again where they are not only added to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from warploom.quantization import Metadata, PackedWeight
from warploom.runtime.families._product.epilogue import ITEMS
from warploom.runtime.families._product.reference import apply
from warploom.runtime.families._product.steps import flatten, unflatten
from warploom.runtime.families._product.steps.step import Given, Item
from warploom.runtime.families.dequantize.api import dequantize
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.function import WarmCalls
from warploom.runtime.plan import Plan

_ADDED = {"bias", "residual"}  # items that need nothing of what they are added to

Found = tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """What the backward pass knows of a call beside tensors, which are saved."""

    metadata: Metadata
    names: tuple[str, ...]  # of the weight's tensors
    words: tuple[str, ...]  # of the items, and their numbers
    numbers: tuple[float, ...]
    needed: tuple[bool, ...]  # of a, then of the items' tensors
    of_a: torch.dtype

    @property
    def recomputed(self) -> bool:
        """Whether sums are computed again, of a."""
        return not _ADDED.issuperset(self.words)

    @property
    def computed(self) -> torch.dtype:
        """The type in which the gradient of a is multiplied."""
        return self.of_a if self.of_a.itemsize == 2 else torch.bfloat16


def run(plan: Plan[Any, torch.Tensor], call: MixedGemmCall) -> torch.Tensor:
    """Run a planned call that a gradient is wanted of, so that autograd can differentiate it.

    Raises ProblemError for what autograd would have to know of, and for a weight that requires
    grad.
    """
    call.refuse()
    read = call.a, *flatten(call.listed).tensors
    result: torch.Tensor = _MixedGemm.apply(call, plan, *read)  # type: ignore[no-untyped-call]
    return result


def keep_warm(
    warm: WarmCalls[torch.Tensor],
    values: tuple[Any, ...],
    call: MixedGemmCall,
    plan: Plan[Any, torch.Tensor],
    d: torch.Tensor,
) -> None:
    """Keep what is known of a call that `run` ran, for others like it."""
    items = [item for item in call.listed if isinstance(item[1], torch.Tensor)]
    names = ["a", *[item[0] for item in items]]
    numbers = ITEMS.numbered(call.listed)
    if not warm.places.keys() >= {*names, *numbers}:
        return  # items of kinds that no argument is called by
    read = (call.a, *[item[1] for item in items])
    needed = tuple(one.requires_grad for one in read)
    how = differentiated(call.weight, call.listed, call.a.dtype, needed)
    of_weight = _taking(warm, [f"weight.{name}" for name in call.weight.tensors()])
    tensors, counted = _taking(warm, names), _taking(warm, numbers)

    def derive(pool: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
        own = replace(how, numbers=counted(pool)) if numbers else how
        derived: torch.Tensor = _apply_made(own, (result,), of_weight(pool), *tensors(pool))
        return derived

    warm.keep(values, call, plan, d, derive)


def _taking(
    warm: WarmCalls[torch.Tensor], names: Sequence[str]
) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    places = [warm.places[name] for name in names]
    return lambda pool: tuple([pool[place] for place in places])


class _Made(torch.autograd.Function):
    """D that was computed, differentiable in what was read but the weight."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        how: Differentiated,
        made: tuple[torch.Tensor],
        weight: tuple[torch.Tensor, ...],
        *read: torch.Tensor,
    ) -> torch.Tensor:
        save(ctx, how, weight, read)
        return made[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dd: torch.Tensor | None) -> Found:  # noqa: ANN401
        """Return the gradients that are wanted."""
        return None, None, None, *gradients(ctx, dd)


# Function.apply itself only adds what torch.func asks for, whose tensors do not come here.
_apply_made: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Made).apply


class _MixedGemm(torch.autograd.Function):
    """D of a call, differentiable in what it reads but the weight."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        call: MixedGemmCall,
        plan: Plan[Any, torch.Tensor],
        *read: torch.Tensor,
    ) -> torch.Tensor:
        keep(ctx, call.weight, call.listed, read, ctx.needs_input_grad[2:])
        return plan.run(call)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dd: torch.Tensor | None) -> Found:  # noqa: ANN401
        """Return the gradients that are wanted."""
        return None, None, *gradients(ctx, dd)


def keep(
    ctx: Any,  # noqa: ANN401
    weight: PackedWeight,
    listed: Sequence[Item],
    read: Sequence[torch.Tensor],
    needed: Sequence[bool],
) -> None:
    """Save what the gradients of a call need; `read` are a and the items' tensors."""
    how = differentiated(weight, listed, read[0].dtype, needed)
    save(ctx, how, weight.tensors().values(), read)


def differentiated(
    weight: PackedWeight, listed: Sequence[Item], dtype: torch.dtype, needed: Sequence[bool]
) -> Differentiated:
    """Return how a call with an a of this type is differentiated in what is `needed`."""
    flat = flatten(listed)
    return Differentiated(
        metadata=weight.metadata,
        names=tuple(weight.tensors()),
        words=tuple(flat.words),
        numbers=tuple(flat.numbers),
        needed=tuple(needed),
        of_a=dtype,
    )


def save(
    ctx: Any,  # noqa: ANN401
    how: Differentiated,
    weight: Iterable[torch.Tensor],
    read: Sequence[torch.Tensor],
) -> None:
    """Save the weight's tensors, and of a and the items' tensors what is read again."""
    ctx.set_materialize_grads(False)
    ctx.how = how
    a = read[:1] if how.recomputed else ()
    ctx.save_for_backward(*weight, *read[1:], *a)


def gradients(ctx: Any, dd: torch.Tensor | None) -> Found:  # noqa: ANN401
    """Return the gradients of a and of the items' tensors, None where none is wanted."""
    how: Differentiated = ctx.how
    if dd is None:
        return (None,) * len(how.needed)
    saved = ctx.saved_tensors  # once: activation checkpointing refuses a second time
    parts, read = saved[: len(how.names)], saved[len(how.names) :]
    weight = PackedWeight(metadata=how.metadata, **dict(zip(how.names, parts, strict=True)))
    with torch.autocast(dd.device.type, enabled=False):
        w = dequantize(weight, how.computed) if how.needed[0] or how.recomputed else None
        x = torch.zeros((), device=dd.device).expand(dd.shape)
        if how.recomputed and w is not None:
            *read, a = read
            x = torch.matmul(a.to(how.computed), w.mT).float()
        dx, found = _passed(how, x, read, dd.float())
        if not how.needed[0] or w is None or dx is None:
            return (None, *found)
        return (torch.matmul(dx.to(how.computed), w).to(how.of_a), *found)


def _passed(
    how: Differentiated, x: torch.Tensor, read: Sequence[torch.Tensor], dd: torch.Tensor
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """The gradient of sums x, and those of the items' tensors."""
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        given = [
            one.detach().requires_grad_(wanted)
            for one, wanted in zip(read, how.needed[1:], strict=True)
        ]
        d = apply(x, unflatten(how.words, Given(iter(given), iter(how.numbers), {})))
    wanted = [one for one in given if one.requires_grad]
    dx, *others = torch.autograd.grad(d, [x, *wanted], dd, allow_unused=True)
    rest = iter(others)
    return dx, [next(rest) if one.requires_grad else None for one in given]
