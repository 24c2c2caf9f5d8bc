"""Calls of products on guarded tensors (product_arena.py); `verify` is what most tests do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import gemm_cases as cases
import product_arena
import torch
from product_arena import Bound, Shape, assert_within, fill, guarded, item
from rooms import Guarded

import warploom
from warploom.generator.epilogue import (
    GATES,
    GateGradient,
    MeanSquare,
    Preactivation,
    RmsScale,
    columns,
)
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.steps.gate_gradient import TorchGateGradient
from warploom.runtime.families.gemm import reference
from warploom.runtime.families.gemm.tf32 import Tf32Call, rounded_to_tf32
from warploom.runtime.plan import run


@dataclass
class Call:
    """Everything that one call of a kernel is given."""

    spec: KernelSpec
    a: Guarded
    b: Guarded
    d: Guarded
    operands: list[Guarded]  # that the epilogue reads
    outputs: list[Guarded]  # of its steps
    listed: list[tuple[Any, ...]]  # without block scales
    scales: list[tuple[Any, ...]]

    @property
    def items(self) -> list[tuple[Any, ...]]:
        """All items of the call, block scales first."""
        return [*self.scales, *self.listed]

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        if self.spec.operation.a == "tf32":  # type: ignore[attr-defined]
            dtype = self.d.view.dtype
            one = Tf32Call(self.a.view, self.b.view, self.items, self.d.view, dtype, spec=self.spec)
            return run(one)
        arguments = {"out": self.d.view, "epilogue": self.items, "spec": self.spec}
        return warploom.gemm(self.a.view, self.b.view, **arguments)


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
    storing = (Preactivation, GateGradient)
    stored = {step.element for step in operation.epilogue if isinstance(step, storing)}
    small = {operation.d, *stored} & {"fp16", "int8", "e4m3", "e5m2"}  # int8 must stay in range
    for operand in (a, b):
        fill(operand.view, generator, limit=8 if small else 128)
    shared = tuple(torch.broadcast_shapes(*batches))
    of_d = columns(operation.epilogue, n)
    d = guarded(m, of_d, TORCH[operation.d], odd=odd, batches=shared)
    made = Call(spec, a, b, d, [], [], [], [])
    if operation.block_scales != "none":
        for operand, rows, own in (("a", m, batches[0]), ("b", n, batches[1])):
            scale = block_scale(operation, operand, (rows, k), own, seed, generator)
            made.operands.append(scale)
            made.scales.append((f"scale_{operand}", scale.view))
    for index, step in enumerate(operation.epilogue):
        whole = isinstance(step, Preactivation | MeanSquare | RmsScale)
        own = shared if index % 2 == 0 or whole else ()
        if isinstance(step, GateGradient):
            z, dz, given = product_arena.gate_gradient(
                step, m, n, odd=odd, generator=generator, batches=shared
            )
            made.operands.append(z)
            made.outputs.append(dz)
            made.listed.append(given)
            continue
        operand, given = item(step, m, n, odd=odd, generator=generator, batches=own, k=k)
        made.listed.append(given)
        if operand is not None:
            (made.outputs if step.auxiliary else made.operands).append(operand)
        n = step.columns(n)
    _keep_in_range(made)
    return made


def _keep_in_range(made: Call) -> None:
    """Make columns of A 0 until all that is stored in fp16 fits: a gate multiplies two sums."""
    operation = cast("GemmOperation", made.spec.operation)
    steps = operation.epilogue
    first = next(
        (i for i, one in enumerate(steps) if isinstance(one, (*GATES, GateGradient))), None
    )
    if first is None:
        return
    stored = [made.listed] if operation.d == "fp16" else []
    stored += [
        made.listed[: index + 1 if isinstance(one, GateGradient) else index]
        for index, one in enumerate(steps)
        if isinstance(one, Preactivation | GateGradient) and one.element == "fp16"
    ]
    left = made.a.view.shape[-1]
    while stored and left > 1 and not all(_fits_fp16(made, listed) for listed in stored):
        left //= 2
        made.a.view[..., left:].zero_()


def _fits_fp16(made: Call, listed: Sequence[tuple[Any, ...]]) -> bool:
    """Whether what passes behind some items is in fp16's range, and what the last stores of it."""
    most = torch.finfo(torch.float16).max / 2
    if listed and "_gate_gradient" in listed[-1][0]:
        before, error = bound(made, listed[:-1], torch.float32)
        dz, _ = TorchGateGradient().written_bound(before, error, listed[-1])
        if dz.numel() and not bool(dz.abs().max() < most):
            return False
    exact, _ = bound(made, listed, torch.float32)
    return not exact.numel() or bool(exact.abs().max() < most)


def block_scale(
    operation: GemmOperation,
    operand: str,
    extents: tuple[int, int],
    batches: Shape,
    seed: int,
    generator: torch.Generator,
) -> Guarded:
    """Return random block scales of an operand [rows, k], most of them unlike their neighbours.

    Rows or columns are contiguous, by two bits of the seed: columns of both where these are 0,
    which TMA loads where rows begin at 16 bytes, as with seed 0, and not anywhere. They span 2^-6
    to 2^6, or 2^-2 to 2^2 where D is fp16.
    """
    rows, k = extents
    each = operation.scale_rows(operand)  # type: ignore[arg-type]
    kind = operation.block_scale_a if operand == "a" else operation.block_scale_b
    dtype = torch.float32 if kind == "fp32" else torch.float8_e8m0fnu
    layout = "row" if seed >> (operand == "b") & 1 else "col"
    made = guarded(
        -(-rows // each), -(-k // 128), dtype, layout, odd=seed % 3 != 0, batches=batches
    )
    most = 2 if operation.d == "fp16" else 6
    exponents = torch.empty(made.view.shape, device="cuda")
    scales = exponents.uniform_(-most, most, generator=generator).exp2().to(dtype)
    same = torch.int32 if kind == "fp32" else torch.uint8
    made.view.view(same).copy_(scales.view(same))
    return made


def bound(made: Call, listed: Sequence[tuple[Any, ...]], dtype: torch.dtype) -> Bound:
    """What passes behind some items of a call, in a type, and how far off it may be."""
    operation, items = cast("GemmOperation", made.spec.operation), [*made.scales, *listed]
    a, b = made.a.view, made.b.view
    if operation.a == "tf32":  # as TMA rounds them
        a, b = rounded_to_tf32(a), rounded_to_tf32(b)
    found: Bound = reference.gemm_bound(a, b, items, dtype, operation.accumulation)
    return found


def clear(made: Call) -> None:
    """Make an amax 0, which it is raised from; and what else is stored NaN."""
    product_arena.clear(cast("GemmOperation", made.spec.operation).epilogue, made.outputs)


def verify(made: Call) -> torch.Tensor:
    """Run a call; assert D within its bound, nothing else written, no operand changed or copied."""
    given = [made.a, made.b, *made.operands]
    before = [operand.room.clone() for operand in given]
    copies = warploom.counters.copies
    clear(made)
    d = made.run()
    assert d is made.d.view
    exact, error = bound(made, made.listed, d.dtype)
    assert_within(d, exact.reshape(d.shape), error.reshape(d.shape))
    epilogue = cast("GemmOperation", made.spec.operation).epilogue
    product_arena.assert_outputs(epilogue, made.outputs, made.listed, partial(bound, made))
    assert made.d.untouched_outside()
    assert all(torch.equal(now.room, then) for now, then in zip(given, before, strict=True))
    assert warploom.counters.copies == copies
    return d
