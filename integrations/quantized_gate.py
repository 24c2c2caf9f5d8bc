"""Gate and up of a gated layer with quantized weights: one weight, whose rows alternate.

A kernel with a gate reads both from the same tile. So their memory is one weight's, until somebody
asks for one of them: then each has memory of its own again, with the bytes that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self, cast

import torch
import torch.nn.functional as F

from warploom.errors import ProblemError
from warploom.generator.epilogue import GateFunction
from warploom.generator.locks import fork_lock
from warploom.integrations.frozen import FrozenParameter
from warploom.integrations.linear_rules import product_type
from warploom.integrations.quantized_linear import QuantizedLinear, moved
from warploom.integrations.quantized_rules import check_whole, refusal
from warploom.integrations.quantized_weight import dequantized
from warploom.quantization import PackedWeight
from warploom.quantization.interleave import every_other, interleave
from warploom.runtime.families._product.steps.gate import activated, split
from warploom.runtime.families.mixed_gemm.api import mixed_gemm
from warploom.runtime.operator import is_distributed

MULTIPLE = 8  # of rows of the gate, and of up

_joining = fork_lock()  # guards which layers have a weight of their own: several threads may ask


class GateUp(torch.nn.Module):
    """The weights of gate and up, while they are one; without a state of its own.

    The layers' state dicts have the weights, as if each had its own.

    Args:
        gate: The layer of the even rows, and
        up: of the odd ones; see `interleavable`.
    """

    data: torch.Tensor

    def __init__(self, gate: QuantizedLinear, up: QuantizedLinear) -> None:
        super().__init__()
        self.layers = gate, up  # in a tuple, which makes them no children
        self.join()

    def forward(self, x: torch.Tensor, function: GateFunction) -> torch.Tensor:
        """Return function(gate(x)) * up(x), by one kernel where there is one.

        Args:
            x: [.., K].
            function: That of the gate.

        Returns:
            [.., N].
        """
        if x.dim() == 1:
            return self.forward(x.unsqueeze(0), function).squeeze(0)
        if not (parameters := self._parameters):  # another thread has separated them
            first, second = (cast("torch.Tensor", layer(x)) for layer in self.layers)
            return activated(function, first) * second
        weight = self._weight(parameters)
        if not refusal(x, weight):
            return mixed_gemm(x, weight, epilogue=[("gate_interleaved", function)])
        check_whole(weight)
        kind = product_type(x.dtype, x.device.type)
        gate, up = split(F.linear(x.to(kind), dequantized(weight, kind)), "interleaved")
        return activated(function, gate) * up

    def holds(self, gate: torch.nn.Module | None, up: torch.nn.Module | None) -> bool:
        """Whether these are the layers whose weights it has."""
        return bool(self._parameters) and (gate, up) == self.layers

    def join(self) -> None:
        """Take the layers' weights, if they have some that can be one.

        Maps of parameters are replaced, never changed: shallow copies of the layers share them.
        """
        with _joining:
            gate, up = self.layers
            if not interleavable(gate, up):
                return
            with torch.inference_mode(False), torch.no_grad():
                weight = interleave(gate.weight, up.weight)
            self.metadata = weight.metadata
            for name, tensor in weight.tensors().items():
                self.register_parameter(name, FrozenParameter(tensor))
            for half, layer in enumerate(self.layers):
                # Past torch, which would make it a child.
                vars(layer).update(_gate_up=self, _half=half)
                layer.__class__ = InterleavedLinear
                layer._parameters = {"bias": None}

    def separate(self) -> None:
        """Give each layer a weight of its own, with the bytes that it had."""
        with _joining:
            if not self._parameters:
                return
            with torch.inference_mode(False), torch.no_grad():
                halves = [self.weight_of(index) for index in range(2)]
            for layer, weight in zip(self.layers, halves, strict=True):
                own = {name: FrozenParameter(one) for name, one in weight.tensors().items()}
                layer._parameters = {**own, **layer._parameters}
                layer.__class__ = QuantizedLinear
                for name in ("_gate_up", "_half"):
                    del vars(layer)[name]
            self._parameters = {}

    def weight_of(self, index: int) -> PackedWeight:
        """The weight of one of the layers, in memory of its own."""
        if is_distributed(self.data):
            raise ProblemError(
                "a gated layer with quantized weights, whose parameters are sharded",
                rule="must be whole for the weight of gate or up to be read",
                fix="call separate() of the warploom.nn.GatedMLP before fully_shard",
            )
        return every_other(self._weight(self._parameters), index)

    def _weight(self, found: Mapping[str, Any]) -> PackedWeight:
        if torch.compiler.is_dynamo_compiling():
            parameters: dict[str, Any] = {name: getattr(self, name) for name in found}
        else:
            parameters = {
                name: one.plain if type(one) is FrozenParameter else one
                for name, one in found.items()
            }
        return PackedWeight(metadata=self.metadata, **parameters)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """As a quantized layer's: the weight moves, and keeps its types."""
        names = tuple(self._parameters)
        super()._apply(moved(self, names, fn), recurse)  # type: ignore[no-untyped-call]
        for name, parameter in [*self._parameters.items()]:
            if parameter is not None and type(parameter) is torch.nn.Parameter:  # torch made it
                self.register_parameter(name, FrozenParameter(parameter.data))
        return self

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Save nothing: the layers do."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Join what the layers, which come before, have loaded."""
        self.join()


