"""Tiny models of transformers with random weights, whose attention decides what they say."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
import transformers

VOCABULARY = 64
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
WINDOW = 5
# The model's name in transformers, and what its configuration has beside sizes.
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen2": {"use_sliding_window": False},
    "Qwen3": {},
    "Mistral": {"sliding_window": WINDOW},
    "Gemma2": {
        "sliding_window": WINDOW,
        "attn_logit_softcapping": 2.0,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": None,
    },
    "GptOss": {
        "sliding_window": WINDOW,
        "num_local_experts": 2,
        "num_experts_per_tok": 2,
    },
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128},
    "Mixtral": {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {  # values have fewer elements than keys
        "num_key_value_heads": 4,
        "head_dim": 8,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "first_k_dense_replace": 2,
    },
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {},
    "ModernBert": {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2},
}


@cache
def _made(name: str, head: str, sizes: tuple[tuple[str, Any], ...]) -> torch.nn.Module:
    torch.manual_seed(0)
    kind = getattr(transformers, f"{name}Config")
    own = DECODERS.get(name, ENCODERS.get(name, {}))
    config = kind(**{**_SIZES, **own, **dict(sizes)})
    model = getattr(transformers, f"{name}{head}")(config)
    for parameter_name, parameter in model.named_parameters():
        if parameter_name.endswith("sinks"):  # of the size of scores
            torch.nn.init.normal_(parameter)
    return model.bfloat16().eval()


def model(
    name: str,
    attention: str,
    dtype: torch.dtype = torch.bfloat16,
    head: str = "ForCausalLM",
    **sizes: int | float,
) -> Any:  # noqa: ANN401
    """A new model of always the same weights, bf16 numbers in `dtype`; `sizes` are not tiny."""
    made: Any = copy.deepcopy(_made(name, head, tuple(sizes.items()))).to(dtype)
    made.set_attn_implementation(attention)
    return made
