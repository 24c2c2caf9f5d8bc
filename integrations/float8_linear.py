"""`warploom.nn.Float8Linear`: a layer whose weight is e4m3 with a scale for each 128x128.

That is what checkpoints of DeepSeek-V3 and Qwen3 have; `warploom.patch` makes one of each FP8Linear
of transformers.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from warploom.errors import ProblemError
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.integrations.devices import unserved
from warploom.integrations.linear_sharing import check_module, sharing
from warploom.integrations.recipes import E4M3
from warploom.quantization.checks import require_fp8_scales
from warploom.runtime.api import Explanation, explain
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.gemm.block_scales import TYPES, blocks_of, dequantised
from warploom.runtime.tensors import refuse_transforms

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
SCALES = (1, SCALE_BLOCK)  # of the input
_TRANSFORMERS = "transformers.integrations.finegrained_fp8"


def fp8_linear_type() -> type[torch.nn.Linear] | None:
    """The class of transformers' fp8 layers; None where no model can have one."""
    found: type[torch.nn.Linear] | None = getattr(sys.modules.get(_TRANSFORMERS), "FP8Linear", None)
    return found


def refusal(module: torch.nn.Linear) -> str | None:
    """Why an FP8Linear cannot become a Float8Linear, if it cannot."""
    block, scale = getattr(module, "block_size", None), getattr(module, "weight_scale_inv", None)
    if block is None or tuple(block) != (SCALE_BLOCK, SCALE_BLOCK):
        return f"its scales are of blocks of {block}, not of 128x128"
    if getattr(module, "activation_scale", None) is not None:
        return "its activations have one static scale"
    weight = module.weight
    if type(weight) is not torch.nn.Parameter or weight.dtype != E4M3:
        return f"its weight is {type(weight).__name__} of {weight.dtype}, not e4m3"
    n, k = weight.shape
    if scale is None or scale.dtype not in TYPES or scale.shape != (blocks_of(n), blocks_of(k)):
        return "its scales are not fp32 or e8m0, one for each 128x128"
    return None


