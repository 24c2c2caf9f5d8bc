"""`warploom.functional.scaled_mm`: torch.nn.functional.scaled_mm on Warploom's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.errors import ProblemError
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.tensors import shown

ROW, BLOCK = "BlockWise1x128", "BlockWise128x128"
PAIRS = (("TensorWise", "TensorWise"), ("RowWise", "RowWise"), (ROW, BLOCK), (ROW, ROW))
"""The scalings of A and of B, by the names of torch.nn.functional.ScalingType."""
PADDED = 4  # torch's scales of 128x128 have blocks of k in fours


def scaled_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    scale_a: torch.Tensor | list[torch.Tensor],
    scale_recipe_a: Any,  # noqa: ANN401 (torch's enum, or a list of one)
    scale_b: torch.Tensor | list[torch.Tensor],
    scale_recipe_b: Any,  # noqa: ANN401
    swizzle_a: Any = None,  # noqa: ANN401
    swizzle_b: Any = None,  # noqa: ANN401
    bias: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = torch.bfloat16,
    contraction_dim: Sequence[int] = (),
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply fp8 matrices that have scales, as torch.nn.functional.scaled_mm does.

    Args:
        mat_a: [M, K], of float8_e4m3fn or float8_e5m2.
        mat_b: [K, N], of the same or the other; a weight [N, K] after .t().
        scale_a: fp32 (block scales also float8_e8m0fnu): one element for TensorWise, [M, 1] for
            RowWise, [M, K/128] for BlockWise1x128, K/128 rounded up. Any strides.
        scale_recipe_a: A torch.nn.functional.ScalingType.
        scale_b: One element for TensorWise, [1, N] for RowWise, [N, K/128] for BlockWise1x128, and
            [K/128, N/128] for BlockWise128x128, where torch's K/128 that is rounded up to a
            multiple of 4 is taken, too. Any strides.
        scale_recipe_b: TensorWise and RowWise go with themselves; either block of B goes with
            BlockWise1x128 of A.
        swizzle_a: None or NO_SWIZZLE.
        swizzle_b: None or NO_SWIZZLE.
        bias: [N], of fp16, bf16 or fp32.
        output_dtype: The type of the result; None is that of mat_a.
        contraction_dim: Must be empty.
        use_fast_accum: Whether all of k is added up by the tensor core, in about 14 bits. With
            block scales it has no meaning.

    Returns:
        The result [M, N].

    Raises:
        ProblemError: for scalings and swizzles that Hopper's kernels do not have, and for scales of
            other shapes.

    Example:
        >>> from torch.nn.functional import ScalingType
        >>> a, b = (torch.randn(16, 64).to(torch.float8_e4m3fn) for _ in range(2))
        >>> one, each = torch.ones(1), ScalingType.TensorWise
        >>> warploom.functional.scaled_mm(a, b.t(), one, each, one, each).shape
        torch.Size([16, 16])
    """
    recipes = _single("scale_recipe_a", scale_recipe_a), _single("scale_recipe_b", scale_recipe_b)
    names = _name(recipes[0]), _name(recipes[1])
    if names not in PAIRS:
        raise ProblemError(
            f"scalings {names[0]} by {names[1]}",
            rule=f"must be one of {', '.join(f'{a} by {b}' for a, b in PAIRS)}",
            fix="other scalings are those of Blackwell: use torch.nn.functional.scaled_mm there",
        )
    for name, swizzle in (("swizzle_a", swizzle_a), ("swizzle_b", swizzle_b)):
        if swizzle is not None and _name(_single(name, swizzle)) != "NO_SWIZZLE":
            raise ProblemError(
                f"{name} {shown(swizzle)}",
                rule="must be None or NO_SWIZZLE",
                fix="leave it out: scales of Hopper's kernels are not swizzled",
            )
    if len(contraction_dim) > 0:
        raise ProblemError(
            f"contraction_dim {shown(contraction_dim)}",
            rule="must be empty: the last dimension of mat_a by the first of mat_b",
            fix="leave it out, and transpose the matrices",
        )
    of_a = _single("scale_a", scale_a)
    of_b = _scales_of_b(_single("scale_b", scale_b), names[1], mat_a, mat_b)
    if names[0] == ROW:
        _require_shape("scale_a", of_a, (mat_a.shape[0], blocks_of(mat_a.shape[1])))
    return gemm(
        mat_a,
        mat_b,
        scale_a=of_a,
        scale_b=of_b,
        bias=bias,
        out_dtype=mat_a.dtype if output_dtype is None else output_dtype,
        use_fast_accum=use_fast_accum,
    )


def _scales_of_b(
    scale: torch.Tensor, recipe: str, a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """The scales of B as `warploom.gemm` has them: rows of the weight [N, K] first."""
    n, blocks = b.shape[1], blocks_of(a.shape[1])
    if recipe == ROW:
        _require_shape("scale_b", scale, (n, blocks))
    if recipe != BLOCK:
        return scale
    padded = blocks + -blocks % PADDED
    if tuple(scale.shape) != (padded, blocks_of(n)):
        _require_shape("scale_b", scale, (blocks, blocks_of(n)))
    return scale[:blocks].t()


def _require_shape(name: str, scale: torch.Tensor, shape: tuple[int, int]) -> None:
    if tuple(scale.shape) != shape:
        turned = tuple(scale.shape) == shape[::-1]
        raise ProblemError(
            f"{name} of shape {list(scale.shape)}",
            rule=f"must have shape {list(shape)} with this scaling, as torch has it",
            fix="pass it after .t()" if turned else "make one scale for each block",
        )


def _single(name: str, value: Any) -> Any:  # noqa: ANN401 (of lists of one)
    """What torch takes as itself or in a list."""
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise ProblemError(
            f"{name} of {len(value)} entries",
            rule="must be one: scales of two levels are those of Blackwell",
            fix="use torch.nn.functional.scaled_mm for them",
        )
    return value[0]


def _name(entry: Any) -> str:  # noqa: ANN401 (torch's enums)
    """The name of an entry of torch's enums, or the name itself."""
    return str(getattr(entry, "name", entry))
