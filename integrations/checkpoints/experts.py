"""Experts with quantized weights: two `QuantizedLinear` for each, in the memory of all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from operator import is_
from typing import Any, Self

import torch

from warploom.integrations.experts import experts, gate_function
from warploom.integrations.frozen import FrozenParameter
from warploom.integrations.joined_storage import separate_storages
from warploom.integrations.linear_sharing import share_hooks
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.integrations.quantized_rules import refusal
from warploom.quantization import PackedExperts, PackedWeight
from warploom.runtime.families._product.steps.gate import ALPHA, LIMIT, SWIGLU_OAI

CLASS = "GptOssExperts"  # of transformers, which this takes the place of
PARTS = ("gate_up_proj", "down_proj")


class QuantizedExperts(torch.nn.Module):
    """Experts of a layer, each two quantized linear layers.

    The parameters of expert 3 are those of `gate_up_proj.3` and `down_proj.3`. Results are those of
    transformers' experts with the same weights. On tokens of 16 bits all experts are two grouped
    GEMMs, and nothing waits for the device: their weights are kept in one piece of memory, of which
    each layer has a part. Tokens, routing weights and biases have gradients; weights have none.
    With other tokens, with parameters that FSDP shards, and where a layer has hooks or was
    replaced, as by an adapter's, each expert that a token was sent to is two mixed-input GEMMs;
    which ones they are is read on the host, as transformers' own loop does.
    """

    def __init__(
        self,
        gate_up_proj: Iterable[QuantizedLinear],
        down_proj: Iterable[QuantizedLinear],
        *,
        gate: str = SWIGLU_OAI,
        alpha: float = ALPHA,
        limit: float = LIMIT,
    ) -> None:
        """Take the layers of all experts, in order.

        Args:
            gate_up_proj: For each expert [2 I, H]; rows of gate and up alternate.
            down_proj: For each expert [H, I].
            gate: The function of gate, as `warploom.experts` takes it.
            alpha: Of swiglu_oai: factor of gate in its sigmoid.
            limit: Of swiglu_oai: gate is clamped from above by it, up from both sides.
        """
        super().__init__()
        self.gate_up_proj = torch.nn.ModuleList(gate_up_proj)
        self.down_proj = torch.nn.ModuleList(down_proj)
        self.gate = gate
        self.alpha = alpha
        self.limit = limit
        self._stacks = {part: _Stack() for part in PARTS}

    @classmethod
    def in_place_of(
        cls,
        experts: Any,  # noqa: ANN401 (of transformers)
        gate_up_proj: Iterable[QuantizedLinear],
        down_proj: Iterable[QuantizedLinear],
        *,
        gate: str = SWIGLU_OAI,
    ) -> QuantizedExperts:
        """Return experts with these layers, and the constants and hooks of transformers' module."""
        constants = (
            {name: getattr(experts, name) for name in ("alpha", "limit")}
            if (gate == SWIGLU_OAI)
            else {}
        )
        made = cls(gate_up_proj, down_proj, gate=gate, **constants).train(experts.training)
        share_hooks(made, experts)
        return made

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_indices: torch.Tensor,
        routing_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the experts of each token give, weighted and added up [T, H].

        Args:
            hidden_states: [T, H].
            router_indices: The experts of each token [T, top_k]; others than there are are skipped.
            routing_weights: Their weights [T, top_k], or those of all experts [T, experts].
        """
        parts = [getattr(self, part) for part in PARTS]
        listed = routing_weights.shape == router_indices.shape
        plain = all(self._stacks[part].is_plain(getattr(self, part)) for part in PARTS)
        if not plain or refusal(hidden_states, parts[0][0].weight):
            return self._one_by_one(hidden_states, router_indices, routing_weights, listed)
        gate_up, down = (self._stacks[part].of(getattr(self, part)) for part in PARTS)
        if gate_up is None or down is None:
            return self._one_by_one(hidden_states, router_indices, routing_weights, listed)
        if not listed:
            routing_weights = routing_weights.gather(1, router_indices.clamp(0, len(parts[0]) - 1))
        return experts(
            *(hidden_states, router_indices, routing_weights, gate_up[0], down[0]),
            gate=self.gate,
            gate_layout="interleaved",
            gate_up_bias=_trained(parts[0], gate_up[1]),
            down_bias=_trained(parts[1], down[1]),
            alpha=self.alpha,
            limit=self.limit,
            first_expert=0,
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch has it)
        """As a module's: tensors in the memory of the parameters, with a storage for each."""
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        starts = tuple(f"{prefix}{part}." for part in PARTS)
        separate_storages(state, [key for key in state if key.startswith(starts)])
        return state

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """As a module's, after which layers have other memory."""
        self._forget()
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call, no-any-return]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._forget()  # before layers take other parameters
        super()._load_from_state_dict(*args, **kwargs)

    def _forget(self) -> None:
        """Let the next call find out where the memory of layers is: compilers see no addresses."""
        self._stacks = {part: _Stack() for part in PARTS}

    def _one_by_one(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, listed: bool
    ) -> torch.Tensor:
        """The same, by two products for each expert that has tokens."""
        total = torch.zeros_like(hidden)
        hit: torch.Tensor = torch.unique(ids)
        for expert in hit.tolist():
            if not 0 <= expert < len(self.down_proj):  # tokens of other ranks
                continue
            token, slot = torch.where(ids == expert)
            both = self.gate_up_proj[expert](hidden[token])
            inner = gate_function(both, self.gate, "interleaved", self.alpha, self.limit)
            share = weights[token, slot if listed else expert]
            result = self.down_proj[expert](inner) * share.unsqueeze(-1)
            total.index_add_(0, token, result.to(total.dtype))
        return total


