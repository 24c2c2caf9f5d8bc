"""`warploom.nn.BitLinear`: a ternary weight by activations that are int8, as BitNet b1.58 has it.

`warploom.patch` makes one of each BitLinear and AutoBitLinear of transformers.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.integrations.linear_sharing import share_hooks
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.integrations.quantized_rules import check_whole, refusal
from warploom.integrations.quantized_weight import dequantized
from warploom.quantization import PackedWeight
from warploom.quantization.importers import bitnet
from warploom.runtime.api import Explanation, explain
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.mixed_gemm.api import mixed_gemm
from warploom.runtime.tensors import refuse_transforms

FORMAT = "ternary"
LEAST = 1e-5  # of a row's largest activation, as transformers has it
_TRANSFORMERS = "transformers.integrations.bitnet"


def bit_linear_types() -> tuple[type[torch.nn.Module], ...]:
    """The classes of transformers' layers of BitNet; empty where no model can have one."""
    module = sys.modules.get(_TRANSFORMERS)
    return () if module is None else (module.BitLinear, module.AutoBitLinear)


def bit_refusal(module: torch.nn.Module) -> str:
    """Why a layer of BitNet cannot become a warploom.nn.BitLinear; "" where it can."""
    if getattr(module, "online_quant", False):
        return "its weight is quantized in each call, and may train"
    if "forward" in vars(module):
        return "its forward was replaced on the instance"
    held = [getattr(module, "weight", None), getattr(module, "weight_scale", None)]
    if not all(isinstance(one, Tensor) and one.device.type != "meta" for one in held):
        return "its weight and weight_scale do not lie in memory"
    return ""


