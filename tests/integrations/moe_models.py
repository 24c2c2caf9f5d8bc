"""Tiny configurations of transformers' models with mixtures of experts, on random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 96
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LATENT: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}
# By the name of the model's folder: what it has of its own. gpt_oss has transposed weights, biases
# and a gate of its own; nemotron_h has experts without a gate.
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 32,
    },
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "head_dim": 16,
    },
    "deepseek_v2": {**_LATENT, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1},
    "deepseek_v3": {**_LATENT, "q_lora_rank": 16, "n_group": 2, "topk_group": 1},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "intermediate_size": 48,
        "sliding_window": 16,
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_scaling": None,
    },
    "glm4_moe": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
        "head_dim": 16,
    },
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 1,
        "expert_layer_offset": 0,
        "mamba_d_state": 8,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
    },
    "phimoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "nemotron_h": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 48,
        "moe_layer_start_index": 0,
    },
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
}


def model(
    name: str, dtype: torch.dtype = torch.float32, device: str = "cpu", **others: object
) -> Any:  # noqa: ANN401
    """A model whose weights are large enough for experts to differ."""
    config = AutoConfig.for_model(name, **{**_COMMON, **MODELS[name], **others})
    config._attn_implementation = "eager"
    made = AutoModelForCausalLM.from_config(config)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.08)
    return made.to(dtype).to(device)


def tokens(*shape: int) -> torch.Tensor:
    """Random ids of words, none of which ends a text."""
    return torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
