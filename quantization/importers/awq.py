"""AutoAWQ's layout "gemm": qweight, qzeros and scales, 4 bits with zero points.

Source: AutoAWQ 0.2.9, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.
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
    fields,
    grouped,
    refused,
    required,
    shaped,
    whole,
    word,
)

SOURCE = "AutoAWQ"
NAMES = ("qweight", "qzeros", "scales")
COLUMNS = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble of a word that column j of its eight is in


def read(tensors: Tensors, config: Config) -> Layer:
    """Return the layer of qweight [k, n / 8], qzeros [groups, n / 8] and scales [groups, n].

    Each int32 has eight columns of one row of k. Without a `group_size` the scales tell it.

    Raises:
        ProblemError: another layout ("gemv", "gemv_fast", "llm-awq"), other bits, other shapes.
    """
    layout = "gemm"
    for field in ("checkpoint_format", "format", "version"):  # the last that there is
        layout = word(SOURCE, config, field, layout)
    if layout.lower() != "gemm":
        raise refused(SOURCE, f"layout {brief(layout)}", rule="must be 'gemm'")
    if (bits := whole(SOURCE, config, "bits", whole(SOURCE, config, "w_bit", 4))) != 4:
        raise refused(SOURCE, f"bits {bits}", rule="must be 4")
    qweight = required(SOURCE, tensors, "qweight", rank=2, types=[torch.int32])
    qzeros = required(SOURCE, tensors, "qzeros", rank=2, types=[torch.int32])
    scales = required(SOURCE, tensors, "scales", rank=2, types=SCALES)
    k, n = qweight.shape[0], qweight.shape[1] * 8
    size = whole(SOURCE, config, "group_size", whole(SOURCE, config, "q_group_size", 0))
    size = k if size == -1 else size or k // max(scales.shape[0], 1)
    if size <= 0:
        raise refused(SOURCE, f"group_size {size}", rule="must be positive, or -1")
    groups = -(-k // size)
    of = f"k = {k}, n = {n} and groups of {size}"
    shaped(SOURCE, "scales", scales, (groups, n), of)
    shaped(SOURCE, "qzeros", qzeros, (groups, n // 8), of)
    spread, group = grouped(SOURCE, scales.t(), size, k)
    zeros, _ = grouped(SOURCE, _columns(qzeros).t(), size, k)
    return Layer("uint4", _columns(qweight).t(), spread, zeros, group)


def _columns(words: Tensor) -> Tensor:
    """int32 [rows, n / 8] -> uint8 [rows, n], in the order of columns."""
    return fields(words, 4).reshape(len(words), -1, 8)[..., COLUMNS].flatten(-2)