class BitLinear(QuantizedLinear):
    """A linear layer of BitNet b1.58: a ternary weight, and an input that is quantized to int8.

    `from_bitnet` makes one of a layer of transformers, and `from_linear` rounds a weight to -1, 0
    and 1 times a scale. The constructor makes one whose weight and bias are 0, for a state dict to
    be loaded.

    Args:
        in_features: K, the size of the input's last dimension.
        out_features: N, the size of the result's last dimension.
        bias: Whether there is a bias [N].
        device: The device of the parameters.
        dtype: The dtype of the bias, and of `weight.dtype`.
        scale_dtype: The dtype of the scales; bf16 by default.

    Both scales are applied to the int32 accumulators in one kernel, with the bias. `rms_norm` is
    what normalizes the input first, or None. The weight is frozen: the layer is differentiable in
    its input only, as if that had not been rounded. All else is as in
    `warploom.nn.QuantizedLinear`.

    Example:
        >>> layer = warploom.nn.BitLinear.from_linear(torch.nn.Linear(128, 64))
        >>> layer(torch.randn(4, 128)).shape
        torch.Size([4, 64])
    """

    PACKED_FOR: ClassVar[Activations] = "int8"
    rms_norm: torch.nn.Module | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,  # noqa: ANN401 (whatever torch.nn.Linear takes)
        dtype: torch.dtype | None = None,
        *,
        scale_dtype: torch.dtype | None = None,
    ) -> None:
        how: Any = {"format": FORMAT, "group": None, "scale_dtype": scale_dtype}
        super().__init__(in_features, out_features, bias, device, dtype, **how)

    def _set_up(
        self,
        weight: PackedWeight,
        bias: Tensor | None,
        activation: str | None,
        dtype: torch.dtype,
    ) -> None:
        told, metadata = "", weight.metadata
        if (metadata.format, metadata.group) != (FORMAT, None):
            told = f"a weight of {metadata.format} in groups of {metadata.group}"
        elif activation is not None:
            told = f"activation {activation!r}"
        if told:
            raise ProblemError(
                f"{told} for a BitLinear",
                rule="must be a ternary weight with one scale for each row, and no activation",
                fix="make a warploom.nn.QuantizedLinear",
            )
        super()._set_up(weight, bias, activation, dtype)
        self.rms_norm = None

    @classmethod
    def from_linear(  # type: ignore[override]
        cls, linear: torch.nn.Linear, *, scale_dtype: torch.dtype | None = None
    ) -> Self:
        """Return a layer with the weight of a linear layer, rounded to -1, 0 and 1 times a scale.

        Args:
            linear: The layer. Its bias, hooks, training flag and other attributes come along.
            scale_dtype: The dtype of the scale; bf16 by default.

        Returns:
            The new layer.

        Raises:
            ProblemError: For layers that `warploom.nn.QuantizedLinear.from_linear` refuses, and for
                one with an activation.
        """
        return super().from_linear(linear, FORMAT, None, None, scale_dtype)

    @classmethod
    def from_bitnet(cls, module: torch.nn.Module) -> Self:
        """Return a layer with the weight of a BitLinear or AutoBitLinear of transformers.

        Args:
            module: The layer, as loaded: "offline". Its norm is shared, not copied.

        Raises:
            ProblemError: for another class, a weight that is quantized in each call, codes that are
                not ternary, scales that are 0 or not finite.
        """
        known = bit_linear_types()
        if type(module) not in known:
            raise ProblemError(
                f"a {type(module).__name__}",
                rule="must be a BitLinear or an AutoBitLinear of transformers",
                fix="warploom.nn.QuantizedLinear.from_linear(layer, 'ternary') quantizes others",
            )
        reason = bit_refusal(module)
        if reason:
            raise ProblemError(
                f"a {type(module).__name__}: {reason}",
                rule="must hold ternary weights",
                fix="load the model with quantization_mode='offline'",
            )
        given: Any = module
        weight, scale = given.weight.detach(), given.weight_scale.detach()
        bias = None if given.bias is None else given.bias.detach()
        if type(module) is known[0]:
            layer = bitnet.layer(weight, scale, divides=True)
        else:
            layer = bitnet.unpacked(weight, scale)
            bias = None if bias is None else bias * scale  # it multiplies their sum
        made = cls.__new__(cls)
        bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        dtype = getattr(given, "dtype", None) or weight.dtype
        made._set_up(layer.packed(cls.PACKED_FOR), bias, None, dtype)
        made.rms_norm = given.rms_norm
        made.training = module.training
        share_hooks(made, module)
        return made

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return input W^T + bias [.., out_features], in the input's type.

        Args:
            input: [.., in_features] of bf16, fp16 or fp32.
            residual: Must be None: layers of BitNet have none.

        Raises:
            ProblemError: there is a residual.
        """
        if residual is not None:
            raise ProblemError("residual of a BitLinear", rule="must be None", fix="add it after")
        x = input if self.rms_norm is None else self.rms_norm(input)
        data, *channels = self._packed()
        weight = PackedWeight(data, self.metadata, *channels)
        if torch.is_grad_enabled() and x.requires_grad:
            refuse_transforms("warploom.nn.BitLinear")
            found: Tensor = _Product.apply(x, weight, self.bias)  # type: ignore[no-untyped-call]
            return found
        return _product(x, weight, self.bias)

    def explanation(
        self, input: Tensor, residual: Tensor | None = None, *, gpu: str | None = None
    ) -> Explanation:
        """Say which kernel a call with these tensors runs; `warploom.explain(layer, x)` returns it.

        Args:
            input: [.., in_features].
            residual: Must be None.
            gpu: The name of a GPU: says what that GPU would run, for tensors on any device.

        Returns:
            The explanation; of a call that torch computes, it says why.
        """
        weight = self.weight
        reason = refusal(input, weight, residual, named=gpu is not None)
        if reason:
            return Explanation.by_torch(reason, "")
        q, keywords = _quantized(input.detach(), self.bias)
        return explain(mixed_gemm, q, weight, gpu=gpu, **keywords)


def _product(x: Tensor, weight: PackedWeight, bias: Tensor | None) -> Tensor:
    """The layer's result, without gradients; by torch where no kernel serves the device."""
    x = x.detach()
    if refusal(x, weight):
        check_whole(weight)
        scale = 127 / x.float().abs().amax(-1, keepdim=True).clamp_min(LEAST)
        q = (x.float() * scale).round().clamp(-128, 127)
        y = F.linear(q, weight.dequantize(torch.float32)) / scale
        return (y if bias is None else y + bias.float()).to(x.dtype)
    q, keywords = _quantized(x, bias)
    y = mixed_gemm(q, weight, **keywords)
    return y.view(*x.shape[:-1], y.shape[-1])


def _quantized(x: Tensor, bias: Tensor | None) -> tuple[Tensor, dict[str, Any]]:
    """The input as int8 [M, K], and what else its GEMM is given."""
    q, scale = cast(x.reshape(-1, x.shape[-1]), torch.int8, block="row")
    return q, {"scale_a": scale, "bias": bias, "out_dtype": x.dtype}


class _Product(torch.autograd.Function):
    """The layer's result, differentiable in its input, as if that were not rounded."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        x: Tensor,
        weight: PackedWeight,
        bias: Tensor | None,
    ) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        """Return dy W, W being given back in dy's type."""
        return dy @ dequantized(ctx.weight, dy.dtype), None, None
