"""GPTQ's layouts v1 and v2: qweight, qzeros, scales and g_idx, in 4 and 8 bits.

Source: GPTQModel 7.7.0, nn_modules/qlinear/__init__.py (packing, dequantisation) and utils/model.py
(v1 to v2). AutoGPTQ's checkpoints are v1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from warploom.printable import brief
from warploom.quantization.importers.layer import (
    SCALES,
    Config,
    Layer,
    Tensors,
    fields,
    flag,
    grouped,
    refused,
    required,
    shaped,
    whole,
    word,
)

SOURCE = "GPTQ"
NAMES = ("qweight", "qzeros", "scales", "g_idx")
ONES = {4: 0x11111111, 8: 0x01010101}  # 1 in every field of a word
MIDDLE = {4: 8, 8: 128}  # the zero point of symmetric weights
_NUMBERS = re.compile("[0-9]{1,9}[.][0-9]{1,9}", re.ASCII)
BORROWS = (0, 9)  # from this GPTQModel on, a zero point of 0 in v1 borrows from the next


def read(tensors: Tensors, config: Config) -> Layer:
    """Return the layer of qweight [k bits / 32, n], qzeros [groups, n bits / 32], scales, g_idx.

    Each int32 of qweight has fields of k, each of qzeros fields of n. In v1 (`checkpoint_format`
    "gptq", or none) zero points are stored less 1. Where all are in the middle the weight is
    symmetric: int4 or int8; else it is uint4. Zero points of symmetric weights are known, so that
    they tell v1 from v2 whatever the file says: some v2 files are labelled "gptq".

    Raises:
        ProblemError: an order of k by activations (`desc_act` with a g_idx that is not k // group),
            other bits or layouts, other shapes, 8 bits with zero points.
    """
    bits = whole(SOURCE, config, "bits", 4)
    if bits not in ONES:
        raise refused(SOURCE, f"bits {bits}", rule="must be 4 or 8")
    label = _version(config)
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
    symmetric = flag(SOURCE, config, "sym", True)
    version = _told(fields(qzeros, bits)[:, :n], bits) if symmetric else None
    zeros = _zeros(qzeros, config, bits, version or label)[:, :n]
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
    if flag(SOURCE, config, "sym", False):
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
    layout = word(SOURCE, config, "checkpoint_format", word(SOURCE, config, "format", "gptq"))
    if flag(SOURCE, config, "is_marlin_format", False):
        layout = "marlin"
    if layout not in ("gptq", "gptq_v2"):
        raise refused(
            SOURCE, f"checkpoint_format {brief(layout)}", rule="must be 'gptq' (v1) or 'gptq_v2'"
        )
    if (kept := word(SOURCE, config, "pack_dtype", "int32")) != "int32":
        raise refused(SOURCE, f"pack_dtype {brief(kept)}", rule="must be 'int32'")
    return 2 if layout == "gptq_v2" else 1


def _told(stored: Tensor, bits: int) -> int | None:
    """The version that zero points of a symmetric weight tell, None where they are of none."""
    middle = MIDDLE[bits]
    return next(
        (version for version in (1, 2) if bool((stored == middle - 2 + version).all())), None
    )


def _order(tensors: Tensors, config: Config, fits: int, groups: int) -> tuple[int, int]:
    """k and the size of its groups; g_idx must be k // size. `fits` values of k fit in qweight."""
    index = tensors.get("g_idx")
    if index is None and flag(SOURCE, config, "desc_act", False):
        raise refused(SOURCE, "desc_act without g_idx", rule="g_idx must be there")
    if index is not None:
        index = required(SOURCE, tensors, "g_idx", rank=1, types=[torch.int32, torch.int64])
    k = fits if index is None else index.numel()
    size = whole(SOURCE, config, "group_size", -(-k // max(groups, 1)))
    size = k if size == -1 else size
    if size <= 0:
        raise refused(SOURCE, f"group_size {size}", rule="must be positive, or -1")
    if index is not None:
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
    written = meta.get("quantizer") if isinstance(meta, Mapping) else None
    for one in written if isinstance(written, list) else [written]:
        name, _, version = one.partition(":") if isinstance(one, str) else ("", "", "")
        numbers = version.split(".")[:2]
        if name.lower() == "gptqmodel" and _NUMBERS.fullmatch(".".join(numbers)):
            return tuple(map(int, numbers)) >= BORROWS
    return False
