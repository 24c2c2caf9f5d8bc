"""A mixed-input GEMM in torch: by a weight that was dequantized before, and by one that is now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from warploom.runtime.baselines import Baseline, Results, eager_and_compiled
from warploom.runtime.families._product.reference import apply, rounded
from warploom.runtime.families.mixed_gemm.call import MixedGemmCall


def baselines(sets: Sequence[MixedGemmCall]) -> list[Baseline]:
    """torch.mm (cuBLAS) in bf16 by the dequantized weight, eager and compiled.

    Activations of 8 bits are converted before as well. The weight that is dequantized in every call
    is shown too: it takes as little memory.
    """
    wide = torch.float16 if sets[0].a.dtype == torch.float16 else torch.bfloat16
    operands = []
    for one in sets:
        weight: Any = one.weight
        operands.append((one, one.a.to(wide), weight.dequantize(wide).t()))
    name = f"torch.mm (cuBLAS), {str(wide).removeprefix('torch.')}, dequantized weight"
    each: list[Callable[[], Results]] = [partial(_each, one, wide) for one in sets]
    return [
        *eager_and_compiled(_product, operands, name),
        Baseline("dequantize, then torch.mm, in each call", each, peer=False),
    ]


def _product(one: MixedGemmCall, a: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = torch.mm(a, weight)
    dtype = x.dtype if one.out is None else one.out.dtype
    return rounded(apply(x, one.listed), dtype)


def _each(one: MixedGemmCall, wide: torch.dtype) -> torch.Tensor:
    weight: Any = one.weight
    return _product(one, one.a.to(wide), weight.dequantize(wide).t())
