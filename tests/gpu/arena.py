"""Calls on guarded tensors: views into rooms of 0xff bytes, which are NaN in every float type.

A kernel that reads beside an operand meets NaN (or -1), one that writes beside D is seen, and so is
an element of D that is never written. `verify` is the check that most tests make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import cases
import torch

import warploom
from warploom.generator.epilogue import Activation, Bias, EpilogueStep, Residual, Scale
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime import reference
from warploom.runtime.elements import TORCH

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Guarded:
    """A view, the room of 0xff bytes that it lies in, and where in the room it is."""

    room: torch.Tensor  # integers of the view's size
    view: torch.Tensor
    inside: torch.Tensor  # of the room's shape: True for the view's elements

    def untouched_outside(self) -> bool:
        """Whether every byte beside the view is as it was made."""
        return bool((self.room[~self.inside] == -1).all())


def guarded(
    rows: int, columns: int, dtype: torch.dtype, layout: str = "row", *, odd: bool = False
) -> Guarded:
    """Return an unfilled view [rows, columns] with a row and 16 bytes of room on every side.

    Its base and pitch are multiples of 16 bytes, as TMA needs them; or neither, where `odd`.
    """
    if layout == "col":
        turned = guarded(columns, rows, dtype, odd=odd)
        return Guarded(turned.room, turned.view.mT, turned.inside)
    unit = 16 // dtype.itemsize
    left = 1 if odd else unit
    pitch = columns + 2 * left + 1 - columns % 2 if odd else columns + -columns % unit + 2 * unit
    room = torch.full((rows + 2, pitch), -1, dtype=_INTEGERS[dtype.itemsize], device="cuda")
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    inside[1 : rows + 1, left : left + columns] = True
    return Guarded(room, room.view(dtype)[1 : rows + 1, left : left + columns], inside)


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
    operands: list[Guarded]  # of the epilogue
    listed: list[tuple[Any, ...]]

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        arguments = {"out": self.d.view, "epilogue": self.listed, "spec": self.spec}
        return warploom.gemm(self.a.view, self.b.view, **arguments)


def call(spec: KernelSpec, m: int, n: int, k: int, *, seed: int = 0) -> Call:
    """Make a call of `spec` on fresh random data; where it stores directly, nothing is aligned."""
    generator = torch.Generator("cuda").manual_seed(seed)
    operation = cast("GemmOperation", spec.operation)
    odd = not cases.stored_by_tma(spec)
    a = guarded(m, k, TORCH[operation.a], operation.layout_a)
    b = guarded(k, n, TORCH[operation.b], operation.layout_b)
    for operand in (a, b):  # products of int8 must stay in the range of fp16
        fill(operand.view, generator, limit=8 if operation.d == "fp16" else 128)
    operands, listed = [], []
    for step in operation.epilogue:
        operand, item = _item(step, m, n, odd=odd, generator=generator)
        listed.append(item)
        operands += [operand] if operand else []
    return Call(spec, a, b, guarded(m, n, TORCH[operation.d], odd=odd), operands, listed)


def _item(
    step: EpilogueStep, m: int, n: int, *, odd: bool, generator: torch.Generator
) -> tuple[Guarded | None, tuple[Any, ...]]:
    if isinstance(step, Activation):
        return None, ("activation", step.function)
    if isinstance(step, Scale) and step.by == "host":
        return None, ("scale", 0.37)
    dtype = torch.float32 if isinstance(step, Scale) else TORCH[step.element]
    if isinstance(step, Residual):
        operand = guarded(m, n, dtype, odd=odd)
        item: tuple[Any, ...] = ("residual", operand.view, -0.75)
    else:
        extent = {"device": 1, "row": m, "column": n}[step.by] if isinstance(step, Scale) else n
        operand = guarded(1, extent, dtype, odd=odd)
        kind = "bias" if isinstance(step, Bias) else f"scale_{step.by}".replace("_device", "")
        item = (kind, operand.view[0])
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
    row, column = places[0].tolist()
    raise AssertionError(
        f"{len(places)} of {d.numel()} elements of {list(d.shape)} are wrong, rows "
        f"{places[:, 0].min()}..{places[:, 0].max()}, columns {places[:, 1].min()}.."
        f"{places[:, 1].max()}; first [{row}, {column}]: {d[row, column].item()} is not "
        f"{exact[row, column].item()} +- {bound[row, column].item()}"
    )


def verify(made: Call) -> torch.Tensor:
    """Run a call; assert D within its bound, nothing else written, no operand changed or copied."""
    given = [made.a, made.b, *made.operands]
    before = [operand.room.clone() for operand in given]
    copies = warploom.counters.copies
    d = made.run()
    assert d is made.d.view
    bound = reference.gemm_bound(made.a.view, made.b.view, made.listed, d.dtype)
    assert_within(d, *bound)
    assert made.d.untouched_outside()
    assert all(torch.equal(now.room, then) for now, then in zip(given, before, strict=True))
    assert warploom.counters.copies == copies
    return d
