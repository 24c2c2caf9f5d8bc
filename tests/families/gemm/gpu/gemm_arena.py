"""Calls on guarded tensors: views into rooms of 0xff bytes, which are NaN in every float type.

A kernel that reads beside an operand meets NaN (or -1), one that writes beside D is seen, and so is
an element of D that is never written. `verify` is the check that most tests make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import gemm_cases as cases
import torch
from rooms import Guarded

import warploom
from warploom.generator.epilogue import (
    Activation,
    ActivationGradient,
    Amax,
    Bias,
    ColumnSum,
    EpilogueStep,
    Preactivation,
    Residual,
    Scale,
)
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families.gemm import reference

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


@dataclass
class Call:
    """Everything that one call of a kernel is given."""

    spec: KernelSpec
    a: Guarded
    b: Guarded
    d: Guarded
    operands: list[Guarded]  # that the epilogue reads
    outputs: list[Guarded]  # of its steps
    listed: list[tuple[Any, ...]]

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        arguments = {"out": self.d.view, "epilogue": self.listed, "spec": self.spec}
        return warploom.gemm(self.a.view, self.b.view, **arguments)


Shape = tuple[int, ...]


def call(
    spec: KernelSpec,
    m: int,
    n: int,
    k: int,
    *,
    seed: int = 0,
    batches: tuple[Shape, Shape] = ((), ()),
) -> Call:
    """Make a call of `spec` on fresh random data; where it stores directly, nothing is aligned.

    `batches` are those of A and of B; the epilogue's operands have D's, or none, by turns.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    operation = cast("GemmOperation", spec.operation)
    odd = not cases.stored_by_tma(spec)
    a = guarded(m, k, TORCH[operation.a], operation.layout_a, batches=batches[0])
    b = guarded(k, n, TORCH[operation.b], operation.layout_b, batches=batches[1])
    stored = {step.element for step in operation.epilogue if isinstance(step, Preactivation)}
    small = {operation.d, *stored} & {"fp16", "int8", "e4m3", "e5m2"}  # int8 must stay in range
    for operand in (a, b):
        fill(operand.view, generator, limit=8 if small else 128)
    shared = tuple(torch.broadcast_shapes(*batches))
    made = Call(spec, a, b, guarded(m, n, TORCH[operation.d], odd=odd, batches=shared), [], [], [])
    for index, step in enumerate(operation.epilogue):
        own = shared if index % 2 == 0 or isinstance(step, Preactivation) else ()
        operand, item = _item(step, m, n, odd=odd, generator=generator, batches=own)
        made.listed.append(item)
        if operand is not None:
            (made.outputs if step.auxiliary else made.operands).append(operand)
    return made


def _item(
    step: EpilogueStep,
    m: int,
    n: int,
    *,
    odd: bool,
    generator: torch.Generator,
    batches: Shape,
) -> tuple[Guarded | None, tuple[Any, ...]]:
    if isinstance(step, Amax):
        operand = guarded(1, 1, torch.float32, odd=odd)
        operand.view.zero_()
        return operand, ("amax", operand.view)
    if isinstance(step, ColumnSum):
        operand = guarded(1, n, torch.float32, odd=odd, batches=batches)
        return operand, ("column_sum", operand.view[..., 0, :])
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


def assert_within(d: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Assert that D is within the bound everywhere; say where it is not."""
    wrong = ~((d.double() - exact).abs() <= bound)
    if not wrong.any():
        return
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    raise AssertionError(
        f"{len(places)} of {d.numel()} elements of {list(d.shape)} are wrong, from "
        f"{places.amin(0).tolist()} to {places.amax(0).tolist()}; first {list(first)}: "
        f"{d[first].item()} is not {exact[first].item()} +- {bound[first].item()}"
    )


def assert_outputs(made: Call) -> None:
    """Assert that each output of a step is that of what passes at its place, within its bound."""
    found = iter(made.outputs)
    operation = cast("GemmOperation", made.spec.operation)
    for index, (step, item) in enumerate(zip(operation.epilogue, made.listed, strict=True)):
        if not step.auxiliary:
            continue
        output, before = next(found), made.listed[:index]
        dtype = item[1].dtype
        exact, bound = reference.gemm_bound(
            made.a.view, made.b.view, before, dtype, operation.accumulation
        )
        assert output.untouched_outside()
        if isinstance(step, Preactivation):
            assert_within(item[1], exact.reshape(item[1].shape), bound.reshape(item[1].shape))
        elif isinstance(step, ColumnSum):
            assert_within(item[1], *column_sums(exact, bound, item[1]))
        elif exact.numel():
            error = (item[1].double() - exact.abs().max()).abs()
            assert (error <= bound.max()).all(), f"amax {item[1].item()}, not {exact.abs().max()}"


def column_sums(
    exact: torch.Tensor, bound: torch.Tensor, sums: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
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


def clear(made: Call) -> None:
    """Make an amax 0, which it is raised from; and what else is stored NaN."""
    outputs = iter(made.outputs)
    operation = cast("GemmOperation", made.spec.operation)
    for step in operation.epilogue:
        if step.auxiliary:
            output = next(outputs)
            output.view.zero_() if isinstance(step, Amax) else output.room.fill_(-1)


def verify(made: Call) -> torch.Tensor:
    """Run a call; assert D within its bound, nothing else written, no operand changed or copied."""
    given = [made.a, made.b, *made.operands]
    before = [operand.room.clone() for operand in given]
    copies = warploom.counters.copies
    clear(made)
    d = made.run()
    assert d is made.d.view
    accumulation = cast("GemmOperation", made.spec.operation).accumulation
    exact, bound = reference.gemm_bound(
        made.a.view, made.b.view, made.listed, d.dtype, accumulation
    )
    assert_within(d, exact.reshape(d.shape), bound.reshape(d.shape))
    assert_outputs(made)
    assert made.d.untouched_outside()
    assert all(torch.equal(now.room, then) for now, then in zip(given, before, strict=True))
    assert warploom.counters.copies == copies
    return d
