"""GPTQ's layouts v1 and v2: qweight, qzeros, scales and g_idx, in 4 and 8 bits.

Source: GPTQModel 7.7.0, nn_modules/qlinear/__init__.py (packing, dequantisation) and utils/model.py
(v1 to v2). AutoGPTQ's checkpoints are v1.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
)

SOURCE = "GPTQ"
ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in every field of a word
MIDDLE = {4: 8, 8: 128}  # the zero point of symmetric weights
BORROWS = (0, 9)  # from this GPTQModel on, a zero point of 0 in v1 borrows from the next


def read(tensors: Tensors, config: Config) -> Layer:
    """Return the layer of qweight [k bits / 32, n], qzeros [groups, n bits / 32], scales, g_idx.

    Each int32 of qweight has fields of k, each of qzeros fields of n. In v1 (`checkpoint_format`
    "gptq", or none) zero points are stored less 1. Where all are in the middle the weight is
    symmetric: int4 or int8; else it is uint4.

    Raises:
        ProblemError: an order of k by activations (`desc_act` with a g_idx that is not k // group),
            other bits or layouts, other shapes, 8 bits with zero points.
    """
    bits = whole(SOURCE, config, "bits", 4)
    if bits not in ONES:
        raise refused(SOURCE, f"bits {bits}", rule="must be 4 or 8")
    version = _version(config)
    qweight = required(SOURCE, tensors, "qweight", rank=2, types=[torch.int32])
    qzeros = required(SOURCE, tensors, "qzeros", rank=2, types=[torch.int32])
    scales = required(SOURCE, tensors, "scales", rank=2, types=SCALES)
    fits, n = qweight.shape[0] * 32 // bits, qweight.shape[1]
    k, size = _order(tensors, config, fits, scales.shape[0])
    groups, words = -(-k // size), -(-n * bits // 32)
    of = f"k = {k}, n = {n}, {bits} bits and groups of {size}"
    shaped(SOURCE, "qweight", qweight, (-(-k * bits // 32), n), of)
    shaped(SOURCE, "scales", scales, (groups, n), of)
    shaped(SOURCE, "qzeros", qzeros, (groups, words), of)
    zeros = _zeros(qzeros, config, bits, version)[:, :n]
    codes = fields(qweight.t(), bits)[:, :k]
    return _layer(codes, scales, zeros, config, bits=bits, size=size)


def _layer(
    codes: Tensor, scales: Tensor, zeros: Tensor, config: Config, *, bits: int, size: int
) -> Layer:
    """The layer, symmetric where every zero point (uint8 [groups, n]) is in the middle."""
    spread, group = grouped(SOURCE, scales.t(), size, codes.shape[1])
    if bool((zeros == MIDDLE[bits]).all()):
        signed = (
            (codes ^ MIDDLE[bits]).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8
        )
        return Layer(f"int{bits}", signed, spread, None, group)
    if config.get("sym") is True:
        raise refused(
            SOURCE,
            f"sym, yet zero points from {int(zeros.min())} to {int(zeros.max())}",
            rule=f"must all be {MIDDLE[bits]}",
            fix="is checkpoint_format ('gptq' or 'gptq_v2') the one that the file was written as?",
        )
    if bits == 8:
        raise refused(SOURCE, "8 bits with zero points", rule="8 bits must be symmetric")
    return Layer("uint4", codes, spread, grouped(SOURCE, zeros.t(), size, codes.shape[1])[0], group)


def _version(config: Config) -> int:
    """1 or 2, as `checkpoint_format` says."""
    layout = config.get("checkpoint_format") or config.get("format") or "gptq"
    if config.get("is_marlin_format"):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise refused(
            SOURCE, f"checkpoint_format {layout!r}", rule="must be 'gptq' (v1) or 'gptq_v2'"
        )
    if (kept := config.get("pack_dtype", "int32")) not in ("int32", None):
        raise refused(SOURCE, f"pack_dtype {kept!r}", rule="must be 'int32'")
    return 2 if layout == "gptq_v2" else 1


def _order(tensors: Tensors, config: Config, fits: int, groups: int) -> tuple[int, int]:
    """k and the size of its groups; g_idx must be k // size. `fits` values of k fit in qweight."""
    index = tensors.get("g_idx")
    if index is None and config.get("desc_act"):
        raise refused(SOURCE, "desc_act without g_idx", rule="g_idx must be there")
    k = fits if index is None else index.numel()
    size = whole(SOURCE, config, "group_size", -(-k // max(groups, 1)))
    size = k if size == -1 else size
    if size <= 0:
        raise refused(SOURCE, f"group_size {size}", rule="must be positive, or -1")
    if index is not None:
        required(SOURCE, tensors, "g_idx", rank=1, types=[torch.int32, torch.int64])
        straight = torch.arange(k, device=index.device, dtype=index.dtype) // size
        if not torch.equal(index, straight):
            raise refused(
                SOURCE,
                "act-order: g_idx is not k // group",
                rule="rows of k must be in the order of the groups that they are of",
                fix="quantize with desc_act=False, or with static_groups=True",
            )
    return k, size


def _zeros(qzeros: Tensor, config: Config, bits: int, version: int) -> Tensor:
    """Zero points, uint8 [groups, n padded]; those of v1 with the 1 that was taken off.

    A field of v1 with all bits set was a zero point of 0: GPTQModel from 0.9 on borrows from the
    next field and gives back; others keep 16, or 0, and read what others wrote as something else.
    """
    if version == 2:
        return fields(qzeros, bits)
    if bool((fields(qzeros, bits) == (1 << bits) - 1).any()) and not _borrows(config):
        raise refused(
            SOURCE,
            f"v1 with a stored zero point of {(1 << bits) - 1}",
            rule="packages read it as different numbers",
            fix="write it with GPTQModel 0.9 or later, or as 'gptq_v2'",
        )
    return fields(qzeros + ONES[bits], bits)


def _borrows(config: Config) -> bool:
    """Whether `meta.quantizer` names a GPTQModel whose v1 can be undone."""
    meta = config.get("meta")
    written = meta.get("quantizer") if isinstance(meta, dict) else None
    for one in written if isinstance(written, list) else [written]:
        name, _, version = str(one).partition(":")
        numbers = version.split(".")[:2]
        if name.lower() == "gptqmodel" and len(numbers) == 2 and all(map(str.isdecimal, numbers)):
            return tuple(map(int, numbers)) >= BORROWS
    return False
