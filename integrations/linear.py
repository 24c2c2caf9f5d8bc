"""`warploom.nn.Linear`: torch's linear layer, its activation and a residual in one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self, TypedDict, TypeVar, Unpack

import torch
import torch.nn.functional as F

from warploom.errors import ProblemError
from warploom.generator.targets import target
from warploom.integrations.linear_rules import product_type, refusal
from warploom.runtime.api import Explanation, explain
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.tensors import shown

_FUNCTIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}
LayerT = TypeVar("LayerT", bound=torch.nn.Linear)


class Options(TypedDict, total=False):
    """The keywords that `Linear` has beside those of torch.nn.Linear."""

    activation: str | None


_OPTIONS = Options.__annotations__.keys()


class Linear(torch.nn.Linear):
    """A linear layer: activation(x W^T + bias) + residual, by one kernel where there is one.

    Arguments before the star are those of torch.nn.Linear, and so are parameters, their names and
    their initial values: a state dict of either loads into the other. `activation` is relu, gelu,
    gelu_tanh or silu.

    The kernel takes bf16 and fp16 (also by autocast, as torch's layer does) on the GPUs that it
    exists for. Everything else is computed by torch's own operators, with the same meaning;
    `warploom.explain(layer, x)` says which, and why.
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
    ) -> None:
        _check(activation)
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return activation(input W^T + bias) + residual [.., out_features].

        `input` is [.., in_features]. `residual` has the shape of the result, whose type is that of
        the sum in torch. Raises ProblemError for a residual of another shape.
        """
        weight = self.weight
        if residual is not None:
            self._check_residual(input, residual)
        if refusal(input, weight, residual):
            return self._by_torch(input, residual)
        if input.dim() == 1:
            row = None if residual is None else residual.unsqueeze(0)
            return self.forward(input.unsqueeze(0), row).squeeze(0)
        return gemm(
            input,
            weight.t(),
            bias=self.bias,
            activation=self.activation,
            residual=residual,
            out_dtype=None if residual is None else _sum_type(input, residual),
        )

    def explanation(
        self, input: torch.Tensor, residual: torch.Tensor | None = None, *, gpu: str | None = None
    ) -> Explanation:
        """Which kernel a call with these tensors runs; what `warploom.explain(layer, x)` returns.

        Where it is torch's, this says why. Of a GPU that is named, tensors may be anywhere.
        """
        weight = self.weight
        if residual is not None:
            self._check_residual(input, residual)
        reason = refusal(input, weight, residual, named=gpu is not None)
        if reason:
            return Explanation.by_torch(reason, target(gpu).gpu if gpu else "")
        if input.dim() == 1:
            row = None if residual is None else residual.unsqueeze(0)
            return self.explanation(input.unsqueeze(0), row, gpu=gpu)
        keywords: dict[str, Any] = {"bias": self.bias, "activation": self.activation}
        if residual is not None:
            keywords |= {"residual": residual, "out_dtype": _sum_type(input, residual)}
        with torch.no_grad():
            return explain(input, weight.t(), gpu=gpu, **keywords)

    def extra_repr(self) -> str:
        """What torch's layer shows, and the options that are not at their defaults."""
        activation = f", activation={self.activation!r}" if self.activation else ""
        return f"{super().extra_repr()}{activation}"

    @classmethod
    def from_torch(cls, module: torch.nn.Linear, **options: Unpack[Options]) -> Self:
        """Return a layer with the parameters of a torch.nn.Linear, which are shared, not copied.

        Hooks, the training flag and other attributes come along; `options` are keywords of the
        constructor. Raises ProblemError for a module of another class (a subclass computes
        something else), for one whose calls were replaced, and for parameters that are on `meta`
        or on several devices.
        """
        _check_module(module)
        return _sharing(cls(1, 1, device="meta", **options), module)

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
        return _sharing(torch.nn.Linear(1, 1, device="meta"), self)

    def _by_torch(self, input: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        result = _FUNCTIONS[self.activation](F.linear(input, self.weight, self.bias))
        return result if residual is None else result + residual

    def _check_residual(self, input: torch.Tensor, residual: torch.Tensor) -> None:
        if residual.shape != (*input.shape[:-1], self.out_features):
            raise ProblemError(
                f"residual {list(residual.shape)} beside input {list(input.shape)}",
                rule=f"must have the shape of the result, [.., {self.out_features}]",
                fix="expand it to that shape, or add it to the result",
            )


def _sum_type(input: torch.Tensor, residual: torch.Tensor) -> torch.dtype:
    """The type that torch gives the sum of a product and a residual."""
    return torch.promote_types(product_type(input.dtype, input.device.type), residual.dtype)


def _check(activation: str | None) -> None:
    if activation not in _FUNCTIONS:
        raise ProblemError(
            f"activation {shown(activation)}",
            rule=f"must be one of {', '.join(filter(None, _FUNCTIONS))}, or None",
            fix="use one of them, or apply it to the result",
        )


def _check_module(module: torch.nn.Linear) -> None:
    """Raise ProblemError for a module whose calls are not, or could not be, F.linear's."""
    if type(module) is not torch.nn.Linear:
        raise ProblemError(
            f"a {type(module).__name__}",
            rule="must be a torch.nn.Linear itself: a subclass may compute something else",
            fix="make a warploom.nn.Linear and load its state dict",
        )
    if "forward" in vars(module):
        raise ProblemError(
            "a Linear whose forward was replaced on the instance",
            rule="must compute what torch.nn.Linear does",
            fix="convert it before its calls are wrapped, as offloading does",
        )
    places = {name: tensor.device for name, tensor in module.named_parameters()}
    told = ", ".join(f"{name} on {device}" for name, device in places.items())
    if any(device.type == "meta" for device in places.values()):
        raise ProblemError(
            told, rule="must lie in memory", fix="load its weights first, then convert it"
        )
    if len(set(places.values())) > 1:
        raise ProblemError(told, rule="must be on one device", fix="move them together")


def _sharing(made: LayerT, module: torch.nn.Linear) -> LayerT:
    """Give a new layer all that a module has but its options, and return it.

    The maps of parameters are the layer's own; those of hooks are the module's, since a hook's
    handle removes it there.
    """
    taken = {name: value for name, value in vars(module).items() if name not in _OPTIONS}
    own = ("_parameters", "_buffers", "_modules")
    vars(made).update(taken | {name: taken[name].copy() for name in own})
    return made
