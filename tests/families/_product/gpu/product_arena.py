"""Guarded tensors of products: views into rooms of 0xff bytes, which are NaN in every float type.

A kernel that reads beside an operand meets NaN (or -1), one that writes beside D is seen, and so is
an element of D that is never written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from rooms import Guarded

from warploom.generator.epilogue import (
    BLOCK,
    Activation,
    ActivationGradient,
    Amax,
    Bias,
    ColumnSum,
    EpilogueStep,
    Gate,
    GateGradient,
    MeanSquare,
    Preactivation,
    Quantize,
    Residual,
    RmsScale,
    Scale,
    Scatter,
    StochasticRounding,
    SwigluGate,
)
from warploom.runtime.elements import TORCH, unit_roundoff
from warploom.runtime.families._product.steps.gate import gate_item, kind_of
from warploom.runtime.families._product.steps.gate_gradient import (
    TorchGateGradient,
    gradient_kind,
)
from warploom.runtime.families._product.steps.quantize import inverses
from warploom.runtime.families._product.steps.rms import TorchMeanSquare, groups_of

Shape = tuple[int, ...]
Bound = tuple[torch.Tensor, torch.Tensor]  # what is right, and how far off each element may be

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def guarded(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    layout: str = "row",
    *,
    odd: bool = False,
    batches: tuple[int, ...] = (),
) -> Guarded:
    """Return an unfilled view [*batches, rows, columns], a row and 16 bytes of room on every side.

    Its base and pitch are multiples of 16 bytes, as TMA needs them; or neither, where `odd`.
    """
    if layout == "col":
        turned = guarded(columns, rows, dtype, odd=odd, batches=batches)
        return Guarded(turned.room, turned.view.mT, turned.inside)
    unit = 16 // dtype.itemsize
    left = 1 if odd else unit
    pitch = columns + 2 * left + 1 - columns % 2 if odd else columns + -columns % unit + 2 * unit
    size = (*batches, rows + 2, pitch)
    room = torch.full(size, -1, dtype=_INTEGERS[dtype.itemsize], device="cuda")
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    place = (..., slice(1, rows + 1), slice(left, left + columns))
    inside[place] = True
    return Guarded(room, room.view(dtype)[place], inside)


def fill(view: torch.Tensor, generator: torch.Generator, limit: int = 128) -> None:
    """Fill with random numbers: normal ones, or integers of [-limit, limit)."""
    if view.dtype == torch.int8:
        view.random_(-limit, limit, generator=generator)
    else:
        view.copy_(torch.randn(view.shape, generator=generator, device="cuda").to(view.dtype))


def item(
    step: EpilogueStep,
    m: int,
    n: int,
    *,
    odd: bool,
    generator: torch.Generator,
    batches: Shape = (),
    k: int = 0,
) -> tuple[Guarded | None, tuple[Any, ...]]:
    """Return what a step of the epilogue of D [*batches, m, n] is given: its tensor, if it has one,
    and its item. Nothing is aligned where it is `odd`. `k` is the depth of the product.
    """
    if isinstance(step, Amax):
        operand = guarded(1, 1, torch.float32, odd=odd)
        operand.view.zero_()
        return operand, ("amax", operand.view)
    if isinstance(step, ColumnSum):
        operand = guarded(1, n, torch.float32, odd=odd, batches=batches)
        return operand, ("column_sum", operand.view[..., 0, :])
    if isinstance(step, Quantize):
        rows = math.prod(batches) * m
        operand = guarded(-(-n // BLOCK), rows, torch.float32, odd=odd)
        kind = "quantize_pow2" if step.scale == "pow2" else "quantize"
        return operand, (kind, operand.view.mT)
    if isinstance(step, MeanSquare | RmsScale):
        of = n if isinstance(step, MeanSquare) else k
        operand = guarded(math.prod(batches) * m, groups_of(of), torch.float32, odd=odd)
        if isinstance(step, MeanSquare):
            return operand, ("mean_square", operand.view)
        operand.view.uniform_(0, 32 / max(of, 1), generator=generator)
        return operand, ("rms_scale", operand.view, 0.03)
    if isinstance(step, StochasticRounding):
        return None, ("stochastic_rounding", torch.tensor([17, 2**61 + 3], device="cuda"))
    if isinstance(step, Scatter):
        order = torch.randperm(m, generator=generator, device="cuda")
        return None, ("scatter", order.to(getattr(torch, step.index)))
    if isinstance(step, Gate):
        return None, (kind_of(step.layout), step.function)
    if isinstance(step, SwigluGate):
        return None, gate_item(step.function, step.layout, 0.75, 1.25)
    if isinstance(step, Activation):
        return None, ("activation", step.function)
    if isinstance(step, Scale) and step.by == "host":
        return None, ("scale", 0.37)
    dtype = torch.float32 if isinstance(step, Scale) else TORCH[step.element]
    if isinstance(step, Residual):
        operand = guarded(m, n, dtype, odd=odd, batches=batches)
        item: tuple[Any, ...] = ("residual", operand.view, -0.75)
    elif isinstance(step, Preactivation | ActivationGradient):
        operand = guarded(m, n, dtype, odd=odd, batches=batches)
        gradient = isinstance(step, ActivationGradient)
        item = (f"{step.function}_gradient" if gradient else "preactivation", operand.view)
    else:
        extent = {"device": 1, "row": m, "column": n}[step.by] if isinstance(step, Scale) else n
        batches = () if extent == 1 else batches
        operand = guarded(1, extent, dtype, odd=odd, batches=batches)
        kind = "bias" if isinstance(step, Bias) else f"scale_{step.by}".replace("_device", "")
        item = (kind, operand.view[..., 0, :])
    if isinstance(step, Scale):
        operand.view.uniform_(-1, 1, generator=generator)
    else:
        fill(operand.view, generator)
    return operand, item


def gate_gradient(
    step: GateGradient,
    m: int,
    n: int,
    *,
    odd: bool,
    generator: torch.Generator,
    batches: Shape = (),
) -> tuple[Guarded, Guarded, tuple[Any, ...]]:
    """Return z and dz of such a step of the epilogue of D [*batches, m, n], and its item."""
    z, dz = (guarded(m, 2 * n, TORCH[step.element], odd=odd, batches=batches) for _ in range(2))
    fill(z.view, generator)
    z.view.mul_(4)  # to where functions are 0 or z itself, and swiglu_oai's limits
    return z, dz, (gradient_kind(step.function, step.layout), z.view, dz.view)


def assert_within(d: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Assert that D is within the bound everywhere; say where it is not."""
    wrong = ~((d.double() - exact).abs() <= bound)
    if d.dtype == torch.float16:  # a value past its range is infinite
        past = exact.abs() > torch.finfo(d.dtype).max
        wrong &= ~(past & (d.double() == torch.copysign(torch.full_like(exact, torch.inf), exact)))
    if not wrong.any():
        return
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    raise AssertionError(
        f"{len(places)} of {d.numel()} elements of {list(d.shape)} are wrong, from "
        f"{places.amin(0).tolist()} to {places.amax(0).tolist()}; first {list(first)}: "
        f"{d[first].item()} is not {exact[first].item()} +- {bound[first].item()}"
    )


