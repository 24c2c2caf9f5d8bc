"""transformers' layers of BitNet and a tiny model of them, with random ternary weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.integrations.bitnet import (
    AutoBitLinear,
    BitLinear,
    pack_weights,
    replace_with_bitnet_linear,
)


def filled(layer: Any, seed: int = 0) -> Any:  # noqa: ANN401
    """A layer with ternary weights and a scale, as a checkpoint fills it."""
    draw = torch.Generator().manual_seed(seed)
    codes = torch.randint(-1, 2, (layer.out_features, layer.in_features), generator=draw)
    scale = torch.rand(1, generator=draw) / 4 + 0.1
    with torch.no_grad():
        if type(layer) is BitLinear:
            layer.weight = pack_weights(codes)
            layer.weight_scale = (1 / scale).to(layer.dtype)
        else:
            layer.weight.copy_(codes)
            layer.weight_scale = scale.to(layer.weight.dtype)
        if layer.bias is not None:
            layer.bias.copy_(torch.randn(layer.bias.shape, generator=draw))
    return layer.requires_grad_(False)


def bitnet(kind: str, **options: Any) -> Any:  # noqa: ANN401
    """A tiny BitNet with random ternary weights, as transformers loads one."""
    torch.manual_seed(0)
    config = transformers.BitNetConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.BitNetForCausalLM(config)
    how = transformers.BitNetQuantConfig(
        linear_class=kind, **{"quantization_mode": "offline", **options}
    )
    model = replace_with_bitnet_linear(model, ["lm_head"], quantization_config=how)
    for seed, module in enumerate(model.modules()):
        if isinstance(module, BitLinear | AutoBitLinear):
            module.to_empty(device="cpu")
            filled(module, seed)
    model.is_quantized = True
    return model.eval()
