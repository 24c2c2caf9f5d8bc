"""Experts of transformers in fp8 with block scales, as DeepSeek-V3 and Qwen3 in fp8 have them.

Tokens are quantized by blocks of 1x128, and multiplied by weights that stay as the checkpoint has
them. What kernels do not take transformers computes: `unfit` says why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations import finegrained_fp8

from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.integrations.expert_layers import (
    count_refusal,
    device_refusal,
    transform_refusal,
    weight_names,
)
from warploom.integrations.experts import experts
from warploom.integrations.gated_mlp import FUNCTIONS
from warploom.integrations.linear_rules import PRODUCTS
from warploom.runtime.families._product.steps.gate import SWIGLU_OAI
from warploom.runtime.families.gemm.block_scales import TYPES, blocks_of

BLOCK = (SCALE_BLOCK, SCALE_BLOCK)  # elements of a weight that share a scale
_ALIGNMENT = 16  # elements of a row: 16 bytes


def forward(
    self: torch.nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Return the output of a layer of experts [tokens, H], as transformers' registry asks.

    hidden_states are [tokens, H], top_k_index and top_k_weights [tokens, k]. Ids that are no expert
    of the module, as those of other ranks, add nothing.
    """
    module: Any = self
    if refusal(module, hidden_states) is not None:
        own = finegrained_fp8.fp8_grouped_mm_experts_forward
        if module.activation_scheme != "dynamic":  # which only the loop over experts takes
            own = type(module).forward.__wrapped__
        by_transformers: Callable[..., torch.Tensor] = own
        return by_transformers(module, hidden_states, top_k_index, top_k_weights)
    first, second = weight_names(module)
    return experts(
        *(hidden_states, top_k_index, top_k_weights),
        *(getattr(module, first), getattr(module, second)),
        **gate_of(module),
        gate_up_scale=getattr(module, f"{first}_scale_inv"),
        down_scale=getattr(module, f"{second}_scale_inv"),
        first_expert=0,  # expert parallelism has ids past the last for those of other ranks
    )


def gate_of(module: Any) -> dict[str, Any]:  # noqa: ANN401
    """What a layer does between its products: a gate by name, or a function; and its numbers."""
    if not module.has_gate:
        return {"gate": module.act_fn}
    own = type(module)._apply_gate is finegrained_fp8.FP8Experts._apply_gate
    changes = ("gate_softcap", "up_softcap", "swiglu_alpha", "swiglu_limit")
    _, _, alpha, limit = changed = [getattr(module, name, None) for name in changes]
    if own and changed == [None] * 4 and type(module.act_fn).__name__ in FUNCTIONS:
        return {"gate": FUNCTIONS[type(module.act_fn).__name__]}
    if own and changed[:2] == [None] * 2 and alpha is not None and limit is not None:
        return {"gate": SWIGLU_OAI, "alpha": alpha, "limit": limit}
    return {"gate": module._apply_gate}


def refusal(module: Any, hidden: torch.Tensor) -> str | None:  # noqa: ANN401
    """Why transformers computes a layer on tokens, if it does."""
    if found := device_refusal(hidden) or unfit(module):
        return found
    if hidden.dtype not in PRODUCTS:
        return f"tokens are {hidden.dtype}"
    if torch.is_grad_enabled() and any(one.requires_grad for one in _quantized(module)):
        return "a weight in fp8, or its scales, require grad, and Warploom's are frozen"
    return transform_refusal(module, hidden)


def _quantized(module: Any) -> list[torch.Tensor]:  # noqa: ANN401
    """The weights of a layer, and their scales."""
    names = weight_names(module)
    return [getattr(module, f"{name}{end}") for name in names for end in ("", "_scale_inv")]


def unfit(module: Any) -> str | None:  # noqa: ANN401
    """Why there is no kernel for a layer's weights, of any tokens."""
    if tuple(module.block_size or ()) != BLOCK or module.activation_scheme != "dynamic":
        return f"scales are of {module.block_size} {module.activation_scheme}, not 128x128 dynamic"
    for name in weight_names(module):
        weight, scale = getattr(module, name), getattr(module, f"{name}_scale_inv")
        if weight.dtype != torch.float8_e4m3fn or scale.dtype not in TYPES:
            return f"{name} is {weight.dtype} with scales of {scale.dtype}"
        count, n, k = weight.shape
        if n % _ALIGNMENT or k % _ALIGNMENT:
            return f"its sizes are no multiples of {_ALIGNMENT}"
        if scale.shape != (count, blocks_of(n), blocks_of(k)):
            return f"{name} {list(weight.shape)} has scales {list(scale.shape)}"
        if found := count_refusal(count):
            return found
    return None
