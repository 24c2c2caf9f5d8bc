"""`experts_implementation="warploom"` for transformers: its experts on Warploom's kernels.

`register` adds a function to each of transformers' two registries. Layers without kernels run
by what transformers itself would choose, to the same result: `refusal` says which, and why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.integrations import finegrained_fp8, moe

from warploom.integrations import fp8_experts
from warploom.integrations.expert_layers import (
    NAME,
    RECIPE,
    count_refusal,
    device_refusal,
    layers_of,
    transform_refusal,
    weight_names,
)
from warploom.integrations.experts import Function, experts
from warploom.integrations.float8_experts import ALIGNMENT, RECIPES
from warploom.integrations.gated_mlp import FUNCTIONS
from warploom.integrations.linear_rules import PRODUCTS, product_type
from warploom.integrations.recipes import Recipe
from warploom.runtime.families._product.steps.gate import ALPHA, LIMIT, SWIGLU_OAI

_ALIGNMENT = 8  # elements of a row: 16 bytes of 16-bit types
_ROW_BYTES = 16


def register() -> None:
    """Let models of transformers say `experts_implementation="warploom"`; again does no harm."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS.register(NAME, fp8_experts.forward)


def experts_forward(
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
        # torch's grouped products take the same extents; what they do not take, a loop does.
        own = moe.grouped_mm_experts_forward
        if unfit(module):
            own = type(module).forward.__wrapped__
        by_transformers: Callable[..., torch.Tensor] = own
        return by_transformers(module, hidden_states, top_k_index, top_k_weights)
    gate, layout = gate_of(module)
    first, second = weight_names(module)
    return experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        getattr(module, first),
        getattr(module, second),
        gate=gate,
        gate_layout=layout,  # type: ignore[arg-type]
        transposed=module.is_transposed,
        gate_up_bias=getattr(module, f"{first}_bias") if module.has_bias else None,
        down_bias=getattr(module, f"{second}_bias") if module.has_bias else None,
        alpha=getattr(module, "alpha", ALPHA) if gate == SWIGLU_OAI else ALPHA,
        limit=getattr(module, "limit", LIMIT) if gate == SWIGLU_OAI else LIMIT,
        first_expert=0,  # expert parallelism has ids past the last for those of other ranks
        norm=norm_of(module),
        recipe=getattr(module, RECIPE, None),
    )


def refusal(module: Any, hidden: torch.Tensor) -> str | None:  # noqa: ANN401
    """Why transformers computes a layer on tokens, if it does."""
    return (
        device_refusal(hidden)
        or unfit(module)
        or _type_refusal(module, hidden)
        or transform_refusal(module, hidden)
    )


def unfit(module: Any) -> str | None:  # noqa: ANN401
    """Why there is no kernel for a layer's weights, of any tokens."""
    names = weight_names(module)
    weights: list[Any] = [getattr(module, name, None) for name in names]
    if any(one is None or one.dim() != 3 for one in weights):
        return f"its weights are not {' and '.join(names)} of three dimensions"
    first, second = weights
    if first.dtype != second.dtype or first.dtype not in (*PRODUCTS, torch.float32):
        return f"its weights are {first.dtype} and {second.dtype}"
    if found := count_refusal(first.shape[0]):
        return found
    unit = _ROW_BYTES // first.dtype.itemsize if first.dtype in PRODUCTS else _ALIGNMENT
    if any(extent % unit for one in weights for extent in one.shape[1:]):
        return f"its sizes are no multiples of {unit}"
    return None


def untrained(module: Any, recipe: Recipe) -> str | None:  # noqa: ANN401
    """Why a layer's GEMMs stay in 16 bits where linear layers train with a recipe, if so."""
    if recipe not in RECIPES:
        return f"experts train in fp8 with {', '.join(RECIPES)} alone"
    weights = (getattr(module, name) for name in weight_names(module))
    if any(extent % ALIGNMENT for one in weights for extent in one.shape[1:]):
        return f"its sizes are no multiples of {ALIGNMENT}, which fp8 asks for"
    return None


def _type_refusal(module: Any, hidden: torch.Tensor) -> str | None:  # noqa: ANN401
    kind = product_type(module.down_proj.dtype, hidden.device.type)
    if kind in PRODUCTS or hasattr(module, RECIPE):
        return None
    if torch.compiler.is_compiling():
        return f"{kind} weights; torch compiles grouped products of bfloat16 alone"
    return None


def gate_of(module: Any) -> tuple[str | Function, str]:  # noqa: ANN401
    """What a layer does between its products: a gate by name and its layout, or a function."""
    if not module.has_gate:
        function: Function = module.act_fn
        return function, "halves"
    kind = type(module)
    if kind._apply_gate is moe._default_apply_gate:
        name = FUNCTIONS.get(type(module.act_fn).__name__)
        if name is not None:
            return name, "halves"
    elif _is_gpt_oss(kind) and not module.is_concatenated:
        return SWIGLU_OAI, "interleaved"
    applied: Function = module._apply_gate
    return applied, "halves"


def gate_with_kernel(module: Any) -> str | None:  # noqa: ANN401
    """The gate of a layer of experts, if it is one whose quantized weights kernels read."""
    if module not in layers_of(module) or without_kernel(module):
        return None
    return str(gate_of(module)[0])


def without_kernel(layer: Any) -> str:  # noqa: ANN401
    """Why no kernel reads quantized weights of a layer of experts; "" where one does."""
    if "forward" in vars(layer):
        return "its forward was replaced on the instance"
    if not layer.has_gate:
        return "experts without a gate have no kernel of quantized weights"
    if (reason := unfit(layer)) is not None:
        return reason
    if callable(gate_of(layer)[0]):
        return "no kernel has its gate"
    return "" if norm_of(layer) is None else "no kernel has its norm"


def norm_of(module: Any) -> Function | None:  # noqa: ANN401
    """The norm behind a layer's second product; layers of transformers before 5.23 know none."""
    has_norm = getattr(module, "has_post_expert_norm", False)
    return module.post_expert_norm if has_norm else None


def _is_gpt_oss(kind: type) -> bool:
    """Whether a class has the gate of gpt-oss, which others are made of."""
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return kind._apply_gate is GptOssExperts._apply_gate  # type: ignore[attr-defined]
