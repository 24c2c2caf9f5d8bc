"""BitNet b1.58's ternary weights as transformers stores them: four rows to a byte, and one scale.

Source: transformers 5.23, integrations/bitnet.py (pack_weights, BitLinear, AutoBitLinear).
"""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.printable import brief
from warploom.quantization.importers.layer import (
    SCALES,
    Config,
    Layer,
    Tensors,
    flag,
    refused,
    required,
    word,
)

SOURCE = "bitnet"
NAMES = ("weight", "weight_scale", "rms_norm.weight")
ROWS = 4  # of a byte, the first in the lowest bits
CLASSES = ("bitlinear", "autobitlinear")


def read(tensors: Tensors, config: Config) -> Layer:
    """Return the layer of `weight` uint8 [n / 4, k] and one `weight_scale`.

    Bits 2 i of row j have the weight of row j + i n / 4, plus 1. The scale divides where
    `linear_class` is "bitlinear", transformers' default, and multiplies where it is
    "autobitlinear".

    Raises:
        ProblemError: weights that are quantized in each call, activations that are normalised
            first, other shapes, types or classes, and codes of 3.
    """
    kind = word(SOURCE, config, "linear_class", CLASSES[0])
    if kind not in CLASSES:
        raise refused(
            SOURCE, f"linear_class {brief(kind)}", rule=f"must be one of {', '.join(CLASSES)}"
        )
    if flag(SOURCE, config, "use_rms_norm", False) or "rms_norm.weight" in tensors:
        raise refused(
            SOURCE,
            "use_rms_norm is true",
            rule="a weight alone is not the layer, whose input is normalised first",
            fix="warploom.patch(model) takes the layers of a model that transformers has loaded",
        )
    if word(SOURCE, config, "quantization_mode", "offline") != "offline":
        raise refused(
            SOURCE,
            f"quantization_mode {brief(config['quantization_mode'])}",
            rule="must be 'offline': other weights have 16 or 32 bits",
            fix="warploom.quantize(weight, 'ternary') does what the layer does in each call",
        )
    octets = required(SOURCE, tensors, "weight", rank=2, types=[torch.uint8])
    scale = required(SOURCE, tensors, "weight_scale", rank=(0, 1), types=SCALES)
    return layer(octets, scale, divides=kind == CLASSES[0])


def layer(octets: Tensor, scale: Tensor, *, divides: bool) -> Layer:
    """Return the layer of bytes [n / 4, k], and of one scale that divides or multiplies.

    Raises:
        ProblemError: a code of 3, several scales, or one of no size.
    """
    factor = _factor(scale)
    if divides:
        factor = 1 / factor
    third = octets & (octets >> 1) & 0x55
    if bool(third.any()):
        row, k = (int(i) for i in third.nonzero()[0])
        part = next(i for i in range(ROWS) if int(third[row, k]) >> 2 * i & 1)
        raise refused(
            SOURCE,
            f"code 3 of row {row + part * len(octets)}, k {k}",
            rule="must be 0, 1 or 2, which stand for -1, 0 and 1",
        )
    codes = torch.cat([(octets >> 2 * i) & 3 for i in range(ROWS)]).view(torch.int8) - 1
    return Layer("ternary", codes, factor.expand(len(codes), 1), None, None)


def unpacked(weight: Tensor, scale: Tensor) -> Layer:
    """Return the layer of weights -1, 0 and 1 [n, k] of 16 or 32 bits, and a scale that multiplies.

    Raises:
        ProblemError: another weight, several scales, or one of no size.
    """
    wrong = (weight != 0) & (weight.abs() != 1)
    if bool(wrong.any()):
        row, k = (int(i) for i in wrong.nonzero()[0])
        raise refused(
            SOURCE,
            f"weight {weight[row, k].item():g} of row {row}, k {k}",
            rule="must be -1, 0 or 1",
        )
    codes = weight.to(torch.int8)
    return Layer("ternary", codes, _factor(scale).expand(len(codes), 1), None, None)


def _factor(scale: Tensor) -> Tensor:
    if scale.numel() != 1:
        raise refused(SOURCE, f"weight_scale is {list(scale.shape)}", rule="must be one number")
    factor = scale.detach().float().reshape(1, 1)
    if not bool(torch.isfinite(factor).all() & (factor != 0).all()):
        raise refused(
            SOURCE, f"weight_scale {factor.item():g}", rule="must be finite, and not be 0"
        )
    return factor
