"""Gate and up of a gated layer with quantized weights: one weight, whose rows alternate.

A kernel with a gate reads both from the same tile. So their memory is one weight's, until somebody
asks for one of them: then each has memory of its own again, with the bytes that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
# What a call of a layer reads of it: a layer that is given another is no part of one kernel.
_READ = ("activation", "forward", "metadata")
_ASSIGNED = "assign_to_params_buffers"  # of torch: whether a state's tensors become parameters

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
        self.is_moving = False
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
            self._parameters = _frozen(weight)
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
                halves = [self._apart(index) for index in range(2)]
            for layer, weight in zip(self.layers, halves, strict=True):
                layer._parameters = {**_frozen(weight), **layer._parameters}
                layer.__class__ = QuantizedLinear
                for name in ("_gate_up", "_half"):
                    del vars(layer)[name]
            self._parameters = {}

    def weight_of(self, index: int) -> PackedWeight | None:
        """The weight of one of the layers, in memory of its own; None if it has one already."""
        with _joining:
            return self._apart(index) if self._parameters else None

    def write(self, index: int, weight: PackedWeight) -> None:
        """Write the weight of one of the layers to the memory where kernels read it.

        That memory stays, as a parameter's that torch loads: CUDA graphs have its address.
        """
        with _joining, torch.inference_mode(False), torch.no_grad():
            if self._parameters:
                other = self._apart(1 - index)
                weight = interleave(*((other, weight) if index else (weight, other)))
            kept = self._parameters or self.layers[index]._parameters
            for name, tensor in weight.tensors().items():
                cast("torch.Tensor", kept[name]).copy_(tensor)

    def can_be_written(self) -> bool:
        """Whether its memory is there, and whole."""
        found = [*self._parameters.values()]
        return all(type(one) is FrozenParameter and not one.is_meta for one in found)

    @contextmanager
    def moving(self) -> Iterator[None]:
        """While this and both layers are moved or converted together."""
        self.is_moving = True
        try:
            yield
        finally:
            self.is_moving = False

    def _apart(self, index: int) -> PackedWeight:
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
    """A QuantizedLinear whose weight is in a GateUp, and becomes its own when it is asked for.

    What needs the weight as parameters asks `separated` for the layer, which is a QuantizedLinear
    from then on. Another thread may make it one at any time: so there is no `super()` here.
    """

    _gate_up: GateUp
    _half: int

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name in vars(self).get("_names", ()):
            return getattr(separated(self), name)
        return QuantizedLinear.__getattr__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:  # noqa: ANN401
        changed = name in _READ or name in self._names
        QuantizedLinear.__setattr__(separated(self) if changed else self, name, value)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter, as torch does, of a layer with a weight of its own."""
        separated(self).register_parameter(name, param)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Return the parameters of the layer, for who asks it and not the model.

        What goes through all modules, as fully_shard does without `recurse`, finds the GateUp's.
        """
        asked = separated(self) if recurse else self
        return QuantizedLinear.named_parameters(asked, prefix, recurse, remove_duplicate)

    def reset_parameters(self) -> None:
        """Make the weight 0, as that of a new layer."""
        separated(self).reset_parameters()

    def _packed(self) -> list[torch.Tensor]:
        """The weight's tensors; compilers, which cannot trace locks, take both weights apart."""
        if not torch.compiler.is_dynamo_compiling():
            return QuantizedLinear._packed(self)
        return [*self._gate_up._apart(self._half).tensors().values()]

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> QuantizedLinear:
        """Move the layer; where its GatedMLP moves, the weight does with that of the other."""
        both = _joined(self)
        if both is None or not both.is_moving:
            return separated(self)._apply(fn, recurse)
        torch.nn.Module._apply(self, fn, recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=both.data.device)).dtype
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        both = None if keep_vars else _joined(self)  # who asks for parameters may write to them
        weight = both and both.weight_of(both.layers.index(self))
        tensors = weight.tensors() if weight else {}
        destination.update({prefix + name: tensor for name, tensor in tensors.items()})
        saved = self if weight else separated(self)
        QuantizedLinear._save_to_state_dict(saved, destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        *collected: Any,
    ) -> None:
        """Load into a layer apart, whose weight is then written to where kernels read it."""
        both = None if local_metadata.get(_ASSIGNED, False) else _joined(self)
        half = both.layers.index(self) if both else 0
        weight = both.weight_of(half) if both and both.can_be_written() else None
        if both is None or weight is None:
            separated(self)._load_from_state_dict(state_dict, prefix, local_metadata, *collected)
            return
        layer = QuantizedLinear.from_packed(weight)
        layer._load_state_dict_pre_hooks = self._load_state_dict_pre_hooks
        layer._load_from_state_dict(state_dict, prefix, local_metadata, *collected)
        if any(prefix + name in state_dict for name in self._names):
            both.write(half, layer.weight)


def separated(layer: QuantizedLinear) -> QuantizedLinear:
    """Return a layer, which has a weight of its own by then; and so has the other of its two."""
    both = cast("GateUp | None", vars(layer).get("_gate_up"))
    if both is None:  # another thread was first
        return layer
    both.separate()
    if type(layer) is InterleavedLinear:  # a shallow copy, which has what its original has
        original = both.layers[layer._half]
        own = {name: getattr(original, name) for name in layer._names}
        layer._parameters = {**own, **layer._parameters}
        layer.__class__ = QuantizedLinear  # type: ignore[assignment]
        for name in ("_gate_up", "_half"):
            vars(layer).pop(name, None)
    return layer


def _joined(layer: QuantizedLinear) -> GateUp | None:
    """Where the weight of a layer is; None if that is a copy, or has one of its own."""
    both = cast("GateUp | None", vars(layer).get("_gate_up"))
    return both if both is not None and any(one is layer for one in both.layers) else None


def _frozen(weight: PackedWeight) -> dict[str, torch.nn.Parameter | None]:
    return {name: FrozenParameter(one) for name, one in weight.tensors().items()}


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
