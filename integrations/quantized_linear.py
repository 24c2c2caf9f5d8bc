"""`warploom.nn.QuantizedLinear`: a linear layer whose weight has 2, 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F

from warploom.errors import ProblemError
from warploom.generator.formats import Activations
from warploom.generator.targets import target
from warploom.integrations.frozen import FrozenParameter
from warploom.integrations.linear import Linear
from warploom.integrations.linear_options import ACTIVATIONS, DEFAULTS, Options, check, check_torchs
from warploom.integrations.linear_rules import check_residual, product_type, sum_type
from warploom.integrations.quantized_rules import (
    INPUTS,
    check_linear,
    check_parts,
    check_whole,
    refusal,
)
from warploom.integrations.quantized_state import KEY, check_kind, check_state, encoded, entries
from warploom.integrations.quantized_weight import LayerWeight, dequantized
from warploom.integrations.saving import guard
from warploom.quantization import PackedWeight, quantize
from warploom.quantization.dequantize import TYPES
from warploom.quantization.packed_weight import NAMES
from warploom.quantization.quantize import described
from warploom.runtime.api import Explanation, explain
from warploom.runtime.families.mixed_gemm.api import mixed_gemm
from warploom.runtime.families.mixed_gemm.layer import Call, Layer, Read

READ = "_is_hf_initialized"  # what transformers marks a parameter by that it has read


class QuantizedLinear(torch.nn.Linear):
    """A linear layer with a quantized weight: activation(x W^T + bias) + residual, in one kernel.

    `from_linear` makes one of a layer, and `from_packed` of a quantized weight. The constructor
    makes one whose weight and bias are 0, for a state dict to be loaded.

    Args:
        in_features: K, the size of the input's last dimension.
        out_features: N, the size of the result's last dimension.
        bias: Whether there is a bias [N].
        device: The device of the parameters.
        dtype: The dtype of the bias, and of `weight.dtype`.
        format: As for `warploom.quantize`; so are the following.
        group: Values along K that share a scale.
        symmetric: Whether there are no zero points.
        scale_dtype: The dtype of the scales.
        activation: "relu", "gelu", "gelu_tanh", "silu" or None.

    The weight's tensors are parameters that never require a gradient, and keep their dtypes
    whatever the module is converted to. The layer is differentiable in x, bias and residual, not in
    its weight. A state dict has the tensors and one more that describes them: a weight loads whole,
    into a layer of the same format, group and shape.

    Kernels take bf16 and fp16 (also by autocast) on a Hopper GPU. Everything else is torch's matmul
    with the dequantized weight; `warploom.explain(layer, x)` says why.

    Example:
        >>> linear = torch.nn.Linear(128, 64, dtype=torch.bfloat16)
        >>> layer = warploom.nn.QuantizedLinear.from_linear(linear, "int4")
        >>> layer(torch.randn(4, 128).bfloat16()).shape
        torch.Size([4, 64])
    """

    PACKED_FOR: ClassVar[Activations] = INPUTS
    bias: torch.nn.Parameter | None  # type: ignore[assignment]
    _is_hf_initialized = True  # nothing of it is for transformers to fill with random numbers

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: Any = None,  # noqa: ANN401 (whatever torch.nn.Linear takes)
        dtype: torch.dtype | None = None,
        *,
        format: str = "int4",
        group: int | Literal["auto"] | None = "auto",
        symmetric: bool | None = None,
        scale_dtype: torch.dtype | None = None,
        activation: str | None = None,
    ) -> None:
        check_torchs(bias, dtype)
        shape = (out_features, in_features)
        metadata = described(shape, format, group, symmetric, scale_dtype, self.PACKED_FOR)
        kinds = metadata.tensors()
        made = {name: torch.zeros(s, dtype=t, device=device) for name, (s, t) in kinds.items()}
        zeros = torch.zeros(out_features, dtype=dtype, device=device) if bias else None
        dtype = dtype or torch.get_default_dtype()
        self._set_up(PackedWeight.from_tensors(made, metadata), zeros, activation, dtype)

    def _set_up(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str | None,
        dtype: torch.dtype,
    ) -> None:
        options: Options = {**DEFAULTS, "activation": activation}
        check(options)
        super(torch.nn.Linear, self).__init__()
        guard(QuantizedLinear)
        self.activation = activation
        self.metadata = weight.metadata
        self.in_features = weight.metadata.k
        self.out_features = weight.metadata.n
        self.dtype = dtype
        self._calls = Layer()
        self._names = tuple(weight.tensors())
        for name, tensor in weight.tensors().items():
            self.register_parameter(name, FrozenParameter(tensor))
        if bias is not None and not isinstance(bias, torch.nn.Parameter):
            bias = torch.nn.Parameter(bias)
        self.register_parameter("bias", bias)

    @classmethod
    def from_packed(
        cls,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        activation: str | None = None,
    ) -> Self:
        """Return a layer of a quantized weight and a bias, which are shared, not copied.

        Args:
            weight: [N, K], quantized for 16-bit activations.
            bias: [N], or None. `layer.weight.dtype` is its dtype; without a bias, that of the
                scales if these are numbers of 16 or 32 bits, else bf16.
            activation: "relu", "gelu", "gelu_tanh", "silu" or None.

        Returns:
            The layer.

        Raises:
            ProblemError: For a weight quantized for 8-bit activations, and for a bias of another
                shape or device, or of a dtype without gradients.
        """
        check_parts(weight, bias, cls.PACKED_FOR)
        scales = weight.metadata.scale_dtype
        dtype = scales if scales in TYPES else torch.bfloat16
        made = cls.__new__(cls)
        made._set_up(weight, bias, activation, dtype if bias is None else bias.dtype)
        return made

    @classmethod
    def from_linear(
        cls,
        linear: torch.nn.Linear,
        format: str = "int4",
        group: int | Literal["auto"] | None = "auto",
        symmetric: bool | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> Self:
        """Return a layer with the quantized weight of a torch.nn.Linear or warploom.nn.Linear.

        Args:
            linear: The layer. Its bias, hooks, training flag, activation and other attributes come
                along.
            format: As for `warploom.quantize`; so are the following.
            group: Values along K that share a scale.
            symmetric: Whether there are no zero points.
            scale_dtype: The dtype of the scales.

        Returns:
            The new layer.

        Raises:
            ProblemError: For layers that `warploom.nn.Linear.from_torch` refuses, for weights that
                are trained in fp8 or computed, and for weights that cannot be quantized so.
        """
        check_linear(linear)
        how = (format, group, symmetric, scale_dtype, cls.PACKED_FOR)
        packed = quantize(linear.weight.detach(), *how)
        return cls.in_place_of(linear, packed, linear.bias)

    @classmethod
    def in_place_of(
        cls, linear: torch.nn.Linear, weight: PackedWeight, bias: torch.Tensor | None
    ) -> Self:
        """Return a layer of a packed weight and a bias that is else what a linear layer is.

        Args:
            linear: Whose hooks, training flag, type and activation the new layer has; of its own
                weight and bias nothing is read.
            weight: [N, K] of the layer.
            bias: [N] or None.

        Raises:
            ProblemError: what `from_packed` raises.
        """
        activation = linear.activation if isinstance(linear, Linear) else None
        made = cls.from_packed(weight, bias, activation=activation)
        made.dtype = linear.weight.dtype
        own = made.bias
        _share(made, linear)
        made.register_parameter("bias", own)
        return made

    # ---- What it is ------------------------------------------------------------------------------

    @property
    def weight(self) -> LayerWeight:  # type: ignore[override]
        """The weight as the layer's parameters have it, for what reads it as that of a Linear."""
        data, *channels = self._packed()
        return LayerWeight(data, self.metadata, *channels, dtype=self.dtype)

    def reset_parameters(self) -> None:
        """Make the weight and the bias 0, as those of a new layer."""
        with torch.no_grad():
            for parameter in self._parameters.values():
                if parameter is not None:
                    parameter.zero_()

    def extra_repr(self) -> str:
        """Extents, whether there is a bias, the format, and what it takes."""
        told = f"in_features={self.in_features}, out_features={self.out_features}, "
        told += f"bias={self.bias is not None}, format={self.metadata.format!r}, "
        told += f"group={self.metadata.group}, bits={self.metadata.bits:.3f}"
        told += f", activation={self.activation!r}" if self.activation else ""
        return f"{told}, kernels=warploom"

    # ---- What it computes ------------------------------------------------------------------------

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
        plain = residual is None
        if plain and not torch.compiler.is_dynamo_compiling():
            found = self._calls.again(*self._asked(input))
            if found is not None:
                return found
        data, *channels = self._packed()
        weight = PackedWeight(data, self.metadata, *channels)
        if residual is not None:
            check_residual(input, residual, self.out_features)
        if refusal(input, weight, residual):
            return self._by_torch(input, weight, residual)
        if input.dim() == 1:
            row = None if residual is None else residual.unsqueeze(0)
            return self.forward(input.unsqueeze(0), row).squeeze(0)
        if plain and not torch.compiler.is_dynamo_compiling():
            return self._calls.call(*self._asked(input))
        return mixed_gemm(
            input,
            weight,
            bias=self.bias,
            activation=self.activation,
            residual=residual,
            out_dtype=None if residual is None else sum_type(input, residual),
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
        reason = refusal(input, weight, residual, named=gpu is not None)
        if reason:
            return Explanation.by_torch(reason, "" if gpu is None else target(gpu).gpu)
        keywords: dict[str, Any] = {"bias": self.bias, "activation": self.activation, "gpu": gpu}
        if residual is not None:
            keywords |= {"residual": residual, "out_dtype": sum_type(input, residual)}
        kind = product_type(input.dtype, input.device.type)  # that of autocast, where it is on
        return explain(mixed_gemm, input.to(kind), weight, **keywords)

    def _asked(self, input: torch.Tensor) -> tuple[Call, Read]:
        """What a call asks for; a module's attributes take ten times as long to find."""
        parameters: dict[str, Any] = self._parameters
        try:
            packed = [parameters[name].plain for name in self._names]
            bias = parameters["bias"]
        except (AttributeError, KeyError):  # sharded, replicated, parametrized
            packed, bias = self._packed(), self.bias
        if bias is None:
            return Call(self.metadata, self.activation, False), (input, *packed)
        return Call(self.metadata, self.activation, True), (input, *packed, bias)

    def _packed(self) -> list[torch.Tensor]:
        """The weight's tensors, in the order of NAMES: parameters for those who trace them."""
        found: list[Any] = [getattr(self, name) for name in self._names]
        if torch.compiler.is_dynamo_compiling():
            return found
        return [one.plain if type(one) is FrozenParameter else one for one in found]

    def _by_torch(
        self, input: torch.Tensor, weight: PackedWeight, residual: torch.Tensor | None
    ) -> torch.Tensor:
        check_whole(weight)
        kind = product_type(input.dtype, input.device.type)
        bias = None if self.bias is None else self.bias.to(kind)
        result = ACTIVATIONS[self.activation](F.linear(input, dequantized(weight, kind), bias))
        return result if residual is None else result + residual

    # ---- Types, states ---------------------------------------------------------------------------

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> QuantizedLinear:
        """What `to`, `half`, `cuda` and the like do: the weight moves, and keeps its types."""
        super()._apply(moved(self, self._names, fn), recurse)  # type: ignore[no-untyped-call]
        self.dtype = fn(torch.empty(0, dtype=self.dtype, device=self._packed()[0].device)).dtype
        for name in self._names:
            self.register_parameter(name, self._parameters[name])
        return self

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter, as torch does; one of the weight's is frozen.

        Raises ProblemError for a `weight`: the layer has another, which no assignment replaces.
        """
        if name == "weight" and param is not None:
            raise ProblemError(
                "a weight that is assigned to a QuantizedLinear",
                rule="must be a quantized weight, as the layer was made with",
                fix="make a layer of it, with from_packed or from_linear; leave an output head "
                "whose weight is tied to an embedding's out of what is quantized",
            )
        if name in NAMES and type(param) is torch.nn.Parameter:  # torch made it anew
            read = getattr(param, READ, False)
            param = FrozenParameter(param.data)
            setattr(param, READ, read)
        super().register_parameter(name, param)

    def get_extra_state(self) -> torch.Tensor:
        """What the tensors are, as a tensor."""
        return encoded(self.metadata)

    def set_extra_state(self, state: object) -> None:
        """Raise ProblemError for tensors of another kind: a layer stays what it is."""
        check_kind(state, self.metadata)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        guard(QuantizedLinear)
        super()._save_to_state_dict(*args, **kwargs)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take a state, or nothing of it and tell why, as torch collects it."""
        names = (*NAMES, KEY, "bias", "weight")
        given = {name: state_dict[prefix + name] for name in names if prefix + name in state_dict}
        try:
            check_state(given, self.metadata, self.bias)
        except ProblemError as error:
            error_msgs.append(f"{prefix.rstrip('.') or type(self).__name__}: {error}")
            wanted = (prefix + name for name in entries(self.metadata))
            missing_keys.extend(key for key in wanted if strict and key not in state_dict)
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


def moved(
    module: torch.nn.Module, names: Iterable[str], fn: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what moves a module's tensors as `fn` does; these parameters keep their types."""
    packed = [id(module._parameters[name]) for name in names]

    def kept(tensor: torch.Tensor) -> torch.Tensor:
        found = fn(tensor)
        if id(tensor) in packed and found.dtype != tensor.dtype:
            found = tensor.to(found.device)
        # As torch.__future__ may ask, torch makes a new parameter: of this class it cannot.
        return found.data if type(found) is FrozenParameter else found

    return kept


def _share(made: QuantizedLinear, linear: torch.nn.Linear) -> None:
    """Give a new layer all that a module has but its weight and its options.

    Maps of parameters are the layer's own; those of hooks are the module's, as in linear_sharing.
    """
    maps = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
    own = {*maps, *DEFAULTS, "_calls", "_names", "dtype", "in_features", "metadata", "out_features"}
    vars(made).update({name: one for name, one in vars(linear).items() if name not in own})
    for name in maps:
        vars(made)[name].update(vars(linear)[name])
    del made._parameters["weight"]
