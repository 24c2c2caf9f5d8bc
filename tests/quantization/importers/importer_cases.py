"""Layers as checkpoints have them, and what the packages that wrote them make of their weights.

Each function below needs its package; tests/quantization/importers/fixtures has what it made once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

NAME = "model.layers.0.mlp.up_proj"
FIXTURES = Path(__file__).with_name("fixtures")


@dataclass(frozen=True, eq=False)
class Case:
    """One layer: `tensors` by their names in the checkpoint, and the package's `weight` [n, k]."""

    label: str
    config: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    weight: Tensor
    metadata: Mapping[str, str] = field(default_factory=dict)


def save(cases: list[Case], path: Path) -> None:
    """Write cases to one safetensors file."""
    tensors = {
        f"{case.label}/{key}": tensor.contiguous()
        for case in cases
        for key, tensor in {**case.tensors, "": case.weight}.items()
    }
    told = {case.label: {"config": case.config, "metadata": case.metadata} for case in cases}
    save_file(tensors, path, {label: json.dumps(one) for label, one in told.items()})


def load(path: Path) -> list[Case]:
    """Return the cases of a file that `save` wrote."""
    with safe_open(path, "pt") as file:
        told = {label: json.loads(text) for label, text in sorted(file.metadata().items())}
        found: dict[str, dict[str, Tensor]] = {label: {} for label in told}
        for key in file.keys():  # noqa: SIM118 - it is no dictionary
            label, _, name = key.partition("/")
            found[label][name] = file.get_tensor(key)
    return [
        Case(label, told[label]["config"], tensors, tensors.pop(""), told[label]["metadata"])
        for label, tensors in found.items()
    ]


def normal(seed: int, n: int, k: int, dtype: torch.dtype) -> Tensor:
    """Weights around 0, with one row of zeros and one that is positive throughout."""
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) * 0.02
    weight[1], weight[2] = 0, weight[2].abs() + 0.01
    return weight.to(dtype)


# ---- compressed-tensors --------------------------------------------------------------------------


def compressed_tensors(seed: int) -> Iterator[Case]:
    """Packed integers, plain integers and float8, MXFP4."""
    bf16, fp16 = torch.bfloat16, torch.float16
    group = {"num_bits": 4, "type": "int", "strategy": "group"}
    channel = {"type": "int", "strategy": "channel"}
    float8 = {"num_bits": 8, "type": "float"}
    block = {**float8, "strategy": "block"}
    zeros = {"symmetric": False}
    exponents = {"group_size": 32, "scale_dtype": "torch.uint8"}
    packed, mx = "pack-quantized", "mxfp4-pack-quantized"
    for label, layout, dtype, n, k, weights in (
        ("int4 g32", packed, bf16, 11, 96, {**group, "group_size": 32}),
        ("int4 g64 fp16", packed, fp16, 9, 192, {**group, "group_size": 64}),
        ("int4 g128", packed, bf16, 9, 256, {**group, "group_size": 128}),
        ("int4 g256", packed, bf16, 5, 512, {**group, "group_size": 256}),
        ("int4 channel", packed, bf16, 17, 100, {**channel, "num_bits": 4}),
        ("int4 g32 zeros", packed, bf16, 11, 96, {**group, "group_size": 32, **zeros}),
        ("int4 g128 zeros", packed, bf16, 9, 256, {**group, "group_size": 128, **zeros}),
        ("int4 channel zeros", packed, bf16, 17, 100, {**channel, "num_bits": 4, **zeros}),
        ("int8 g64", packed, bf16, 9, 192, {**group, "num_bits": 8, "group_size": 64}),
        ("int8 packed channel", packed, bf16, 9, 102, {**channel, "num_bits": 8}),
        ("int8 channel", "int-quantized", bf16, 9, 100, {**channel, "num_bits": 8}),
        ("e4m3 channel", "float-quantized", bf16, 9, 100, {**float8, "strategy": "channel"}),
        ("e4m3 tensor", "float-quantized", bf16, 9, 100, {**float8, "strategy": "tensor"}),
        ("e4m3 block", "float-quantized", bf16, 21, 160, {**block, "block_structure": [16, 64]}),
        ("mxfp4", mx, bf16, 11, 96, {**group, "type": "float", **exponents}),
    ):
        yield _compressed(label, layout, normal(seed, n, k, dtype), weights)


def _compressed(label: str, layout: str, weight: Tensor, weights: dict[str, Any]) -> Case:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme = QuantizationScheme.model_validate({"targets": ["Linear"], "weights": weights})
    parts = _parts(weight, weights)
    scale, zero = calculate_qparams(parts.amin(dim=-1), parts.amax(dim=-1), scheme.weights)
    if layout.startswith("mxfp4"):
        scale = 2.0 ** (scale.float() - 127)
    given = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_zero_point": zero}
    compressor = BaseCompressor.get_value_from_registry(layout)
    made = compressor.compress(given, scheme)
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=layout, ignore=["lm_head"]
    )
    return Case(
        label,
        config.model_dump(mode="json"),
        {f"{NAME}.{key}": tensor for key, tensor in made.items()},
        compressor.decompress(made, scheme)["weight"],
    )


