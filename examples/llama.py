"""Llama models of transformers with random weights: what is timed depends on their shape alone."""

from __future__ import annotations

from typing import Any

import click
import torch

try:
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    raise click.ClickException(
        "a Llama without transformers: it is an optional dependency: "
        "pip install 'warploom[transformers]'"
    ) from error

# 4 layers of Llama 3 8B, with a vocabulary that leaves the time to the layers.
WHOLE: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
}
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
TEXT_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")  # that begin, end and fill texts


def random_llama(device: torch.device, *, tiny: bool, vocabulary: int | None = None) -> Any:  # noqa: ANN401 (transformers' models are called with anything)
    """A Llama in bf16, of the same random weights each time, that attends by torch's sdpa.

    It knows no token that ends a text, so that it generates as many as it is asked for.
    """
    torch.manual_seed(0)
    fields = (TINY if tiny else WHOLE) | dict.fromkeys(TEXT_TOKENS)
    if vocabulary is not None:
        fields["vocab_size"] = vocabulary
    config = LlamaConfig(**fields | {"attn_implementation": "sdpa", "dtype": torch.bfloat16})
    with device:
        return LlamaForCausalLM(config).bfloat16()


def device_name(device: torch.device) -> str:
    """What a device is called in results."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
