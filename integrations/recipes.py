"""What a layer in fp8 quantises, and how: one row of a table a recipe.

tensorwise           as torchao: one scale for each tensor, gradients in e5m2
rowwise              as torchao: a scale for each row, along what is summed; powers of two
rowwise_with_gw_hp   as torchao: the same, but the weight's gradient is of 16-bit operands, and the
                     weight has one scale where the gradient of the input is computed
blockwise            as Transformer Engine's Float8BlockScaling, and DeepSeek-V3: 1x128 of inputs
                     and gradients, 128x128 of weights; powers of two
delayed              as Transformer Engine's DelayedScaling: tensorwise, by scales of earlier steps
fp4_qat              input and weight in e2m1 with a scale for each row, whose values e4m3 has;
                     gradients in 16 bits, through a soft quantiser: fp4.py, no row of this table

Sources: torchao float8/config.py (`Float8LinearConfig.from_recipe_name`), Transformer Engine
common/recipe, arXiv 2501.17116.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from warploom.errors import ProblemError
from warploom.generator.families.gemm import Accumulation
from warploom.runtime.tensors import shown
from warploom.suggestions import suggestion

Recipe = Literal["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "delayed", "fp4_qat"]
RECIPES: tuple[Recipe, ...] = get_args(Recipe)
Block = Literal["tensor", "row"] | tuple[int, int]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, slots=True)
class Quantization:
    """How an operand is quantised: `block` are the rows and columns that share a scale."""

    dtype: torch.dtype
    block: Block
    powers_of_two: bool = False


@dataclass(frozen=True, slots=True)
class Scheme:
    """What a recipe quantises for each of the three products of a linear layer.

    forward            y = x W^T: input and weight, along the input features
    gradient of x      dx = dy W: grad_output and weight_for_grad_input, along the output features
    gradient of W      dW = dy^T x: grad_output_for_grad_weight and input_for_grad_weight, along the
                       tokens; None where the operands are as they were, in 16 bits
    accumulation       of the gradients; of y it is fast, but where scales are of blocks
    delayed            scales are of the largest magnitudes of earlier steps
    """

    input: Quantization
    weight: Quantization
    grad_output: Quantization
    weight_for_grad_input: Quantization
    grad_output_for_grad_weight: Quantization | None
    input_for_grad_weight: Quantization | None
    accumulation: Accumulation = "fast"
    delayed: bool = False


def _everywhere(
    operand: Quantization,
    gradient: Quantization,
    weight: Quantization | None = None,
    *,
    accumulation: Accumulation = "fast",
    delayed: bool = False,
) -> Scheme:
    """The same in all three products."""
    weight = weight or operand
    return Scheme(
        *(operand, weight, gradient, weight, gradient, operand),
        accumulation=accumulation,
        delayed=delayed,
    )


_ROW = Quantization(E4M3, "row", powers_of_two=True)
_TENSOR, _TENSOR_GRADIENT = Quantization(E4M3, "tensor"), Quantization(E5M2, "tensor")
_TOKENS = Quantization(E4M3, (1, 128), powers_of_two=True)

SCHEMES: dict[Recipe, Scheme] = {
    "tensorwise": _everywhere(_TENSOR, _TENSOR_GRADIENT, accumulation="promoted"),
    "rowwise": _everywhere(_ROW, _ROW),
    "rowwise_with_gw_hp": Scheme(
        *(_ROW, _ROW, _ROW, Quantization(E4M3, "tensor", powers_of_two=True), None, None)
    ),
    "blockwise": _everywhere(_TOKENS, _TOKENS, Quantization(E4M3, (128, 128), powers_of_two=True)),
    "delayed": _everywhere(_TENSOR, _TENSOR_GRADIENT, accumulation="promoted", delayed=True),
}


def require_recipe(name: str, recipe: object) -> None:
    """Raise ProblemError for an argument that is no recipe's name."""
    if not (isinstance(recipe, str) and recipe in RECIPES):
        raise ProblemError(
            f"{name} {shown(recipe)}",
            rule=f"must be one of {', '.join(RECIPES)}",
            fix=suggestion(str(recipe), RECIPES),
        )
