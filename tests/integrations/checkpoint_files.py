"""Whole checkpoints of tiny models, in folders, as the packages write them: by small writers.

The layouts of layers are those of written_layers.py. What is around them (names, configurations,
which layers are left out) was compared with models that auto-round 0.16 (its exports auto_round,
auto_gptq and auto_awq) and compressed-tensors 0.20 (ModelCompressor) wrote of the same tiny models.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import written_layers
from safetensors.torch import load_file, save_file
from tiny_models import model
from torch import Tensor
from written_layers import Written

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
GROUP = 64


class Checkpoint(NamedTuple):
    """A model's name in transformers, a quantization_config, and what writes a layer [n, k]."""

    model: str
    config: dict[str, Any]
    write: Callable[[int, int], Written] | None = None


def _scheme(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def _float8(n: int, k: int, block: tuple[int, int] | None, name: str) -> Written:
    """e4m3 with a scale for each block, each row (None: of n), or in all."""
    draw = torch.Generator().manual_seed(n + k)
    weight = torch.randn(n, k, generator=draw).to(torch.float8_e4m3fn)
    rows, columns = block or (n, k)
    counts = -(-n // rows), -(-k // columns)
    scales = torch.rand(counts, generator=draw) * 0.1 + 0.02
    spread = scales.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
    stored = scales if block else scales.reshape(1)
    return {"weight": weight, name: stored}, weight.double() * spread.double()


CHECKPOINTS: dict[str, Checkpoint] = {
    "awq": Checkpoint(
        "Qwen2",
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"},
        lambda n, k: written_layers.awq(n, k, GROUP, symmetric=False),
    ),
    "gptq": Checkpoint(
        "Llama",
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
        lambda n, k: written_layers.gptq(n, k, GROUP, symmetric=True, version=1),
    ),
    "gptq v2, zero points": Checkpoint(
        "Mistral",
        {
            "quant_method": "gptq",
            "bits": 4,
            "group_size": GROUP,
            "checkpoint_format": "gptq_v2",
            "sym": False,
        },
        lambda n, k: written_layers.gptq(n, k, GROUP, symmetric=False, version=2),
    ),
    "auto-round": Checkpoint(
        "Qwen3",
        {
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "bits": 4,
            "group_size": GROUP,
            "sym": True,
            "data_type": "int",
        },
        lambda n, k: written_layers.gptq(n, k, GROUP, symmetric=True, version=1, g_idx=False),
    ),
    "compressed-tensors": Checkpoint(
        "Mistral",
        _scheme("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
        lambda n, k: written_layers.pack_quantized(n, k, GROUP, symmetric=True),
    ),
    "compressed-tensors, fp8 by rows": Checkpoint(
        "Llama",
        _scheme("float-quantized", num_bits=8, type="float", strategy="channel"),
        lambda n, k: _float8(n, k, (1, k), "weight_scale"),
    ),
    "compressed-tensors, fp8 in all": Checkpoint(
        "Llama",
        _scheme("float-quantized", num_bits=8, type="float", strategy="tensor"),
        lambda n, k: _float8(n, k, None, "weight_scale"),
    ),
    "fp8 in blocks": Checkpoint(
        "Qwen3",
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        lambda n, k: _float8(n, k, (128, 128), "weight_scale_inv"),
    ),
    "mxfp4": Checkpoint(
        "GptOss",
        {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]},
    ),
}
# Mixtures of experts, each of which has layers of its own in the checkpoint.
EXPERTS: dict[str, Checkpoint] = {
    name: Checkpoint(model, *CHECKPOINTS[of][1:])
    for name, model, of in (
        ("awq, Qwen", "Qwen3Moe", "awq"),
        ("gptq, Mixtral", "Mixtral", "gptq"),
        ("compressed-tensors, Mixtral", "Mixtral", "compressed-tensors"),
        ("fp8 in blocks, Qwen", "Qwen3Moe", "fp8 in blocks"),
    )
}


def write(folder: Path, name: str, shards: int = 1, **sizes: Any) -> dict[str, Tensor]:
    """Write a checkpoint of CHECKPOINTS.

    Returns:
        The weights that were written, in float64, by the names of layers (of experts: [n, k] with
        the name that a quantized model has).
    """
    kind, config, writer = {**CHECKPOINTS, **EXPERTS}[name]
    made = model(kind, "eager", **{**SIZES, **sizes})
    made.save_pretrained(folder)
    given = load_file(folder / "model.safetensors")
    tensors: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for key, value in given.items():
        layer = key.removesuffix(".weight")
        if writer is not None and layer.endswith(("_proj", ".w1", ".w2", ".w3")):
            written, weights[layer] = writer(*value.shape)
            tensors |= {f"{layer}.{own}": one for own, one in written.items()}
        elif writer is None and key.endswith("_proj") and value.dim() == 3:
            tensors |= _mxfp4(key, value.shape, weights)
        else:
            tensors[key] = value
    save(folder, tensors, shards)
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
    return weights


def _mxfp4(key: str, shape: torch.Size, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """gpt-oss's blocks and scales of experts whose parameter is [experts, k, n]."""
    experts, k, n = shape
    draw = torch.Generator().manual_seed(n + k)
    codes = torch.randint(0, 16, (experts, n, k // 32, 32), generator=draw)
    scales = torch.randint(119, 124, (experts, n, k // 32), generator=draw)
    blocks = codes[..., ::2] + 16 * codes[..., 1::2]
    wide = E2M1.double()[codes] * 2.0 ** (scales.double() - 127)[..., None]
    weights |= {f"{key}.{one}": wide[one].flatten(1) for one in range(experts)}
    return {f"{key}_blocks": blocks.to(torch.uint8), f"{key}_scales": scales.to(torch.uint8)}


def save(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> None:
    """Write tensors to one file, or to several and an index."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    tensors = {key: value.clone().contiguous() for key, value in tensors.items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    weight_map = {}
    for one in range(shards):
        file = f"model-{one + 1:05}-of-{shards:05}.safetensors"
        part = {key: value for i, (key, value) in enumerate(tensors.items()) if i % shards == one}
        save_file(part, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def change(folder: Path, edit: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a checkpoint in one file."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save(folder, tensors)


def configure(folder: Path, **settings: Any) -> None:
    """Change a checkpoint's quantization_config."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"].update(settings)
    path.write_text(json.dumps(config))
