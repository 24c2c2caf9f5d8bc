"""torchao's tensors: Int4Tensor, Int4TilePackedTo4dTensor, IntxUnpackedToInt8Tensor, Int8Tensor,
Float8Tensor, as they are or as safetensors has them.

Source: torchao 0.18, quantization/quantize_/workflows and prototype/safetensors; MSLK,
quantize/shuffle.py, for the halves of bytes; torch, native/cuda/int4mm.cu, for the tiles.

Zero points of torchao's 4 bits are floating-point numbers that are added to the weight: W = scale
code + zero. Only where they are whole multiples of the scale is there a format for that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from warploom.generator.json_file import parse
from warploom.printable import brief, cut
from warploom.quantization.checks import require_fp8_scales
from warploom.quantization.importers.layer import (
    SCALES,
    Config,
    Layer,
    Tensors,
    fields,
    grouped,
    nibbles,
    pair,
    refused,
    required,
    shaped,
)
from warploom.quantization.importers.plain import blocks, rows

SOURCE = "torchao"
NAMES = ("weight", "qdata", "scale", "zero_point", "scale_and_zero", "act_pre_scale")
# The nibble of a word that each of a lane's eight values of k is in: of two tiles of k = 16, two
# halves, two neighbours.
NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]


def flattened(weight: Tensor) -> tuple[Tensors, Config]:
    """Return the tensors that one of torchao's tensors is made of, and what its metadata says."""
    names = [*_listed(weight, "tensor_data_names"), *_listed(weight, "optional_tensor_data_names")]
    attributes = [
        *_listed(weight, "tensor_attribute_names"),
        *_listed(weight, "optional_tensor_attribute_names"),
    ]
    tensors = {name: getattr(weight, name) for name in names if getattr(weight, name) is not None}
    data = {name: getattr(weight, name) for name in attributes}
    return tensors, {"_type": type(weight).__name__, "_data": {**data, "shape": list(weight.shape)}}


def described(text: str) -> Config:
    """Return what the metadata of a safetensors file says of one weight.

    Raises:
        ProblemError: it is not torchao's.
    """
    try:
        found = parse(text.encode(errors="replace"))
    except (ValueError, AttributeError):
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("_type"), str):
        raise refused(SOURCE, f"metadata {brief(text)}", rule="must be JSON with a _type")
    return found


def read(tensors: Tensors, description: Config) -> Layer:
    """Return the layer of the tensors of one weight (`qdata`, `scale`, ...).

    `description` is what `flattened` or `described` return; it tells the kind of tensor.

    Raises:
        ProblemError: another kind, activations that are scaled first, other bits or shapes.
    """
    kind = description.get("_type")
    if kind not in KINDS:
        raise refused(
            SOURCE,
            f"a tensor of class {cut(str(kind), 80)}",
            rule=f"must be one of {', '.join(KINDS)}",
        )
    if "act_pre_scale" in tensors:
        raise refused(SOURCE, "act_pre_scale", rule="activations must not be scaled first")
    data = description.get("_data")
    return KINDS[kind](tensors, data if isinstance(data, Mapping) else {})


