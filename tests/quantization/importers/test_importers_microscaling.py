"""NVFP4, MXFP8 and MXFP6: the same weights, by every convention of their scales."""

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


# ---- MXFP8 and MXFP6 -----------------------------------------------------------------------------


def of_powers_of_two(bits: int) -> tuple[dict[str, Tensor], Tensor]:
    """Every code beside others, under exponents of every size that kernels take."""
    draw = torch.Generator().manual_seed(bits)
    exponents = torch.randint(90, 127, (N, K // 32), generator=draw, dtype=torch.uint8)
    factors = (2.0 ** (exponents.double() - 127)).repeat_interleave(32, 1)
    codes = torch.arange(N * K).view(N, K) % (1 << bits)
    if bits == 8:
        codes = torch.where((codes & 127) == 127, 0, codes)
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": exponents}, values.double() * factors
    mantissa, exponent = codes & 7, codes >> 3 & 3  # e2m3, of bias 1
    sizes = torch.where(exponent == 0, mantissa / 8, (1 + mantissa / 8) * 2.0 ** (exponent - 1))
    word = sum((codes[:, i::4] << 6 * i for i in range(4)), torch.zeros(1).long())
    packed = torch.stack([word >> 8 * i & 255 for i in range(3)], -1).flatten(1).to(torch.uint8)
    weight = sizes.double() * (1 - 2.0 * (codes >> 5)) * factors
    return {"weight_packed": packed, "weight_scale": exponents}, weight


@pytest.mark.parametrize("activations", ["16-bit", "e4m3"])
@pytest.mark.parametrize("layout", ["mxfp8-quantized", "mxfp6-pack-quantized", None])
@pytest.mark.parametrize("bits", [8, 6])
def test_powers_of_two_are_read_exactly(
    bits: int, layout: str | None, activations: str, caplog: pytest.LogCaptureFixture
) -> None:
    if layout is not None and str(bits) not in layout:
        pytest.skip("the other layout")
    tensors, weight = of_powers_of_two(bits)
    config = None
    if layout is not None:
        scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": 32}}
        config = {"quant_method": "compressed-tensors", "format": layout}
        config["config_groups"] = {"group_0": scheme}
    with caplog.at_level("INFO", logger="warploom"):
        packed = import_weight(
            {f"{NAME}.{key}": one for key, one in tensors.items()},
            config,
            name=NAME,
            activations=activations,  # type: ignore[arg-type]
        )
    assert (packed.metadata.format, packed.metadata.group) == ("mxfp8", 32)
    assert torch.equal(packed.dequantize(torch.float64), weight)
    assert ("MXFP6 is stored as mxfp8" in caplog.text) == (bits == 6)


@pytest.mark.parametrize(
    ("bits", "change", "message"),
    [
        (8, {"weight_scale": torch.full((N, K // 32), 255).byte()}, "scale 255 of row 0, group 0"),
        (8, {"weight_scale": torch.zeros(N, 2).byte()}, r"weight_scale is \[24, 2\]: must be"),
        (6, {"weight_packed": torch.zeros(N, 71).byte()}, "must have rows of whole 3 bytes"),
        (8, {"weight_scale": torch.full((N, K // 32), 127).byte()}, "scale 127 .* at most 0.5"),
    ],
)
def test_other_powers_of_two_are_named(bits: int, change: dict[str, Tensor], message: str) -> None:
    tensors, _ = of_powers_of_two(bits)
    layout = "mxfp8-quantized" if bits == 8 else "mxfp6-pack-quantized"
    scheme = {"targets": ["Linear"], "weights": {"num_bits": bits, "group_size": 32}}
    config = {"quant_method": "compressed-tensors", "format": layout}
    config["config_groups"] = {"group_0": scheme}  # type: ignore[assignment]
    with pytest.raises(ProblemError, match=message):
        import_weight({**tensors, **change}, config)
