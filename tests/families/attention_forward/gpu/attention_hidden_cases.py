"""Biases that hide rows, parts of rows and columns by a large finite number, for both passes."""

from __future__ import annotations

from typing import Any

import torch
from attention_cases import MASKS, Shape, chosen

from warploom.generator.families._attention.operation import Operation
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention.modifiers.score_tensors import room_for

VALUES = (-1e4, -1e9, -3.4028234663852886e38, 1e9)  # or the nearest that the bias's type holds
ROWS = (0, 1, 70, 129)  # hidden as a whole
SHAPE = Shape(2, 4, 2, 131, 203)
LENGTHS = ([131, 0, 75], [203, 40, 130])
# By what is added to an operation: (dim, its other fields, what it has beside q, k and v).
OPERATIONS: tuple[tuple[int, dict[str, Any], dict[str, Any]], ...] = (
    (32, {"element": "fp16"}, {"bias": "fp16"}),
    (64, {}, {"bias": "fp32"}),
    (64, {"element": "fp16", "mask": "causal"}, {"bias": "fp32"}),
    (64, {"softcap": True}, {"bias": "bf16"}),
    (64, {"lengths": "packed"}, {"bias": "bf16", "sinks": "fp32"}),
    (96, {"mask": "causal"}, {"bias": "fp32", "masked": True}),
    (128, {}, {"bias": "bf16"}),
    (128, {"mask": "causal"}, {"bias": "fp32"}),
    (128, {"element": "fp16", "mask": "window"}, {"bias": "fp16"}),
    (128, {"mask": "causal", "lengths": "packed"}, {"bias": "fp32"}),
    (128, {}, {"bias": "bf16", "alibi": True}),
    (128, {}, {"bias": "bf16", "dropout": True}),
    (192, {"mask": "causal"}, {"bias": "bf16"}),
    (256, {}, {"bias": "fp32"}),
    (256, {"element": "fp16", "softcap": True, "mask": "causal"}, {"bias": "fp16"}),
)
FORWARD = [chosen(dim, **fields, further=further) for dim, fields, further in OPERATIONS]


def bias(operation: Operation, value: float) -> torch.Tensor:
    """Normal numbers, but for what is hidden by a value."""
    dtype = TORCH[operation.bias]
    info = torch.finfo(dtype)
    hidden = min(max(value, info.min), info.max)
    generator = torch.Generator("cuda").manual_seed(3)
    extents = (SHAPE.batch, 1, SHAPE.seq_q, SHAPE.seq_k)
    if operation.lengths == "packed":
        extents = (len(LENGTHS[0]), *extents[1:])
    found = torch.randn(extents, generator=generator, device="cuda").to(dtype)
    found[:, :, list(ROWS)] = hidden
    found[:, :, 5, :100] = hidden
    found[1, :, :, 64:90] = hidden
    return room_for(SHAPE.seq_k, found)


def keywords(operation: Operation, value: float) -> dict[str, Any]:
    """What a call is given of the bias and the mask."""
    return {**MASKS[operation.mask][0], "bias": bias(operation, value)}