def _int4(tensors: Tensors, data: Config) -> Layer:
    """qdata [n, k / 2], two's complement halves, low first; scale and zero_point [groups, n]."""
    qdata = required(SOURCE, tensors, "qdata", rank=2, types=[torch.int8, torch.uint8])
    scale = required(SOURCE, tensors, "scale", rank=2, types=SCALES)
    zero = required(SOURCE, tensors, "zero_point", rank=2, types=SCALES)
    n, k = qdata.shape[0], qdata.shape[1] * 2
    size = _size(data, k, scale.shape[0])
    _of_groups(scale, zero, (-(-k // size), n), f"n = {n}, k = {k} and groups of {size}")
    codes = (nibbles(qdata) ^ 8).view(torch.int8) - 8
    return _shifted(codes, scale.t(), zero.t(), size)


def _tiles(tensors: Tensors, data: Config) -> Layer:
    """qdata [n / 8, k / (16 t), 32, t / 2] of int32 and scale_and_zero [groups, n, 2], padded."""
    qdata = required(SOURCE, tensors, "qdata", rank=4, types=[torch.int32])
    both = required(SOURCE, tensors, "scale_and_zero", rank=3, types=SCALES)
    shape = data.get("shape")
    n, k = pair(SOURCE, "shape", shape)
    codes = _untiled(qdata)
    if n > codes.shape[0] or k > codes.shape[1]:
        raise refused(SOURCE, f"shape {[n, k]}", rule=f"must fit in the stored {list(codes.shape)}")
    size = _size(data, codes.shape[1], both.shape[0])
    groups = -(-codes.shape[1] // size)
    shaped(SOURCE, "scale_and_zero", both, (groups, codes.shape[0], 2), f"groups of {size}")
    used = both[: -(-k // size), :n]
    return _shifted(codes[:n, :k].view(torch.int8) - 8, used[..., 0].t(), used[..., 1].t(), size)


def _untiled(qdata: Tensor) -> Tensor:
    """int32 [n / 8, k / (16 t), 32, t / 2] -> uint8 [n, k].

    A word has, for lane l, row l / 4 of a tile and k = 2 (l % 4) + {0, 1, 8, 9} of two tiles.
    """
    if qdata.shape[2] != 32:
        raise refused(SOURCE, f"qdata is {list(qdata.shape)}", rule="must have 32 lanes")
    tiles, pairs = qdata.shape[:2], qdata.shape[3]
    lanes = fields(qdata, 4).reshape(*tiles, 8, 4, pairs, 8)[..., NIBBLES]
    # [n / 8, k / (16 t), row, quarter, pair of tiles, tile, half of it, neighbour]
    values = lanes.reshape(*tiles, 8, 4, pairs, 2, 2, 2)
    return values.permute(0, 2, 1, 4, 5, 6, 3, 7).flatten(2).flatten(0, 1)


def _intx(tensors: Tensors, data: Config) -> Layer:
    """qdata int8 [n, k] within target_dtype's range; scale and zero_point [n, groups]."""
    qdata = required(SOURCE, tensors, "qdata", rank=2, types=[torch.int8])
    scale = required(SOURCE, tensors, "scale", rank=2, types=SCALES)
    zero = required(SOURCE, tensors, "zero_point", rank=2, types=[torch.int8, *SCALES])
    target = data.get("target_dtype")
    target = target.get("_data") if isinstance(target, Mapping) else str(target)
    bits = {"int4": 4, "int8": 8}.get(str(target).removeprefix("torch."))
    if bits is None:
        raise refused(SOURCE, f"target_dtype {cut(str(target), 80)}", rule="must be int4 or int8")
    n, k = qdata.shape
    size = _size(data, k, scale.shape[1])
    _of_groups(scale, zero, (n, -(-k // size)), f"n = {n}, k = {k} and groups of {size}")
    if not bool(zero.any()):
        spread, group = grouped(SOURCE, scale, size, k)
        return Layer(f"int{bits}", qdata, spread, None, group)
    zeros = zero.float() + 8
    if bits == 8 or bool(((zeros != zeros.round()) | (zeros < 0) | (zeros > 16)).any()):
        raise refused(
            SOURCE, f"zero points of int{bits}", rule="must be 0, or whole numbers of 4 bits"
        )
    spread, group = grouped(SOURCE, scale, size, k)
    around, _ = grouped(SOURCE, zeros.to(torch.uint8), size, k)
    return Layer("uint4", (qdata + 8).view(torch.uint8), spread, around, group)


def _eight(tensors: Tensors, data: Config) -> Layer:
    """qdata int8 or e4m3 [n, k]; scale of one, of rows, or of blocks of `block_size`."""
    types = [torch.int8, torch.float8_e4m3fn]
    qdata = required(SOURCE, tensors, "qdata", rank=2, types=types)
    scale = required(SOURCE, tensors, "scale", rank=(0, 1, 2), types=SCALES)
    if qdata.dtype == torch.float8_e4m3fn:
        require_fp8_scales(f"{SOURCE}: scale", scale)
    point = tensors.get("zero_point")
    if isinstance(point, Tensor) and bool(point.any()):
        raise refused(SOURCE, "8 bits with zero points", rule="8 bits must be symmetric")
    n, k = qdata.shape
    if scale.numel() == 1:
        return rows(SOURCE, qdata, scale.reshape(1, 1).expand(n, 1), k)
    block = data.get("block_size")
    block = [1, k] if block is None else block
    return blocks(SOURCE, qdata, scale, pair(SOURCE, "block_size", block))


def _shifted(codes: Tensor, scales: Tensor, offsets: Tensor, size: int) -> Layer:
    """The layer W = scale code + offset, of codes int8 -8..7, scales and offsets [n, groups]."""
    k = codes.shape[1]
    spread, group = grouped(SOURCE, scales, size, k)
    if not bool(offsets.any()):
        return Layer("int4", codes, spread, None, group)
    zeros = torch.where(offsets == 0, 8, (8 - offsets.double() / scales.double()).round())
    exact = ((8 - zeros) * scales.double() == offsets.double()) & (zeros >= 0) & (zeros <= 16)
    around, _ = grouped(SOURCE, offsets, size, k)
    if not bool(exact.all()):
        return Layer("int4", codes, spread, None, group, offsets=around)
    whole_zeros, _ = grouped(SOURCE, zeros.to(torch.uint8), size, k)
    return Layer("uint4", (codes + 8).view(torch.uint8), spread, whole_zeros, group)


def _of_groups(scale: Tensor, zero: Tensor, shape: tuple[int, int], of: str) -> None:
    shaped(SOURCE, "scale", scale, shape, of)
    shaped(SOURCE, "zero_point", zero, shape, of)


def _size(data: Config, k: int, groups: int) -> int:
    """How much of k a scale is for: the last of `block_size`, or by the number of `groups`."""
    block = data.get("block_size")
    if block is None:
        return -(-k // max(groups, 1))
    rows, size = pair(SOURCE, "block_size", block)
    if rows != 1:
        raise refused(SOURCE, f"block_size {[rows, size]}", rule="must be 1 and the group of k")
    return size


def _listed(weight: Tensor, name: str) -> list[str]:
    return list(getattr(weight, name, ()))


KINDS: dict[str, Callable[[Tensors, Config], Layer]] = {
    "Int4Tensor": _int4,
    "Int4TilePackedTo4dTensor": _tiles,
    "IntxUnpackedToInt8Tensor": _intx,
    "Int8Tensor": _eight,
    "Float8Tensor": _eight,
}
