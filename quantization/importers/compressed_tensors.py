"""compressed-tensors (llm-compressor, vLLM): packed and plain integers, float8, MXFP4.

Source: compressed-tensors 0.20, compressors/{pack_quantized,naive_quantized,mxfp4} for the layouts,
quantization/{quant_args,quant_config}.py for the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from warploom.quantization.importers import mxfp4
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
from warploom.quantization.importers.plain import blocks, rows

SOURCE = "compressed-tensors"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")


def read(tensors: Tensors, config: Config, name: str) -> Layer:
    """Return the layer, by the group of `config_groups` that is meant for the layer called `name`.

    Without a configuration the tensors tell: `weight_packed` is packed, an int8 or float8 `weight`
    plain, and groups are as wide as there are scales for.

    Raises:
        ProblemError: another format or strategy, act-order, other bits or shapes.
    """
    scheme = _scheme(config, name) if config else {}
    weights = scheme.get("weights") or {}
    if not isinstance(weights, Mapping):
        raise refused(SOURCE, f"weights {weights!r}", rule="must be a dictionary")
    _require_order(tensors, weights)
    layout = scheme.get("format") or config.get("format") or _layout(tensors)
    if layout == "pack-quantized":
        return _packed(tensors, weights)
    if layout == "mxfp4-pack-quantized":
        return _mxfp4(tensors)
    if layout in PLAIN:
        return _plain(tensors, weights)
    known = ", ".join(["pack-quantized", "mxfp4-pack-quantized", *PLAIN])
    raise refused(SOURCE, f"format {layout!r}", rule=f"must be one of {known}")


def _packed(tensors: Tensors, weights: Config) -> Layer:
    """weight_packed int32 [n, k bits / 32], weight_scale [n, groups] and weight_shape (n, k).

    weight_zero_point, where not symmetric, is packed along n: int32 [n bits / 32, groups]. All
    fields are codes plus half of the range.
    """
    packed = required(SOURCE, tensors, "weight_packed", rank=2, types=[torch.int32])
    kept = required(SOURCE, tensors, "weight_shape", rank=1, types=[torch.int64, torch.int32])
    n, k = (int(one) for one in shaped(SOURCE, "weight_shape", kept, (2,), "n and k"))
    scales = required(SOURCE, tensors, "weight_scale", rank=2, types=SCALES)
    bits = whole(SOURCE, weights, "num_bits", packed.shape[1] * 32 // max(k, 1))
    if bits not in (4, 8) or weights.get("type", "int") != "int":
        raise refused(SOURCE, f"{bits} bits of {weights.get('type')}", rule="must be 4 or 8 of int")
    size = _size(weights, scales.shape[1], k)
    of = f"n = {n}, k = {k}, {bits} bits and groups of {size}"
    shaped(SOURCE, "weight_packed", packed, (n, -(-k * bits // 32)), of)
    shaped(SOURCE, "weight_scale", scales, (n, -(-k // size)), of)
    spread, group = grouped(SOURCE, scales, size, k)
    codes = fields(packed, bits)[:, :k]
    if weights.get("symmetric", "weight_zero_point" not in tensors):
        signed = (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8
        return Layer(f"int{bits}", signed, spread, None, group)
    if bits == 8:
        raise refused(SOURCE, "8 bits with zero points", rule="8 bits must be symmetric")
    words = required(SOURCE, tensors, "weight_zero_point", rank=2, types=[torch.int32])
    shaped(SOURCE, "weight_zero_point", words, (-(-n * bits // 32), scales.shape[1]), of)
    zeros = fields(words.t(), bits).t()[:n]
    return Layer("uint4", codes, spread, grouped(SOURCE, zeros, size, k)[0], group)


def _plain(tensors: Tensors, weights: Config) -> Layer:
    """weight int8 or e4m3 [n, k] and weight_scale: [n, 1], [1], [n, groups] or a scale a block."""
    types = [torch.int8, torch.float8_e4m3fn]
    weight = required(SOURCE, tensors, "weight", rank=2, types=types)
    if "weight_zero_point" in tensors and bool(tensors["weight_zero_point"].any()):
        raise refused(SOURCE, "8 bits with zero points", rule="8 bits must be symmetric")
    if (bits := whole(SOURCE, weights, "num_bits", 8)) != 8:
        raise refused(SOURCE, f"{bits} bits in a plain layout", rule="must be 8")
    scales = tensors.get("weight_scale")
    rank = 2 if scales is None else scales.dim()
    scales = required(SOURCE, tensors, "weight_scale", rank=rank, types=SCALES)
    block = weights.get("block_structure")
    if isinstance(block, list) and len(block) == 2:
        return blocks(SOURCE, weight, scales, (int(block[0]), int(block[1])))
    n, k = weight.shape
    if scales.numel() == 1 and weights.get("strategy", "tensor") == "tensor":
        scales = scales.reshape(1, 1).expand(n, 1)
    if scales.dim() != 2 or scales.shape[0] != n:
        raise refused(
            SOURCE,
            f"weight_scale is {list(scales.shape)}",
            rule=f"must have a row for each of n = {n}",
        )
    return rows(SOURCE, weight, scales, _size(weights, scales.shape[1], k))


def _mxfp4(tensors: Tensors) -> Layer:
    """weight_packed uint8 [n, k / 2], two e2m1 a byte, and weight_scale uint8 [n, k / 32]."""
    halves = required(SOURCE, tensors, "weight_packed", rank=2, types=[torch.uint8])
    scales = required(SOURCE, tensors, "weight_scale", rank=2, types=[torch.uint8])
    n, k = halves.shape[0], halves.shape[1] * 2
    shaped(SOURCE, "weight_scale", scales, (n, k // mxfp4.GROUP), f"n = {n}, k = {k}")
    if k % mxfp4.GROUP:
        raise refused(SOURCE, f"k = {k}", rule=f"must be a multiple of {mxfp4.GROUP}")
    return mxfp4.layer(halves, scales)


def _size(weights: Config, groups: int, k: int) -> int:
    """How much of k a scale is for, by the strategy; without one by the number of `groups`."""
    strategy = weights.get("strategy")
    size = whole(SOURCE, weights, "group_size", 0)
    if strategy in ("channel", "tensor") or size == -1 or (groups == 1 and not size):
        return k
    if strategy not in ("group", None):
        raise refused(
            SOURCE,
            f"strategy {strategy!r} of weights",
            rule="must be 'group', 'channel', 'tensor' or 'block'",
        )
    size = size or -(-k // max(groups, 1))
    if size <= 0:
        raise refused(SOURCE, f"group_size {size}", rule="must be positive, or -1")
    return size


def _layout(tensors: Tensors) -> str:
    packed = tensors.get("weight_packed")
    if packed is None:
        return "naive-quantized"
    if packed.dtype != torch.uint8:
        return "pack-quantized"
    return "nvfp4-pack-quantized" if "weight_global_scale" in tensors else "mxfp4-pack-quantized"


def _require_order(tensors: Tensors, weights: Config) -> None:
    """Raise where values of k are in another order than their groups."""
    order = weights.get("actorder")
    index = tensors.get("weight_g_idx")
    if order in ("group", "dynamic", True) or index is not None:
        raise refused(
            SOURCE,
            "act-order: " + (f"actorder {order!r}" if index is None else "a weight_g_idx"),
            rule="values of k must be in the order of the groups that they are of",
            fix="quantize with actorder='weight', or none",
        )


def _scheme(config: Config, name: str) -> Config:
    """The group of `config_groups` whose targets name the layer, or the class Linear.

    A target is a name, a pattern after "re:" that names begin with, or a class; names go first.
    """
    for field in ("transform_config", "sparsity_config"):
        if (found := config.get(field)) and not _is_dense(found):
            raise refused(SOURCE, f"{field} {found!r}", rule="must be empty")
    ignored = config.get("ignore") or []
    if name and isinstance(ignored, list) and any(_names(str(one), name) for one in ignored):
        raise refused(SOURCE, f"{name} is ignored: it is not quantized")
    groups = config.get("config_groups")
    schemes = list(groups.values()) if isinstance(groups, Mapping) else []
    for fits in (lambda target: _names(target, name), lambda target: target == "Linear"):
        for scheme in schemes:
            if isinstance(scheme, Mapping) and any(
                map(fits, map(str, scheme.get("targets") or ()))
            ):
                return scheme
    raise refused(
        SOURCE,
        f"no group of config_groups is for {name or 'a layer without a name'}",
        rule="targets must name it, or Linear",
        fix="pass the layer's name in the checkpoint",
    )


def _names(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return bool(name) and re.match(target[3:], name) is not None
    return target == name


def _is_dense(field: object) -> bool:
    return isinstance(field, Mapping) and field.get("format") == "dense"
