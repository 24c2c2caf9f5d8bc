"""`warploom.nn.SparseLinear`: a linear layer whose weight is 2:4 sparse."""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from warploom.errors import ProblemError
from warploom.generator.targets import target
from warploom.integrations.devices import unserved
from warploom.integrations.linear import Linear
from warploom.integrations.linear_options import ACTIVATIONS, DEFAULTS, Options, check
from warploom.integrations.linear_rules import product_type, transformed
from warploom.integrations.linear_sharing import share_hooks
from warploom.integrations.quantized_rules import check_linear
from warploom.quantization.sparse_weight import SparseWeight
from warploom.runtime.api import Explanation, explain
from warploom.runtime.families.sparse_gemm.api import sparse_gemm
from warploom.runtime.tensors import shown

_TYPES = (torch.bfloat16, torch.float16)


class SparseLinear(torch.nn.Module):
    """A linear layer with a 2:4 sparse weight: activation(x W^T + bias), in one kernel.

    `from_linear` makes one of a layer whose weight is 2:4 sparse already, and `from_sparse` of a
    `warploom.SparseWeight`. The weight's tensors, `values` and `metadata`, are buffers: they move
    and are saved with the module, and never train. The layer is differentiable in its input and its
    bias.

    Args:
        weight: [N, K] in bf16 or fp16, whose tensors are shared.
        bias: [N], or None.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None.

    Kernels take bf16 and fp16 (also by autocast), the weight's own dtype. Everything else is
    torch's GEMM by the dense weight; `warploom.explain(layer, x)` says why.

    Example:
        >>> linear = torch.nn.Linear(256, 384, dtype=torch.bfloat16)
        >>> sparse = warploom.sparsify(linear.weight.detach())
        >>> layer = warploom.nn.SparseLinear.from_sparse(sparse, linear.bias)
    """

    values: Tensor
    metadata: Tensor
    bias: torch.nn.Parameter | None

    def __init__(
        self, weight: SparseWeight, bias: Tensor | None = None, activation: str | None = None
    ) -> None:
        super().__init__()
        options: Options = {**DEFAULTS, "activation": activation}
        check(options)
        _check_parts(weight, bias)
        self.out_features, self.in_features = weight.shape
        self.activation = activation
        self.register_buffer("values", weight.values)
        self.register_buffer("metadata", weight.metadata)
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    @classmethod
    def from_sparse(
        cls, weight: SparseWeight, bias: Tensor | None = None, *, activation: str | None = None
    ) -> Self:
        """Return a layer of a packed weight.

        Args:
            weight: [N, K] in bf16 or fp16; its tensors are shared, not copied.
            bias: [N], of a floating-point type, on the weight's device; shared.
            activation: relu, gelu, gelu_tanh or silu; None: none.

        Raises:
            ProblemError: The weight has another type, or the bias another shape or device.
        """
        return cls(weight, bias, activation)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear) -> Self:
        """Return a layer with the weight of a torch.nn.Linear or warploom.nn.Linear, packed.

        Args:
            linear: The layer, whose weight is 2:4 sparse along its inputs, dense in memory or one
                of torch's semi-structured tensors. Its bias, hooks and training flag are shared
                with the new one.

        Raises:
            ProblemError: The weight is not 2:4, is not bf16 or fp16, or trains in fp8; or the layer
                is of another class.
        """
        check_linear(linear)
        weight = linear.weight.detach()
        if weight.dtype not in _TYPES:
            raise ProblemError(
                f"a weight of {weight.dtype}",
                rule="must be bfloat16 or float16 to be stored as 2:4 sparse",
                fix="convert the layer, as by layer.to(torch.bfloat16)",
            )
        activation = linear.activation if isinstance(linear, Linear) else None
        given = isinstance(weight, torch.sparse.SparseSemiStructuredTensor)
        pack = SparseWeight.from_torch if given else SparseWeight.from_dense
        made = cls(pack(weight), linear.bias, activation)
        made.training = linear.training
        share_hooks(made, linear)
        return made

    @property
    def weight(self) -> Tensor:
        """The dense weight [N, K], zeros included: unpacked each time that it is read."""
        return SparseWeight(self.values, self.metadata).dense()

    def extra_repr(self) -> str:
        """Sizes, whether there is a bias, and the activation."""
        said = f"in_features={self.in_features}, out_features={self.out_features}, "
        said += f"bias={self.bias is not None}, sparse='2:4'"
        return said + (f", activation={self.activation!r}" if self.activation else "")

    def forward(self, input: Tensor) -> Tensor:
        """Return activation(input W^T + bias).

        Args:
            input: [.., in_features].

        Returns:
            [.., out_features].
        """
        kind = product_type(input.dtype, input.device.type)
        bias = None if self.bias is None else self.bias.to(kind)
        if self._refusal(input) is None:
            weight = SparseWeight(self.values, self.metadata)
            return sparse_gemm(input.to(kind), weight, bias, self.activation)
        return ACTIVATIONS[self.activation](F.linear(input, self.weight.to(kind), bias))

    def explanation(self, input: Tensor, *, gpu: str | None = None) -> Explanation:
        """Return which kernel a call runs, as `warploom.explain(layer, x)` does.

        Args:
            input: [.., in_features].
            gpu: The name of a GPU, for which tensors may be anywhere.
        """
        reason = self._refusal(input, named=gpu is not None)
        if reason:
            return Explanation.by_torch(reason, "" if gpu is None else target(gpu).gpu)
        kind = product_type(input.dtype, input.device.type)
        keywords: dict[str, Any] = {"activation": self.activation, "gpu": gpu}
        keywords["bias"] = None if self.bias is None else self.bias.detach().to(kind)
        weight = SparseWeight(self.values, self.metadata)
        return explain(sparse_gemm, input.detach().to(kind), weight, **keywords)

    def _refusal(self, input: Tensor, *, named: bool = False) -> str | None:
        """Why torch computes a call, if it does."""
        found = None if named else unserved(input.get_device())
        if found is not None:
            return found
        kind = product_type(input.dtype, "cuda" if named else input.device.type)
        if kind != self.values.dtype or kind not in _TYPES:
            return (
                f"x is {kind}, the sparse weight {self.values.dtype}; kernels take one 16-bit type"
            )
        return transformed(input, self.values, sharded=False)


def _check_parts(weight: SparseWeight, bias: Tensor | None) -> None:
    if not isinstance(weight, SparseWeight):
        raise ProblemError(
            f"weight {shown(weight)} of type {type(weight).__name__}",
            rule="must be a SparseWeight",
            fix="make one with warploom.sparsify",
        )
    if weight.dtype not in _TYPES:
        raise ProblemError(
            f"a sparse weight of {weight.dtype}",
            rule="must be bfloat16 or float16: the layer does not quantize its input",
            fix="call warploom.sparse_gemm with x of that type",
        )
    n = weight.shape[0]
    if bias is not None and not (
        bias.shape == (n,) and bias.dtype.is_floating_point and bias.device == weight.device
    ):
        raise ProblemError(
            f"bias {bias.dtype} {list(bias.shape)} on {bias.device}",
            rule=f"must be floating-point [{n}], on {weight.device} as the weight",
            fix="move and convert it first",
        )