class Float8Linear(torch.nn.Linear):
    """A linear layer with an e4m3 weight and a scale for each 128x128 block of it, in one kernel.

    `from_fp8` makes one of a layer of transformers, and `from_tensors` of a weight and its scales.
    The input is quantized in each call, with a scale for each 1x128 block. The weight is frozen:
    the layer is differentiable in its input only. Weight and scales keep their dtypes whatever the
    module is converted to. Parameters have transformers' names: `weight` [N, K], `weight_scale_inv`
    [N / 128, K / 128], which multiplies, and `bias`.

    Args:
        in_features: K, the size of the input's last dimension.
        out_features: N, the size of the result's last dimension.
        bias: Whether there is a bias [N].
        device: The device of the parameters.
        dtype: The dtype of the bias.
    """

    weight_scale_inv: torch.nn.Parameter

    @classmethod
    def from_fp8(cls, module: torch.nn.Linear) -> Self:
        """Return a layer that shares the parameters of an FP8Linear of transformers.

        Args:
            module: The FP8Linear. Its hooks, mode and other attributes are the new layer's.

        Raises:
            ProblemError: for another class, other blocks, static scales of activations, a weight
                that is not in memory or is sharded, a scale that is NaN, infinite or negative, and
                a forward that was replaced.
        """
        kind = fp8_linear_type()
        check_module(module, *([] if kind is None else [kind]))
        reason = refusal(module)
        if reason is not None:
            raise ProblemError(
                f"a {type(module).__name__}: {reason}",
                rule="must be e4m3 with a scale for each 128x128, and dynamic activations",
                fix="keep the layer as it is",
            )
        require_fp8_scales("weight_scale_inv", module.get_parameter("weight_scale_inv"))
        return sharing(cls.__new__(cls), module)

    @classmethod
    def from_tensors(
        cls, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Self:
        """Return a layer of a weight and its scales, which are shared, not copied.

        Args:
            weight: [N, K] of float8_e4m3fn.
            scale: [N/128, K/128], rounded up, of fp32 or float8_e8m0fnu; it multiplies.
            bias: [N], of bf16, fp16 or fp32.

        Raises:
            ProblemError: for other types and shapes, and for a scale that is NaN, infinite or
                negative.
        """
        shape = tuple(weight.shape)
        if weight.dtype != E4M3 or len(shape) != 2:
            raise ProblemError(
                f"weight {list(shape)} of {weight.dtype}",
                rule="must be [N, K] of torch.float8_e4m3fn",
                fix="use warploom.nn.Linear for weights of 16 bits",
            )
        blocks = blocks_of(shape[0]), blocks_of(shape[1])
        if tuple(scale.shape) != blocks or scale.dtype not in TYPES:
            raise ProblemError(
                f"scale {list(scale.shape)} of {scale.dtype} with weight {list(shape)}",
                rule=f"must be {list(blocks)} of fp32 or float8_e8m0fnu",
                fix="make one scale for each 128x128",
            )
        require_fp8_scales("scale", scale)
        made = cls.__new__(cls)
        super(torch.nn.Linear, made).__init__()
        made.out_features, made.in_features = shape
        tensors = {"weight": weight, "weight_scale_inv": scale, "bias": bias}
        for name, tensor in tensors.items():
            frozen = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
            made.register_parameter(name, frozen)
        return made

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return input W^T + bias [.., out_features] in the input's type.

        Args:
            input: [.., in_features] of bf16, fp16 or fp32.
        """
        given = input, self.weight, self.weight_scale_inv, self.bias
        if torch.is_grad_enabled() and input.requires_grad:
            refuse_transforms("warploom.nn.Float8Linear")
            found: torch.Tensor = _Product.apply(*given)  # type: ignore[no-untyped-call]
            return found
        with torch.no_grad():
            return _product(*given)

    def explanation(self, input: torch.Tensor, *, gpu: str | None = None) -> Explanation:
        """Say which kernel a call with these tensors runs; `warploom.explain(layer, x)` returns it.

        Args:
            input: [.., in_features].
            gpu: The name of a GPU: says what that GPU would run, for tensors on any device.

        Returns:
            The explanation; of a call that torch computes, it says why.
        """
        reason = None if gpu is not None else unserved(input.get_device())
        if reason is not None:
            return Explanation.by_torch(reason, "")
        with torch.no_grad():
            rows = input.unsqueeze(0) if input.dim() == 1 else input
            values, scale_a = cast(rows, E4M3, block=SCALES)
            keywords: dict[str, Any] = {
                "scale_a": scale_a,
                "scale_b": self.weight_scale_inv.detach(),
            }
            if self.bias is not None:
                keywords["bias"] = self.bias.detach()
            b = self.weight.detach().t()
            return explain(gemm, values, b, out_dtype=input.dtype, gpu=gpu, **keywords)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """What `to`, `half`, `cuda` and the like do: weight and scales keep their types."""
        kept = {id(self.weight), id(self.weight_scale_inv)}

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            found = fn(tensor)
            keeps = id(tensor) not in kept or found.dtype == tensor.dtype
            return found if keeps else tensor.to(found.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        """Extents, and whether there is a bias."""
        extents = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{extents}, bias={self.bias is not None}, kernels=warploom"


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The layer's result, without gradients; by torch where no kernel serves the device."""
    if x.dtype not in INPUTS:
        raise ProblemError(
            f"input of {x.dtype}",
            rule="must be bfloat16, float16 or float32",
            fix="convert it with .to(torch.bfloat16)",
        )
    if x.dim() == 1:
        return _product(x.unsqueeze(0), weight, scale, bias).squeeze(0)
    if x.is_cuda and unserved(x.get_device()) is not None:
        values = dequantised(weight, scale, x.dtype)
        return F.linear(x, values, None if bias is None else bias.to(x.dtype))
    return multiplied(x, weight, scale, bias=bias)


def multiplied(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    """Return x [.., K], quantized by blocks of 1x128, times weight [N, K] transposed, by a kernel.

    `keywords` are those of `warploom.gemm` that make something of the product.
    """
    values, scale_a = cast(x, E4M3, block=SCALES)
    return gemm(values, weight.t(), scale_a=scale_a, scale_b=scale, out_dtype=x.dtype, **keywords)


class _Product(torch.autograd.Function):
    """The layer's result, differentiable in its input."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: torch.Tensor,
        weight: torch.Tensor,
        scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return _product(x, weight, scale, bias)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return dy W, W being given back in dy's type."""
        weight, scale = ctx.saved_tensors
        return dy @ dequantised(weight, scale, dy.dtype), None, None, None