def _parts(weight: Tensor, weights: dict[str, Any]) -> Tensor:
    """`weight` with what has one scale along the last dimension, as its observer would see it."""
    if weights["strategy"] == "group":
        return weight.unflatten(1, (-1, weights["group_size"]))
    if weights["strategy"] == "channel":
        return weight[:, None]
    if weights["strategy"] == "tensor":
        return weight.reshape(1, -1)
    (rows, columns), (n, k) = weights["block_structure"], weight.shape
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    return padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2).flatten(-2)


# ---- torchao -------------------------------------------------------------------------------------


def torchao(seed: int) -> Iterator[Case]:
    """What current releases write on a machine without a GPU, and their Int4Tensor."""
    from torchao import quantization as ao
    from torchao.quantization.granularity import PerRow, PerTensor

    asymmetric = ao.MappingType.ASYMMETRIC

    def intx(bits: int, granularity: object, **given: object) -> object:
        return ao.IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{bits}"), granularity=granularity, **given
        )

    for label, n, k, config in (
        ("int4 g32", 11, 96, intx(4, ao.PerGroup(32))),
        ("int4 g64", 9, 192, intx(4, ao.PerGroup(64))),
        ("int4 g128 zeros", 9, 256, intx(4, ao.PerGroup(128), mapping_type=asymmetric)),
        ("int4 channel", 17, 100, intx(4, ao.PerAxis(0))),
        ("int8 g64", 9, 192, intx(8, ao.PerGroup(64))),
        ("int8 channel", 9, 100, ao.Int8WeightOnlyConfig()),
        ("e4m3 row", 9, 100, ao.Float8WeightOnlyConfig(granularity=PerRow())),
        ("e4m3 tensor", 9, 100, ao.Float8WeightOnlyConfig(granularity=PerTensor())),
    ):
        linear = torch.nn.Linear(k, n, bias=False)
        weight = normal(seed, n, k, torch.bfloat16)
        if label == "e4m3 row":
            weight[1] = 1  # a row of zeros would be NaN: torchao divides it by a scale of 0
        linear.weight = torch.nn.Parameter(weight)
        ao.quantize_(linear, config)
        yield torchao_case(label, linear.weight.data, linear.weight.dequantize())
    yield _int4_tensor(seed)


def torchao_case(label: str, made: Tensor, weight: Tensor) -> Case:
    """The case of one of torchao's tensors, flattened as its safetensors files are."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict({f"{NAME}.weight": made})
    return Case(label, {"quant_method": "torchao"}, tensors, weight, metadata)


def _int4_tensor(seed: int) -> Case:
    """An Int4Tensor, as its float8 path makes it: symmetric, zero points of 0."""
    from torchao.quantization import Int4Tensor

    codes = torch.randint(-8, 8, (9, 256), generator=torch.Generator().manual_seed(seed))
    scale = (normal(seed, 9, 2, torch.bfloat16).abs() + 0.001).t().contiguous()
    halves = ((codes[:, 1::2] << 4) | (codes[:, ::2] & 15)).to(torch.uint8).view(torch.int8)
    made = Int4Tensor(halves, scale, torch.zeros_like(scale), [1, 128], codes.shape)
    weight = codes.to(torch.bfloat16) * scale.t().repeat_interleave(128, dim=1)
    return torchao_case("Int4Tensor g128", made, weight)


# ---- AutoAWQ and GPTQModel -----------------------------------------------------------------------


def _affine(weight: Tensor, size: int, bits: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """fp16 scales and whole zero points [n, groups] that both packages pack a weight by."""
    parts = weight.float().unflatten(1, (-1, size))
    low, high = parts.amin(dim=-1).clamp(max=0), parts.amax(dim=-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scales = ((high - low) / (2**bits - 1)).clamp(min=1e-4).half()
    zeros = (-low / scales.float()).round().clamp(0, 2**bits - 1)
    return scales, torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros


def awq(seed: int) -> Iterator[Case]:
    """The layout "gemm", packed by the package's layer."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    for label, n, k, size in (
        ("g32", 32, 96, 32),
        ("g64", 64, 64, 64),  # one group
        ("g128", 32, 256, 128),
        ("channel", 32, 100, -1),
    ):
        linear = torch.nn.Linear(k, n, bias=False, dtype=torch.float16)
        linear.weight = torch.nn.Parameter(normal(seed, n, k, torch.float16))
        wide = k if size == -1 else size
        scales, zeros = _affine(linear.weight.detach(), wide, 4, symmetric=False)
        made = WQLinear_GEMM.from_linear(linear, 4, wide, scales=scales.t(), zeros=zeros.t())
        found = {key: getattr(made, key) for key in ("qweight", "qzeros", "scales")}
        config = {
            "quant_method": "awq",
            "bits": 4,
            "group_size": size,
            "zero_point": True,
            "version": "gemm",
        }
        weight = dequantize_gemm(*found.values(), 4, wide).t()
        yield Case(label, config, {f"{NAME}.{key}": one for key, one in found.items()}, weight)


