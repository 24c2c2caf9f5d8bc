"""Random operands of a product with a packed weight, for an operation at a shape."""

from __future__ import annotations

import math
from typing import Any

import torch

from warploom.generator.epilogue import columns
from warploom.generator.families.mixed_gemm import MixedGemmOperation, MixedGemmShape
from warploom.quantization import Metadata, PackedExperts, PackedWeight
from warploom.quantization.codes import numbers
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product import steps
from warploom.runtime.families._product.steps.gate import gate_options
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall
from warploom.runtime.families.mixed_gemm.grouped_call import GroupedMixedCall
from warploom.runtime.trial import wrong

_BIAS = 127  # of e8m0's exponents
_FEW = 4  # weights of groups that differ: their numbers do not decide a time


def draw(
    operation: MixedGemmOperation,
    shape: MixedGemmShape,
    device: str,
    random: torch.Generator | None,
) -> MixedGemmCall:
    """A call with random operands, and an output full of what no right result is full of.

    Activations are normal, of int8 uniform; weights of about 1, each group with a scale of its own.
    On `meta`, only shapes.
    """
    draws = Draws(device, random)
    at = Extents((), shape.m, shape.n, shape.k)
    out = torch.empty(
        (shape.m, columns(operation.epilogue, shape.n)), dtype=TORCH[operation.d], device=device
    )
    return MixedGemmCall(
        draws.values(operation.a, (shape.m, shape.k)),
        weight(operation, shape, draws),
        tuple(steps.samples(operation.epilogue, draws, at)),
        wrong(out),
    )


def draw_grouped(
    operation: MixedGemmOperation,
    shape: MixedGemmShape,
    device: str,
    random: torch.Generator | None,
) -> GroupedMixedCall:
    """A call of groups of as many rows on average as the shape says: each row draws its own."""
    draws = Draws(device, random)
    total, groups = shape.m * shape.batches, shape.batches
    few = [weight(operation, shape, draws) for _ in range(min(groups, _FEW))]
    experts = PackedExperts.empty(groups, few[0].metadata, device)
    for group in range(groups):
        experts.put(group, few[group % len(few)])
    chosen = (draws.scales(total) - 0.5) * groups  # of [0, groups)
    at = torch.arange(groups, device=device)
    extents = Extents((groups,), total, shape.n, shape.k)
    listed = [*steps.samples(operation.epilogue, draws, extents)]
    values: dict[str, Any] = {item[0]: item[1] for item in listed}
    scaled_first = bool(listed) and listed[0][0] == "scale_row"
    out = torch.empty(
        (total, columns(operation.epilogue, shape.n)), dtype=TORCH[operation.d], device=device
    )
    return GroupedMixedCall(
        draws.values(operation.a, (total, shape.k)),
        experts.slabs,
        (chosen.to(torch.int64)[:, None] <= at).sum(0, dtype=torch.int32),
        experts.metadata,
        experts.channel_scales,
        experts.channel_zeros,
        bias=values.get("bias"),
        scale_a=values.get("scale_row") if scaled_first else None,
        row_scale=None if scaled_first else values.get("scale_row"),
        activation=values.get("activation"),
        out=wrong(out),
        out_dtype=out.dtype,
        **gate_options(listed),
    )


def weight(operation: MixedGemmOperation, shape: MixedGemmShape, draws: Draws) -> PackedWeight:
    """A random packed weight [n, k]."""
    group = operation.group or None
    metadata = Metadata(
        operation.b, group, operation.scale, operation.activations, shape.n, shape.k
    )
    if draws.device == "meta":
        return PackedWeight.empty(metadata, "meta")
    row, extents = operation.weight, (shape.n, metadata.groups)
    codes, zeros = _codes(operation, shape, draws), None
    if row.highest_zero is not None:
        zeros = _integers(0, row.highest_zero, extents, draws)
    usual = float(numbers(codes[:1].flatten(), row, torch.float64).square().mean().sqrt())
    if operation.scale == "e8m0":
        largest = metadata.slab.largest_scale or 1
        top = _BIAS + min(0, math.frexp(largest)[1] - 1)
        scales = _integers(top - 3, top, extents, draws).to(torch.uint8)
    else:
        scales = (draws.scales(*extents) / usual).to(metadata.scale_dtype)
    return PackedWeight.from_codes(
        codes,
        scales,
        zeros,
        format=operation.b,
        group=group,
        activations=operation.activations,
        global_scale=draws.scales(shape.n, 1)[:, 0].contiguous() if row.scaled_twice else None,
    )


def _codes(operation: MixedGemmOperation, shape: MixedGemmShape, draws: Draws) -> torch.Tensor:
    row, extents = operation.weight, (shape.n, shape.k)
    if row.nans:  # of a float: bits at random would be of any size
        return draws.values("e4m3", extents)
    kind = getattr(torch, row.codes)
    return _integers(row.lowest, row.highest, extents, draws).to(kind)


def _integers(low: int, high: int, extents: tuple[int, ...], draws: Draws) -> torch.Tensor:
    return torch.randint(
        low, high + 1, extents, generator=draws.random, dtype=torch.int16, device=draws.device
    )
