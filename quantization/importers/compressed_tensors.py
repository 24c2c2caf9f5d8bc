"""compressed-tensors (llm-compressor, vLLM): integers, float8, MXFP4, MXFP6, MXFP8, NVFP4.

Source: compressed-tensors 0.20, compressors/ (pack_quantized, naive_quantized, mxfp4, mxfp6, mxfp8,
nvfp4) for the layouts, quantization/{quant_args,quant_config}.py for the configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor

from warploom.printable import brief, cut
from warploom.quantization.checks import require_fp8_scales
from warploom.quantization.importers import mxfp4, mxfp8, nvfp4
from warploom.quantization.importers.layer import (
    SCALES,
    Config,
    Layer,
    Tensors,
    fields,
    flag,
    grouped,
    mapping,
    pair,
    refused,
    required,
    shaped,
    strings,
    whole,
    word,
)
from warploom.quantization.importers.patterns import first_match
from warploom.quantization.importers.plain import blocks, rows

SOURCE = "compressed-tensors"
NAMES = (
    "weight", "weight_packed", "weight_shape", "weight_scale", "weight_zero_point",
    "weight_g_idx", "weight_global_scale",
)  # fmt: skip
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")


def read(tensors: Tensors, config: Config, name: str) -> Layer:
    """Return the layer, by the group of `config_groups` that is meant for the layer called `name`.

    Without a configuration the tensors tell: `weight_packed` is packed, an int8 or float8 `weight`
    plain, and groups are as wide as there are scales for.

    Raises:
        ProblemError: another format or strategy, act-order, other bits or shapes.
    """
    scheme = _scheme(config, name) if config else {}
    weights = mapping(SOURCE, scheme, "weights")
    _require_order(tensors, weights)
    layout = word(SOURCE, scheme, "format", word(SOURCE, config, "format", "mixed-precision"))
    if layout == "mixed-precision":  # then each group has its own, or the tensors tell
        layout = _layout(tensors)
    if layout == "pack-quantized":
        return _packed(tensors, weights)
    if layout == "mxfp4-pack-quantized":
        return _mxfp4(tensors)
    if layout == "mxfp8-quantized":
        return mxfp8.read(SOURCE, tensors)
    if layout == "mxfp6-pack-quantized":
        return mxfp8.six_bits(SOURCE, tensors, name)
    if layout == "nvfp4-pack-quantized":
        return nvfp4.compressed(SOURCE, tensors)
    if layout in PLAIN:
        return _plain(tensors, weights)
    mx = ("mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized")
    known = ", ".join(["pack-quantized", *mx, "nvfp4-pack-quantized", *PLAIN])
    raise refused(SOURCE, f"format {brief(layout)}", rule=f"must be one of {known}")


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
    kind = word(SOURCE, weights, "type", "int").lower()
    if bits not in (4, 8) or kind != "int":
        raise refused(SOURCE, f"{bits} bits of {cut(kind, 80)}", rule="must be 4 or 8 of int")
    size = _size(weights, scales.shape[1], k)
    of = f"n = {n}, k = {k}, {bits} bits and groups of {size}"
    shaped(SOURCE, "weight_packed", packed, (n, -(-k * bits // 32)), of)
    shaped(SOURCE, "weight_scale", scales, (n, -(-k // size)), of)
    spread, group = grouped(SOURCE, scales, size, k)
    codes = fields(packed, bits)[:, :k]
    if _symmetric(tensors, weights):
        signed = (codes ^ 128).view(torch.int8) if bits == 8 else codes.view(torch.int8) - 8
        return Layer(f"int{bits}", signed, spread, None, group)
    if bits == 8:
        raise refused(SOURCE, "8 bits with zero points", rule="8 bits must be symmetric")
    words = required(SOURCE, tensors, "weight_zero_point", rank=2, types=[torch.int32])
    shaped(SOURCE, "weight_zero_point", words, (-(-n * bits // 32), scales.shape[1]), of)
    zeros = fields(words.t(), bits).t()[:n]
    return Layer("uint4", codes, spread, grouped(SOURCE, zeros, size, k)[0], group)


def _plain(tensors: Tensors, weights: Config) -> Layer:
    """weight int8 or e4m3 [n, k] and weight_scale: [n, 1], [1], [n, groups] or a scale a block.

    Integers of 4 bits (W4A8) have a byte each, and zero points one like them.
    """
    types = [torch.int8, torch.float8_e4m3fn]
    weight = required(SOURCE, tensors, "weight", rank=2, types=types)
    kind = "int" if weight.dtype == torch.int8 else "float"
    if (told := word(SOURCE, weights, "type", kind)).lower() != kind:
        raise refused(SOURCE, f"type {brief(told)} of a weight of {weight.dtype}")
    bits = whole(SOURCE, weights, "num_bits", 8)
    if bits != 8 and (bits, kind) != (4, "int"):
        raise refused(
            SOURCE, f"{bits} bits of {kind} in whole bytes", rule="must be 8, or 4 of int"
        )
    scales = required(SOURCE, tensors, "weight_scale", rank=(0, 1, 2), types=SCALES)
    if kind == "float":
        require_fp8_scales(f"{SOURCE}: weight_scale", scales)
    symmetric = _symmetric(tensors, weights)
    if not symmetric and bits == 8:
        raise refused(SOURCE, "8 bits with zero points", rule="8 bits must be symmetric")
    if (block := weights.get("block_structure")) is not None:
        if bits == 4:
            raise refused(SOURCE, "4 bits in blocks", rule="must be 8 bits")
        sizes = _of_text(block) if isinstance(block, str) else block
        return blocks(SOURCE, weight, scales, pair(SOURCE, "block_structure", sizes))
    n, k = weight.shape
    if scales.numel() == 1 and word(SOURCE, weights, "strategy", "tensor") == "tensor":
        scales = scales.reshape(1, 1).expand(n, 1)
    if scales.dim() != 2 or scales.shape[0] != n:
        raise refused(
            SOURCE,
            f"weight_scale is {list(scales.shape)}",
            rule=f"must have a row for each of n = {n}",
        )
    size = _size(weights, scales.shape[1], k)
    if bits == 8:
        return rows(SOURCE, weight, scales, size)
    spread, group = grouped(SOURCE, scales, size, k)
    if symmetric:
        return Layer("int4", weight, spread, None, group)
    points = required(SOURCE, tensors, "weight_zero_point", rank=2, types=[torch.int8])
    shaped(SOURCE, "weight_zero_point", points, tuple(scales.shape), "the scales")
    for name, codes in (("weight", weight), ("weight_zero_point", points)):
        if bool(((codes < -8) | (codes > 7)).any()):
            raise refused(SOURCE, f"{name} beyond 4 bits", rule="must be from -8 to 7")
    zeros, _ = grouped(SOURCE, _unsigned(points), size, k)
    return Layer("uint4", _unsigned(weight), spread, zeros, group)


def _unsigned(codes: Tensor) -> Tensor:
    return (codes + 8).view(torch.uint8)


def _of_text(block: str) -> list[int | str]:
    """The sizes of "128x128", as former releases wrote blocks."""
    return [int(one) if one.isdecimal() and len(one) < 9 else one for one in block.split("x")]


def _symmetric(tensors: Tensors, weights: Config) -> bool:
    """Whether the weight is without zero points; those of 0 that some releases left are none."""
    points = tensors.get("weight_zero_point")
    if points is not None:
        rank = 2 if "weight_packed" in tensors else (0, 1, 2)
        types = [torch.int32, torch.int8, torch.float8_e4m3fn]
        points = required(SOURCE, tensors, "weight_zero_point", rank=rank, types=types)
    none = points is None or (points.dtype != torch.int32 and not bool(points.float().any()))
    symmetric = flag(SOURCE, weights, "symmetric", none)
    if symmetric and not none:
        raise refused(SOURCE, "symmetric, yet a weight_zero_point", rule="must be one of them")
    return symmetric or (none and points is not None)


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
    strategy = word(SOURCE, weights, "strategy", "")
    size = whole(SOURCE, weights, "group_size", 0)
    if strategy in ("channel", "tensor") or size == -1 or (groups == 1 and not size):
        return k
    if strategy not in ("group", ""):
        raise refused(
            SOURCE,
            f"strategy {brief(strategy)} of weights",
            rule="must be 'group', 'channel', 'tensor' or 'block'",
        )
    size = size or -(-k // max(groups, 1))
    if size <= 0:
        raise refused(SOURCE, f"group_size {size}", rule="must be positive, or -1")
    return size


def _layout(tensors: Tensors) -> str:
    packed = tensors.get("weight_packed")
    scales = tensors.get("weight_scale")
    if not isinstance(scales, Tensor) or scales.dtype != torch.uint8:
        scales = None  # no exponents
    if packed is None:
        return "naive-quantized" if scales is None else "mxfp8-quantized"
    if packed.dtype != torch.uint8:
        return "pack-quantized"
    if scales is not None and mxfp8.is_six_bits(packed, scales):
        return "mxfp6-pack-quantized"
    return "nvfp4-pack-quantized" if "weight_global_scale" in tensors else "mxfp4-pack-quantized"


def _require_order(tensors: Tensors, weights: Config) -> None:
    """Raise where values of k are in another order than their groups."""
    order = weights.get("actorder")
    index = tensors.get("weight_g_idx")
    weight_only = isinstance(order, str) and order.lower() in ("weight", "static")
    if not (order is None or order is False or weight_only) or index is not None:
        raise refused(
            SOURCE,
            "act-order: " + (f"actorder {brief(order)}" if index is None else "a weight_g_idx"),
            rule="values of k must be in the order of the groups that they are of",
            fix="quantize with actorder='weight', or none",
        )


def _scheme(config: Config, name: str) -> Config:
    """The group of `config_groups` that is meant for the layer, as compressed-tensors chooses it.

    A target is a name, a pattern after "re:" that names begin with, or a class, here Linear: names
    go first, patterns then, in alphabetic order. Of groups with one target the last has it.
    """
    for field in ("transform_config", "sparsity_config"):
        if (found := mapping(SOURCE, config, field)) and found.get("format") != "dense":
            raise refused(SOURCE, f"{field} {brief(found)}", rule="must be empty")
    ignored = strings(SOURCE, config, "ignore")
    if name and (name in ignored or first_match(SOURCE, _patterns(tuple(ignored)), name)):
        raise refused(SOURCE, f"{brief(name)} is ignored: it is not quantized")
    schemes: dict[str, Config] = {}
    groups = mapping(SOURCE, config, "config_groups")
    for group, scheme in groups.items():
        if not isinstance(scheme, Mapping):
            raise refused(
                SOURCE,
                f"config_groups has {brief(scheme)} as {brief(group)}",
                rule="must be a scheme, written out",
            )
        schemes |= dict.fromkeys(strings(SOURCE, scheme, "targets"), scheme)
    if name and name in schemes:
        return schemes[name]
    pattern = first_match(SOURCE, sorted(_patterns(tuple(schemes))), name)
    target = "Linear" if pattern is None else f"re:{pattern}"
    if target in schemes:
        return schemes[target]
    raise refused(
        SOURCE,
        f"no group of config_groups is for {name or 'a layer without a name'}",
        rule="targets must name it, or Linear",
        fix="pass the layer's name in the checkpoint",
    )


@lru_cache(maxsize=16)
def _patterns(targets: tuple[str, ...]) -> list[str]:
    """Those of targets that are patterns, without "re:": sorted out once for all layers."""
    return [one.removeprefix("re:") for one in targets if one.startswith("re:")]