def gptq(seed: int) -> Iterator[Case]:
    """v1 and v2, with and without zero points, packed by the package's layer."""
    for label, n, k, size, bits, symmetric, version in (
        ("v1 g32", 16, 96, 32, 4, True, 1),
        ("v1 g128", 8, 256, 128, 4, True, 1),
        ("v1 channel", 24, 96, -1, 4, True, 1),
        ("v1 g64 zeros", 16, 192, 64, 4, False, 1),
        ("v2 g64 zeros", 16, 192, 64, 4, False, 2),
        ("v2 g128", 12, 256, 128, 4, True, 2),  # qzeros has places for 16
        ("v2 short last group", 8, 160, 64, 4, False, 2),
        ("v1 g64 8 bits", 8, 192, 64, 8, True, 1),
        ("v2 channel 8 bits", 12, 96, -1, 8, True, 2),
    ):
        yield _gptq(label, normal(seed, n, k, torch.float16), size, bits, symmetric, version)


def _gptq(label: str, weight: Tensor, size: int, bits: int, symmetric: bool, version: int) -> Case:
    from gptqmodel.nn_modules.qlinear import PackableQuantLinear
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import (
        convert_gptq_v1_to_v2_format_module,
        convert_gptq_v2_to_v1_format_module,
    )

    n, k = weight.shape
    wide = k if size == -1 else size
    padded = torch.nn.functional.pad(weight, (0, -k % wide))
    scales, zeros = _affine(padded, wide, bits, symmetric)
    linear = torch.nn.Linear(k, n, bias=False, dtype=torch.float16)
    linear.weight = torch.nn.Parameter(weight)
    given = {"bits": bits, "group_size": size, "sym": symmetric, "desc_act": False}
    made = TorchLinear(**given, in_features=k, out_features=n, bias=False, register_buffers=True)
    made.pack_original(linear, scales, zeros, torch.arange(k, dtype=torch.int32) // wide)
    if version == 1:
        convert_gptq_v2_to_v1_format_module(made, made)
    tensors = {f"{NAME}.{key}": one.clone() for key, one in made.state_dict().items()}
    if version == 1:
        convert_gptq_v1_to_v2_format_module(made, bits, torch.int32)
    made._init_wf_unsqueeze_buffers()
    config = {
        "quant_method": "gptq",
        **given,
        "checkpoint_format": "gptq" if version == 1 else "gptq_v2",
        "meta": {"quantizer": ["gptqmodel:7.7.0"]},
    }
    return Case(label, config, tensors, PackableQuantLinear.dequantize_weight(made).t().detach())


# ---- transformers --------------------------------------------------------------------------------


def mxfp4(seed: int) -> Iterator[Case]:
    """gpt-oss's blocks and scales: every code under scales of all magnitudes, three experts."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    draw = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, 11, 3, 16), generator=draw, dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 11, 3), generator=draw, dtype=torch.uint8)
    scales[:, 0] = torch.tensor([0, 1, 254])  # the smallest are subnormal, the largest overflow
    weight = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    yield Case("three experts", {"quant_method": "mxfp4"}, tensors, weight)


def fp8(seed: int) -> Iterator[Case]:
    """A scale for each block, of which transformers dequantizes whole ones."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = normal(seed, 32, 192, torch.float32).mul(400).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3, generator=torch.Generator().manual_seed(seed)) + 0.5
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 64]}
    tensors = {f"{NAME}.weight": weight, f"{NAME}.weight_scale_inv": scales}
    yield Case("blocks", config, tensors, Fp8Dequantize(None)._dequantize_one(weight, scales))


def bitnet(seed: int) -> Iterator[Case]:
    """Both classes of layers: the scale of one divides, that of the other multiplies."""
    from transformers.integrations.bitnet import pack_weights, unpack_weights

    draw = torch.Generator().manual_seed(seed)
    for kind in ("bitlinear", "autobitlinear", None):
        codes = torch.randint(-1, 2, (24, 96), generator=draw)
        scale = (torch.rand(1, generator=draw) + 0.5).bfloat16()
        packed = pack_weights(codes.clone())
        config: dict[str, object] = {"quant_method": "bitnet", "quantization_mode": "offline"}
        if kind is not None:
            config["linear_class"] = kind
        tensors = {f"{NAME}.weight": packed, f"{NAME}.weight_scale": scale}
        with torch.compiler.set_stance("force_eager"):
            weight = unpack_weights(packed, torch.float32)
        factor = scale.float()
        weight = weight * factor if kind == "autobitlinear" else weight / factor
        yield Case(kind or "by default", config, tensors, weight)


SOURCES: dict[str, tuple[str, Callable[[int], Iterator[Case]]]] = {
    "compressed-tensors": ("compressed_tensors", compressed_tensors),
    "torchao": ("torchao", torchao),
    "awq": ("awq", awq),
    "gptq": ("gptqmodel", gptq),
    "mxfp4": ("transformers", mxfp4),
    "fp8": ("transformers", fp8),
    "bitnet": ("transformers", bitnet),
}