def assert_outputs(
    epilogue: Sequence[EpilogueStep],
    outputs: Sequence[Guarded],
    listed: Sequence[tuple[Any, ...]],
    bound: Callable[[Sequence[tuple[Any, ...]], torch.dtype], Bound],
) -> None:
    """Assert that each output of a step is that of what passes at its place, within its bound.

    `bound` tells what passes behind some of the items, in a type.
    """
    found = iter(outputs)
    for index, (step, given) in enumerate(zip(epilogue, listed, strict=True)):
        if not step.auxiliary:
            continue
        assert next(found).untouched_outside()
        stored = given[-1]
        if isinstance(step, GateGradient | MeanSquare):  # which stores something else
            exact, error = bound(listed[:index], torch.float32)
            one = TorchMeanSquare() if isinstance(step, MeanSquare) else TorchGateGradient()
            exact, error = one.written_bound(exact, error, given)
            error = error + unit_roundoff(stored.dtype) * (
                exact.abs() + error + torch.finfo(stored.dtype).tiny
            )
            assert_within(stored, exact.reshape(stored.shape), error.reshape(stored.shape))
            continue
        exact, error = bound(listed[:index], stored.dtype)
        if isinstance(step, Preactivation):
            assert_within(stored, exact.reshape(stored.shape), error.reshape(stored.shape))
        elif isinstance(step, Quantize):
            assert_scales(stored, exact, error, given[0])
        elif isinstance(step, ColumnSum):
            assert_within(stored, *column_sums(exact, error, stored))
        elif exact.numel():
            off = (stored.double() - exact.abs().max()).abs()
            assert (off <= error.max()).all(), f"amax {stored.item()}, not {exact.abs().max()}"


def assert_scales(
    scales: torch.Tensor, exact: torch.Tensor, error: torch.Tensor, kind: str
) -> None:
    """Assert that each is that of a largest magnitude within its bound."""
    exact, error = (t.reshape(-1, t.shape[-1]) for t in (exact, error))
    error = error + 2**-21 * exact.abs()  # a power of two flips by as much as a division is off
    low = 1 / inverses((exact.abs() - error).clamp(min=0), kind)
    high = 1 / inverses(exact.abs() + error, kind)
    zeros = low > high  # what may be zeros has any scale up to the highest, or that of zeros, 1
    low = torch.where(zeros, 0, low)
    within = (scales >= low * (1 - 2**-21)) & (scales <= high * (1 + 2**-21))
    assert (within | (zeros & (scales == 1))).all()


def column_sums(exact: torch.Tensor, bound: torch.Tensor, sums: torch.Tensor) -> Bound:
    """Sums over the rows of values [.., m, n] within a bound each, and within what of them; `sums`
    are to be of all rows, or of each batch's where they have more than one vector.

    No sum has more additions behind each other than those of a group of 16 rows, of every 32nd
    group, and of 32 of these.
    """
    if sums.dim() == 1:
        exact, bound = (t.reshape(-1, t.shape[-1]) for t in (exact, bound))
    additions = 16 + exact.shape[-2] / (8 * 32) + 32
    error = bound.sum(-2) + 2.0**-24 * additions * (exact.abs() + bound).sum(-2)
    return exact.sum(-2).reshape(sums.shape), error.reshape(sums.shape)


def clear(epilogue: Sequence[EpilogueStep], outputs: Sequence[Guarded]) -> None:
    """Make an amax 0, which it is raised from; and what else is stored NaN."""
    found = iter(outputs)
    for step in epilogue:
        if step.auxiliary:
            output = next(found)
            output.view.zero_() if isinstance(step, Amax) else output.room.fill_(-1)