class InterleavedLinear(QuantizedLinear):
    """A QuantizedLinear whose weight is in a GateUp, and becomes its own when it is asked for."""

    _gate_up: GateUp
    _half: int

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in vars(self).get("_names", ()):
            self._separate()
            return getattr(self, name)
        return super().__getattr__(name)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter, as torch does, of a layer with a weight of its own."""
        self._separate()
        self.register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Make the weight 0, as that of a new layer."""
        self._separate()
        self.reset_parameters()

    def _separate(self) -> None:
        both = cast("GateUp | None", vars(self).get("_gate_up"))
        if both is None:  # another thread was first
            return
        both.separate()
        if type(self) is InterleavedLinear:  # a shallow copy, which has what its original has
            original = both.layers[self._half]
            own = {name: getattr(original, name) for name in self._names}
            self._parameters = {**own, **self._parameters}
            self.__class__ = QuantizedLinear  # type: ignore[assignment]
            for name in ("_gate_up", "_half"):
                del vars(self)[name]

    def _is_copied(self) -> bool:
        return self._gate_up.layers[self._half] is not self

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> QuantizedLinear:
        """Move both layers: their weight is one."""
        if self._is_copied():
            self._separate()
            return self._apply(fn, recurse)
        torch.nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        self._gate_up._apply(fn)
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self._gate_up.data.device)).dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if keep_vars or self._is_copied():  # who asks for parameters may write to them
            self._separate()
            self._save_to_state_dict(destination, prefix, keep_vars)
            return
        for name, tensor in self._gate_up.weight_of(self._half).tensors().items():
            destination[prefix + name] = tensor
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._separate()
        self._load_from_state_dict(*args, **kwargs)


def interleavable(gate: object, up: object) -> bool:
    """Whether the weights of two layers can be one, which a kernel with a gate reads."""
    if type(gate) is not QuantizedLinear or type(up) is not QuantizedLinear:
        return False
    parameters = [one._parameters.get(name) for one in (gate, up) for name in gate._names]
    return (
        gate is not up
        and gate.metadata == up.metadata
        and gate.metadata.n % MULTIPLE == 0
        and (gate.bias, up.bias, gate.activation, up.activation) == (None,) * 4
        and all(type(one) is FrozenParameter and not one.is_meta for one in parameters)
        and len({one.device for one in parameters if one is not None}) == 1
    )
