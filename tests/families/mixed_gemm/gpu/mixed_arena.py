"""Calls with packed weights on guarded tensors (product_arena.py); `verify` is what most tests do.

A weight's tensors have rooms of their own, which begin at 16 bytes and at no more: scales beside
it are NaN.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, cast

import mixed_cases as cases
import product_arena
import torch
from product_arena import Bound, assert_within, fill, guarded, item
from rooms import Guarded

import warploom
from warploom.generator.epilogue import Preactivation, columns
from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmSchedule
from warploom.generator.specification import KernelSpec
from warploom.quantization import Metadata, PackedWeight
from warploom.quantization.codes import numbers
from warploom.runtime.elements import TORCH
from warploom.runtime.families.mixed_gemm import reference

FRONT, BEHIND = 16, 8192  # bytes of 0xff around a weight's tensor
PAUSE_CYCLES = (
    2_000_000  # of a kernel that only waits: a millisecond, in which a host launches many
)


@dataclass(frozen=True)
class Weight:
    """A packed weight, and the rooms that its tensors lie in."""

    packed: PackedWeight
    rooms: tuple[torch.Tensor, ...]


def weight(operation: MixedGemmOperation, n: int, k: int, seed: int = 0) -> Weight:
    """A guarded weight [n, k] of random numbers of an operation: every code there is, scales of
    either sign, each group with others. Who asks again gets the same: nobody changes it.
    """
    group, activations = operation.group or None, operation.activations
    metadata = Metadata(operation.b, group, operation.scale, activations, n, k)
    return _weight(metadata, seed)


@lru_cache(maxsize=32)
def _weight(metadata: Metadata, seed: int) -> Weight:
    packed = draw(metadata, torch.Generator("cuda").manual_seed(seed + metadata.n + metadata.k))
    rooms, inside = [], {}
    for name, tensor in packed.tensors().items():
        size = tensor.numel() * tensor.element_size()
        room = torch.full((FRONT + size + BEHIND,), -1, dtype=torch.int8, device="cuda")
        inside[name] = room[FRONT : FRONT + size].view(tensor.dtype).view(tensor.shape)
        inside[name].copy_(tensor)
        rooms.append(room)
    return Weight(PackedWeight.from_tensors(inside, metadata), tuple(rooms))


def draw(metadata: Metadata, generator: torch.Generator) -> PackedWeight:
    """A weight of about 1, its first rows with all codes one after the other."""
    row, extents, device = metadata.slab.row, (metadata.n, metadata.groups), generator.device

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        drawn = {"generator": generator, "device": device, "dtype": torch.int16}
        return torch.randint(low, high + 1, size, **drawn)

    shape = (metadata.n, metadata.k)
    codes = integers(row.lowest, row.highest, *shape)
    if row.nans:  # of a float: bits at random would be of any size
        normal = torch.randn(shape, generator=generator, device=device).to(torch.float8_e4m3fn)
        codes = normal.view(torch.uint8).to(torch.int16)
    every = [code for code in range(row.lowest, row.highest + 1) if code not in row.nans]
    first = codes.view(-1)[: len(every)]
    first.copy_(torch.tensor(every[: first.numel()]))
    codes = codes.to(torch.uint8 if row.lowest == 0 else torch.int8)
    if row.nans:
        codes = codes.view(torch.float8_e4m3fn)
    zeros = None if row.highest_zero is None else integers(0, row.highest_zero, *extents)
    if metadata.scale == "e8m0":
        top = 128 if metadata.format == "mxfp4" else 126  # the largest that kernels take
        scales = integers(top - 4, top, *extents).to(torch.uint8)
    else:
        values = numbers(codes.flatten()[-4096:], row, torch.float64)
        usual = float(values.square().mean().sqrt()) or 1.0
        drawn = torch.rand(extents, generator=generator, device=device) + 0.5
        scales = (drawn * (1 - 2 * integers(0, 1, *extents)) / usual).to(metadata.scale_dtype)
    return PackedWeight.from_codes(
        codes,
        scales,
        zeros,
        format=metadata.format,
        group=metadata.group,
        activations=metadata.activations,
        global_scale=torch.rand(metadata.n, generator=generator, device=device) + 0.5
        if row.scaled_twice
        else None,
    )


@dataclass
class Call:
    """Everything that one call of a kernel is given."""

    spec: KernelSpec
    a: Guarded
    weight: Weight
    d: Guarded
    operands: list[Guarded]  # that the epilogue reads
    outputs: list[Guarded]  # of its steps
    listed: list[tuple[Any, ...]]

    @property
    def operation(self) -> MixedGemmOperation:
        """What is computed."""
        return cast("MixedGemmOperation", self.spec.operation)

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        arguments = {"out": self.d.view, "epilogue": self.listed, "spec": self.spec}
        return warploom.mixed_gemm(self.a.view, self.weight.packed, **arguments)

    def rows(self, m: int) -> torch.Tensor:
        """Run the kernel on the first rows alone, with no epilogue, and return what was D."""
        self.d.room.fill_(-1)
        d = self.d.view[:m]
        return warploom.mixed_gemm(self.a.view[:m], self.weight.packed, out=d, spec=self.spec)


def call(spec: KernelSpec, m: int, n: int, k: int, *, seed: int = 0) -> Call:
    """Make a call of `spec` on random data; where it stores directly, D is aligned to nothing."""
    generator = torch.Generator("cuda").manual_seed(seed)
    operation = cast("MixedGemmOperation", spec.operation)
    odd = not cases.stored_by_tma(spec)
    a = guarded(m, k, TORCH[operation.a])
    stored = {step.element for step in operation.epilogue if isinstance(step, Preactivation)}
    small = {operation.d, *stored} & {"fp16", "int8", "e4m3", "e5m2"}
    fill(a.view, generator, limit=8 if small else 128)
    d = guarded(m, columns(operation.epilogue, n), TORCH[operation.d], odd=odd)
    made = Call(spec, a, weight(operation, n, k, seed), d, [], [], [])
    for step in operation.epilogue:
        operand, given = item(step, m, n, odd=odd, generator=generator, k=k)
        made.listed.append(given)
        if operand is not None:
            (made.outputs if step.auxiliary else made.operands).append(operand)
        n = step.columns(n)
    return made


def bound(made: Call, listed: Sequence[tuple[Any, ...]], dtype: torch.dtype) -> Bound:
    """What passes behind some items of a call, in a type, and how far off it may be: by the way in
    which this kernel scales.
    """
    scaled = cast("MixedGemmSchedule", made.spec.schedule).scaled
    return reference.bound(made.a.view, made.weight.packed, listed, dtype, scaled)


def assert_right(made: Call) -> None:
    """Assert that D, which some launch wrote, is that of the operands."""
    assert_within(made.d.view, *bound(made, made.listed, made.d.view.dtype))


def verify(made: Call) -> torch.Tensor:
    """Run a call; assert D within its bound, nothing else written, no operand changed or copied."""
    given = [*(one.room for one in (made.a, *made.operands)), *made.weight.rooms]
    before = [room.clone() for room in given]
    copies = warploom.counters.copies
    product_arena.clear(made.operation.epilogue, made.outputs)
    d = made.run()
    assert d is made.d.view
    assert_right(made)
    product_arena.assert_outputs(
        made.operation.epilogue, made.outputs, made.listed, partial(bound, made)
    )
    assert made.d.untouched_outside()
    assert all(map(torch.equal, given, before))
    assert warploom.counters.copies == copies
    return d


# ---- Launches behind each other, each of which reads what the one before writes ------------------


@dataclass
class Chain:
    """Products by one square weight, each of the result of the one before; all follow a pause, so
    that none waits for the host.
    """

    spec: KernelSpec
    weight: Weight
    values: list[torch.Tensor]  # what is multiplied first, then each result

    def run(self) -> list[torch.Tensor]:
        """Run all, into results full of NaN, and return them."""
        for value in self.values[1:]:
            value.fill_(torch.nan)
        torch.cuda._sleep(PAUSE_CYCLES)
        for a, d in itertools.pairwise(self.values):
            warploom.mixed_gemm(a, self.weight.packed, out=d, spec=self.spec)
        return self.values[1:]

    def assert_right(self) -> None:
        """Assert that each result is that of the one before."""
        scaled = cases.schedule(self.spec).scaled
        for a, d in itertools.pairwise(self.values):
            assert_within(d, *reference.bound(a, self.weight.packed, (), d.dtype, scaled))


def chain(spec: KernelSpec, m: int, n: int, k: int, *, length: int = 2, seed: int = 0) -> Chain:
    """A chain of `length` products of random activations, n being k."""
    operation = cast("MixedGemmOperation", spec.operation)
    generator = torch.Generator("cuda").manual_seed(seed)
    packed = weight(operation, n, k, seed)
    values = [torch.empty(m, n, dtype=TORCH[operation.d], device="cuda") for _ in range(length)]
    first = torch.randn(m, k, generator=generator, device="cuda").to(TORCH[operation.a])
    return Chain(spec, packed, [first, *values])
