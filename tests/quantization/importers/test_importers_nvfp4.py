"""NVFP4 of compressed-tensors and of ModelOpt: the same weight, by two conventions of one scale."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization.importers import import_weight

NAME = "model.layers.0.mlp.up_proj"
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]).double()
N, K = 24, 96
CT = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group",
                        "group_size": 16, "symmetric": True},
        }
    },
}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "*.router"]}


def written(kind: str) -> tuple[dict[str, Tensor], dict[str, Any], Tensor]:
    """Tensors, the configuration, and the weight [n, k] in float64."""
    draw = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (N, K), generator=draw)
    bits = torch.randint(0, 127, (N, K // 16), generator=draw, dtype=torch.uint8)
    scales = bits.view(torch.float8_e4m3fn)
    factor = torch.tensor(0.37)
    halves = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
    values = E2M1[codes & 7] * (1 - 2.0 * (codes >> 3)) * scales.double().repeat_interleave(16, 1)
    if kind == "modelopt":
        tensors = {"weight": halves, "weight_scale": scales, "weight_scale_2": factor}
        return tensors, MODELOPT, values * factor.double()
    tensors = {"weight_packed": halves, "weight_scale": scales}
    tensors["weight_global_scale"] = factor.reshape(1)
    return tensors, CT, values * (1 / factor).double()


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("kind", ["compressed-tensors", "modelopt"])
def test_a_weight_is_what_was_written(kind: str, bare: bool) -> None:
    tensors, config, weight = written(kind)
    named = {f"{NAME}.{key}": one for key, one in tensors.items()}
    packed = import_weight(named, None if bare else config, name=NAME)
    assert (packed.metadata.format, packed.metadata.group, packed.shape) == ("nvfp4", 16, (N, K))
    assert torch.equal(packed.dequantize(torch.float64), weight)


def test_modelopts_own_file_is_read_too() -> None:
    tensors, _, weight = written("modelopt")
    settings = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
    config = {"quant_method": "modelopt", "quantization": settings}
    assert torch.equal(import_weight(tensors, config).dequantize(torch.float64), weight)


def with_first(tensor: Tensor, value: float) -> Tensor:
    changed = tensor.clone().float() if tensor.dtype == torch.float8_e4m3fn else tensor.clone()
    changed.view(-1)[0] = value
    return changed.to(tensor.dtype)


REFUSED: dict[str, tuple[str, str, Callable[[dict[str, Tensor], dict[str, Any]], Any]]] = {
    "divisor 0": (
        "compressed-tensors",
        "weight_global_scale 0: must be finite, and not be 0",
        lambda t, c: t.update(weight_global_scale=torch.zeros(1)),
    ),
    "factor nan": (
        "modelopt",
        "weight_scale_2 nan: must be finite",
        lambda t, c: t.update(weight_scale_2=torch.tensor(math.nan)),
    ),
    "scale nan": (
        "modelopt",
        "scale nan of row 0, group 0: must be finite",
        lambda t, c: t.update(weight_scale=with_first(t["weight_scale"], math.nan)),
    ),
    "no global scale": (
        "compressed-tensors",
        "no tensor weight_global_scale",
        lambda t, c: t.pop("weight_global_scale"),
    ),
    "several": (
        "modelopt",
        r"weight_scale_2 is \[2\]: must be one number",
        lambda t, c: t.update(weight_scale_2=torch.ones(2)),
    ),
    "shape": (
        "modelopt",
        r"weight_scale is \[24, 5\]: must be \[24, 6\]",
        lambda t, c: t.update(weight_scale=t["weight_scale"][:, :5]),
    ),
    "algorithm": (
        "modelopt",
        "quant_algo 'FP8': must be NVFP4",
        lambda t, c: c.update(quant_algo="FP8"),
    ),
    "awq": (
        "modelopt",
        "activations that are scaled first",
        lambda t, c: t.update(pre_quant_scale=torch.ones(K)),
    ),
    "group": ("modelopt", "group_size 32: must be 16", lambda t, c: c.update(group_size=32)),
    "left out": (
        "modelopt",
        "is not quantized: ignore leaves it out",
        lambda t, c: c.update(ignore=["*.mlp.*"]),
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_no_exact_weight_is_named(what: str) -> None:
    kind, message, change = REFUSED[what]
    tensors, config, _ = written(kind)
    config = dict(config)
    change(tensors, config)
    with pytest.raises(ProblemError, match=message):
        import_weight({f"{NAME}.{key}": one for key, one in tensors.items()}, config, name=NAME)
