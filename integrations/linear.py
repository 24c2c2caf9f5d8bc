"""`warploom.nn.Linear`: torch's linear layer, its activation and a residual in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, Unpack, cast

import torch
import torch.nn.functional as F

from warploom.errors import ProblemError
from warploom.generator.targets import target
from warploom.integrations import block_dropout, float8, fp4
from warploom.integrations.linear_options import (
    ACTIVATIONS,
    Options,
    check,
    check_torchs,
    shown_options,
)
from warploom.integrations.linear_rules import check_residual, product_type, refusal, sum_type
from warploom.integrations.linear_sharing import check_module, sharing
from warploom.integrations.main_grad import accumulating, main_grad
from warploom.integrations.recipes import E4M3, E5M2, SCHEMES, Recipe
from warploom.integrations.scaling import DelayedScaling, ParameterCache, in_backward
from warploom.runtime.api import Explanation, explain
from warploom.runtime.families._product.epilogue import Item
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.families.gemm.layer import Layer


class Linear(torch.nn.Linear):
    """A linear layer: activation(x W^T + bias) + residual, by one kernel where there is one.

    Parameters, their names and their initial values are those of torch.nn.Linear: a state dict of
    either loads into the other.

    Args:
        in_features: K, the size of the input's last dimension.
        out_features: N, the size of the result's last dimension.
        bias: Whether there is a bias [N].
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None.
        preactivation: Where the backward pass has the input of the activation from: "save" keeps it
            in memory, "recompute" computes it again.
        recipe: Train in fp8: "tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise" or
            "delayed"; or simulate fp4: "fp4_qat" (docs/fp8.md).
        gradient_dtype: With the first three recipes, the dtype in which gradients are multiplied:
            torch.bfloat16 or torch.float8_e5m2; None: as the recipe says.
        accumulate_into_main_grad: Add the weight's gradient to weight.main_grad, an fp32 tensor of
            its shape, and leave weight.grad alone.
        dropout_blocks: The probability with which, in training, each block of 128 rows by 128
            columns of the input is dropped: see `warploom.functional.block_dropout_linear`.

    Kernels take bf16 and fp16 (also by autocast, as torch's layer does) on a Hopper GPU. Everything
    else is computed by torch's own operators, with the same meaning; `warploom.explain(layer, x)`
    says which, and why.

    Example:
        >>> layer = warploom.nn.Linear(64, 128, dtype=torch.bfloat16, activation="silu")
        >>> layer(torch.randn(4, 64).bfloat16()).shape
        torch.Size([4, 128])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,  # noqa: ANN401 (whatever torch.nn.Linear takes)
        dtype: torch.dtype | None = None,
        *,
        activation: str | None = None,
        preactivation: Preactivation = "save",
        recipe: Recipe | None = None,
        gradient_dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        dropout_blocks: float = 0.0,
    ) -> None:
        options: Options = {
            "activation": activation,
            "preactivation": preactivation,
            "recipe": recipe,
            "gradient_dtype": gradient_dtype,
            "accumulate_into_main_grad": accumulate_into_main_grad,
            "dropout_blocks": dropout_blocks,
        }
        check(options)
        check_torchs(bias, dtype)
        super().__init__(in_features, out_features, bias, device, dtype)
        vars(self).update(options)
        self._calls = Layer()
        self._quantised: ParameterCache[float8.WithTranspose] = ParameterCache()
        self.scaling: DelayedScaling | None = None  # of a recipe with such: since the first call

    activation: str | None
    preactivation: Preactivation
    recipe: Recipe | None
    gradient_dtype: torch.dtype | None
    accumulate_into_main_grad: bool
    dropout_blocks: float

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(input W^T + bias) + residual.

        Args:
            input: [.., in_features].
            residual: Of the shape of the result; it is added in the kernel.

        Returns:
            [.., out_features], in the dtype of the sum in torch.

        Raises:
            ProblemError: For a residual of another shape.
        """
        if self.dropout_blocks and self.training:
            return self._dropping(input, residual)
        plain = residual is None and self.recipe is None and not self.accumulate_into_main_grad
        if plain and not torch.compiler.is_dynamo_compiling():
            found = self._calls.again(input, *_own(self), self.activation, self.preactivation)
            if found is not None:
                return found
        weight = self.weight
        if residual is not None:
            check_residual(input, residual, self.out_features)
        if self.recipe is not None and input.numel() and weight.numel():
            if self.recipe == "delayed" and torch.compiler.is_dynamo_compiling():
                return _outside_graphs(self, input, residual)
            return self._in_float8(input, residual)
        if refusal(input, weight, residual):
            return self._by_torch(input, residual)
        if input.dim() == 1:
            row = None if residual is None else residual.unsqueeze(0)
            return self.forward(input.unsqueeze(0), row).squeeze(0)
        if plain:
            return self._calls.call(input, weight, self.bias, self.activation, self.preactivation)
        into = main_grad(weight) if self.accumulate_into_main_grad else None
        return gemm(
            input,
            weight.t(),
            bias=self.bias,
            activation=self.activation,
            residual=residual,
            out_dtype=None if residual is None else sum_type(input, residual),
            preactivation=self.preactivation,
            main_grad=None if into is None else into.t(),
        )

    def explanation(
        self, input: torch.Tensor, residual: torch.Tensor | None = None, *, gpu: str | None = None
    ) -> Explanation:
        """Say which kernel a call with these tensors runs; `warploom.explain(layer, x)` returns it.

        Args:
            input: [.., in_features].
            residual: As in a call.
            gpu: The name of a GPU: says what that GPU would run, for tensors on any device.

        Returns:
            The explanation; of a call that torch computes, it says why.
        """
        weight = self.weight
        if residual is not None:
            check_residual(input, residual, self.out_features)
        if input.dim() == 1:
            row = None if residual is None else residual.unsqueeze(0)
            return self.explanation(input.unsqueeze(0), row, gpu=gpu)
        keywords: dict[str, Any] = {"bias": self.bias, "activation": self.activation, "gpu": gpu}
        if residual is not None:
            keywords |= {"residual": residual, "out_dtype": sum_type(input, residual)}
        if self.recipe is not None and input.numel() and weight.numel():
            rows = input.detach().reshape(-1, self.in_features)
            if self.recipe == "fp4_qat":
                x, w = fp4.operands(rows, weight.detach())
            else:
                x, w = float8.operands(rows, weight.detach(), self.recipe)
            keywords |= {"scale_a": x.scale, "scale_b": w.scale}
            keywords.setdefault("out_dtype", product_type(input.dtype, input.device.type))
            return explain(x.values, w.values.t(), **keywords)
        reason = refusal(input, weight, residual, named=gpu is not None)
        if reason:
            return Explanation.by_torch(reason, "" if gpu is None else target(gpu).gpu)
        kind = product_type(input.dtype, input.device.type)  # that of autocast, where it is on
        if self.dropout_blocks and self.training:
            return block_dropout.explanation(
                input.to(kind), weight.to(kind), self.bias, self.dropout_blocks, gpu
            )
        return explain(input.to(kind), weight.to(kind).t(), **keywords)

    def extra_repr(self) -> str:
        """What torch's layer shows, and the options that are not at their defaults."""
        return super().extra_repr() + shown_options(self) + ", kernels=warploom"

    @classmethod
    def from_torch(cls, module: torch.nn.Linear, **options: Unpack[Options]) -> Self:
        """Return a layer that shares the parameters of a torch.nn.Linear.

        Args:
            module: The layer. Its hooks, training flag and other attributes come along.
            options: Keywords of the constructor, such as activation="silu".

        Returns:
            The new layer.

        Raises:
            ProblemError: For a subclass, which computes something else, for a layer whose `forward`
                was replaced, and for parameters that are on `meta` or on several devices.
        """
        check_module(module)
        return sharing(cls(1, 1, device="meta", **options), module)

    def to_torch(self) -> torch.nn.Linear:
        """Return a torch.nn.Linear with these parameters, shared; ProblemError with an activation.

        It has what `from_torch` takes along.
        """
        if self.activation:
            raise ProblemError(
                f"a Linear with activation {self.activation!r}",
                rule="torch.nn.Linear has none",
                fix="make torch.nn.Sequential of one and the activation",
            )
        return sharing(torch.nn.Linear(1, 1, device="meta"), self)

    def _by_torch(self, input: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        weight = self.weight
        into = main_grad(weight) if self.accumulate_into_main_grad else None
        weight = weight if into is None else accumulating(weight, into)
        result = ACTIVATIONS[self.activation](F.linear(input, weight, self.bias))
        return result if residual is None else result + residual

    def _dropping(self, input: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is not None:
            check_residual(input, residual, self.out_features)
        dropped = block_dropout.block_dropout_linear
        result = dropped(input, self.weight, self.bias, self.dropout_blocks)
        result = ACTIVATIONS[self.activation](result)
        return result if residual is None else result + residual

    def _in_float8(self, input: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        weight, bias, shape = self.weight, self.bias, (*input.shape[:-1], self.out_features)
        if input.shape[-1:] != (self.in_features,):  # or rows would have elements of several
            raise ProblemError(
                f"input {[*input.shape]} of a layer with {self.in_features} inputs",
                rule=f"must be [.., {self.in_features}]",
                fix="pass what the layer before it returns",
            )
        rows = input.reshape(-1, self.in_features)
        kind = product_type(input.dtype, input.device.type)
        is_fp4, cache = self.recipe == "fp4_qat", self._quantised
        # fully_shard gathers into the memory of before, and has no version count it.
        if getattr(self, "_is_fsdp_managed_module", False):
            cache = ParameterCache()
        if self.scaling is None and not is_fp4 and SCHEMES[cast("Recipe", self.recipe)].delayed:
            limits = (torch.finfo(one).max for one in (E4M3, E4M3, E5M2))
            with torch.inference_mode(False):  # a step of training changes them
                self.scaling = DelayedScaling(*limits, device=weight.device)
        options = float8.Options(
            recipe=cast("Recipe", self.recipe),
            gradient_dtype=self.gradient_dtype,
            out_dtype=kind,
            activation=self.activation,
            main_grad=main_grad(weight) if self.accumulate_into_main_grad else None,
            scaling=self.scaling,
        )
        if is_fp4:
            result = fp4.product(rows, weight, bias, options, cache).view(shape)
            return result if residual is None else result + residual
        read = (input, weight, bias, residual)
        # A checkpoint's first call may be without gradients, and its second is in a backward pass.
        if self.scaling is not None and self.training and not in_backward():
            self.scaling.advance()
        if torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in read):
            result = float8.product(rows, weight, bias, options, cache).view(shape)
            return result if residual is None else result + residual
        items: list[Item] = [("bias", bias)] if bias is not None else []
        items += [("activation", self.activation)] if self.activation is not None else []
        if residual is not None:
            items.append(("residual", residual.reshape(-1, self.out_features), 1.0))
            options = options._replace(out_dtype=sum_type(input, residual))
        return float8.inferred(rows, weight, items, options, cache).view(shape)


# A call between two graphs of torch.compile.
_Call = Callable[[Linear, torch.Tensor, torch.Tensor | None], torch.Tensor]
_outside_graphs: _Call = torch.compiler.disable(  # type: ignore[no-untyped-call]
    Linear._in_float8,
    reason="recipe 'delayed' keeps the largest magnitude of a gradient in the backward pass, where "
    "torch.compile traces no such write: leave fullgraph out, or take recipe 'tensorwise'",
)


def _own(layer: torch.nn.Linear) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A layer's weight and bias, which a module's attributes take ten times as long to find."""
    parameters = layer._parameters
    try:
        return cast("torch.Tensor", parameters["weight"]), parameters["bias"]
    except KeyError:  # what is parametrized or replicated has others
        return layer.weight, layer.bias