def _plain(layer: torch.nn.Module) -> bool:
    """Whether a layer is its weight and bias alone, which nothing wrapped and nobody is told of."""
    about = vars(layer)
    return type(layer) is QuantizedLinear and not (
        about["_forward_hooks"]
        or about["_forward_pre_hooks"]
        or "forward" in about
        or about["activation"]
    )


def _trained(layers: Any, stacked: torch.Tensor | None) -> torch.Tensor | None:  # noqa: ANN401
    """The biases of layers, of which autograd knows where one of them is to have a gradient."""
    if stacked is None or not torch.is_grad_enabled():
        return stacked
    biases = [layer._parameters["bias"] for layer in layers]
    return torch.stack(biases) if any(one.requires_grad for one in biases) else stacked


class _Stack:
    """The weights and biases of several layers in one piece of memory each; a copy has none."""

    _made: tuple[PackedExperts, torch.Tensor | None] | None = None
    _given: tuple[torch.nn.Parameter | None, ...] = ()  # the parameters of the layers
    _moves = 0  # of parameters of any layers, when those of these were last seen in that memory
    _listed: tuple[torch.nn.Module, ...] = ()  # layers that were plain, what they are and have
    _about: tuple[dict[str, Any], ...] = ()
    _hooks: tuple[dict[int, Any], ...] = ()

    def __deepcopy__(self, memo: object) -> _Stack:
        return _Stack()

    def __getstate__(self) -> None:
        return None

    def is_plain(self, layers: Any) -> bool:  # noqa: ANN401
        """Whether all layers are `_plain`: of many it takes as long as a kernel to ask each."""
        if torch.compiler.is_dynamo_compiling():
            return all(_plain(layer) for layer in layers)
        listed = tuple(layers._modules.values())
        if listed != self._listed:
            if not all(map(_plain, listed)):
                return False
            self._listed, self._about = listed, tuple(map(vars, listed))
            names = ("_forward_hooks", "_forward_pre_hooks")
            self._hooks = tuple(about[name] for about in self._about for name in names)
        return not any(self._hooks) and not any(
            "forward" in about or about["activation"] for about in self._about
        )

    def of(self, layers: Any) -> tuple[PackedExperts, torch.Tensor | None] | None:  # noqa: ANN401
        """Those of the layers, which are moved there if they are elsewhere; None if not alike."""
        compiling = torch.compiler.is_dynamo_compiling()  # which sees no addresses
        if self._made is not None and (compiling or self._is_of(layers, *self._made)):
            return self._made
        self._made = stacked(layers) if _are_alike(layers) else None
        if not compiling:
            self._given = tuple(_parameters(layers))
            self._moves = FrozenParameter.moves[0]
        return self._made

    def _is_of(self, layers: Any, packed: PackedExperts, bias: torch.Tensor | None) -> bool:  # noqa: ANN401
        """Whether layers have the parameters that they had, in this memory: the first and the last
        tell of it, unless a weight took other memory since.
        """
        found, moves = tuple(_parameters(layers)), FrozenParameter.moves[0]
        if len(found) != len(self._given) or not all(map(is_, self._given, found)):
            return False
        at_ends = (0, len(packed) - 1)
        there = all(
            _is_at(layers[at], packed[at], None if bias is None else bias[at])
            for at in (at_ends if moves == self._moves else range(len(packed)))
        )
        self._moves = moves
        return there


def _is_at(layer: QuantizedLinear, packed: PackedWeight, bias: torch.Tensor | None) -> bool:
    """Whether a layer's parameters are in this memory."""
    own = layer.weight.tensors()
    return all(
        own[name].data_ptr() == one.data_ptr() for name, one in packed.tensors().items()
    ) and (bias is None or (layer.bias is not None and layer.bias.data_ptr() == bias.data_ptr()))


def _are_alike(layers: Any) -> bool:  # noqa: ANN401
    """Whether all layers have weights of one kind, and a bias of one type, or none of them; and
    their memory is their own. FSDP gathers parameters anew for each pass, in memory that it keeps.
    """
    biases = {None if layer.bias is None else layer.bias.dtype for layer in layers}
    if len({layer.metadata for layer in layers}) != 1 or len(biases) != 1:
        return False
    weights = (layer._parameters[name] for layer in layers for name in layer._names)
    return torch.compiler.is_dynamo_compiling() or all(
        isinstance(one, FrozenParameter) for one in weights
    )


def _parameters(layers: Any) -> Iterator[torch.nn.Parameter | None]:  # noqa: ANN401
    return (one for layer in layers for one in layer._parameters.values())


def stacked(layers: Any) -> tuple[PackedExperts, torch.Tensor | None]:  # noqa: ANN401
    """Weights and biases of layers, in memory of which the layers then have a part each."""
    # Parameters in memory that was made in inference mode could not be written to outside of it.
    with torch.inference_mode(False), torch.no_grad():
        packed = PackedExperts.stack(layer.weight for layer in layers)
        biases = [layer.bias for layer in layers]
        bias = None if biases[0] is None else torch.stack(biases)
        for expert, layer in enumerate(layers):
            for name, tensor in packed[expert].tensors().items():
                layer._parameters[name].data = tensor
            if bias is not None:
                layer.bias.data = bias[expert]
    return packed, bias
