"""`warploom.nn.GatedMLP`: a gated feed-forward layer, whose first two products are one.

The weights of gate and up stay parameters of their own, with the names and the objects that they
had: their memory lies one behind the other, so that one kernel reads both in place. Quantized ones
are one weight instead, see quantized_gate.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, Self, cast

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.generator.epilogue import GateFunction
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.integrations.devices import unserved
from warploom.integrations.float8 import Options, WithTranspose
from warploom.integrations.float8_gated import Gated, Layer, gated_float8
from warploom.integrations.float8_linear import INPUTS, Float8Linear, fp8_linear_type, multiplied
from warploom.integrations.frozen import FrozenParameter
from warploom.integrations.joined_storage import separate, separate_storages
from warploom.integrations.linear import Linear
from warploom.integrations.linear_options import ACTIVATIONS
from warploom.integrations.linear_rules import PRODUCTS, refusal
from warploom.integrations.main_grad import main_grad
from warploom.integrations.quantized_gate import GateUp, interleavable
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.integrations.recipes import E4M3, SCHEMES, Recipe
from warploom.integrations.scaling import ParameterCache
from warploom.runtime.families.gemm.api import gemm
from warploom.runtime.families.gemm.gated_layer import MainGrads, gated_layer, joined
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.operator import is_distributed
from warploom.runtime.tensors import launchable, lowered, shown

GATES = tuple(name for name in ACTIVATIONS if name is not None)
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# Recipes of which a layer is one function: the others have state of each of its layers.
GATED_RECIPES = tuple(recipe for recipe, scheme in SCHEMES.items() if not scheme.delayed)
MULTIPLE = 8  # of rows of the gate, and of up: what kernels load of each in turn

# What transformers' classes of gated layers compute (LlamaMLP, Qwen2MLP, GemmaMLP, ..), and how
# their activations are called; a class whose forward reads otherwise is left as it is.
_FORWARD = "self.down_proj(self.act_fn(self.gate_proj(x))*self.up_proj(x))"
FUNCTIONS = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "ReLU": "relu",
}
_PLAIN = (torch.nn.Parameter, FrozenParameter)


class GatedMLP(torch.nn.Module):
    """down_proj(f(gate_proj(x)) * up_proj(x)), as SwiGLU and GEGLU layers of Llama-like models.

    Its layers are three warploom.nn.Linear with transformers' names: state dicts of either load
    into the other.

    Args:
        hidden: The size of the input's and of the result's last dimension.
        inner: The size between the layers; kernels need a multiple of 8.
        bias: Whether the three layers have a bias.
        device: The device of the parameters.
        dtype: The dtype of the parameters.
        gate: f: "relu", "gelu", "gelu_tanh" or "silu".
        preactivation: Where the backward pass has gate_proj(x) and up_proj(x) from: "save" keeps
            them in memory, "recompute" computes them again.
        recipe: That of the three layers, as for warploom.nn.Linear.

    f(gate_proj(x)) * up_proj(x) is one kernel, in bf16 and fp16 on a Hopper GPU. With gradients,
    the layer is one function of autograd, in compiled functions too: its backward pass computes the
    gradient of the gate in a GEMM's epilogue, and the weights may have a main_grad. With an fp8
    recipe of all three layers (except "delayed" and "fp4_qat") it is one function as well; gate and
    up then share a scale for each tensor. If gate and up are warploom.nn.Float8Linear, as
    `warploom.patch` makes them of checkpoints, the input is quantized once. If they are
    warploom.nn.QuantizedLinear without biases, `join()` makes them one weight. Everything else is
    computed layer by layer, with the same meaning: in compiled functions of 16 bits without
    gradients, if `gate_proj`, `up_proj` or `act_fn` has hooks or was replaced, and if the memory of
    the weights was separated. With hooks on `down_proj`, or another layer in its place, gate and up
    still run in one kernel where no gradient is needed.

    Example:
        >>> layer = warploom.nn.GatedMLP(64, 256, dtype=torch.bfloat16)
        >>> layer(torch.randn(4, 64).bfloat16()).shape
        torch.Size([4, 64])
    """

    preactivation: Preactivation = "save"

    def __init__(
        self,
        hidden: int,
        inner: int,
        bias: bool = False,
        device: Any = None,  # noqa: ANN401 (whatever torch.nn.Linear takes)
        dtype: torch.dtype | None = None,
        *,
        gate: str = "silu",
        preactivation: Preactivation = "save",
        recipe: Recipe | None = None,
    ) -> None:
        _check_gate(gate)
        _check_preactivation(preactivation)
        require_boolean("bias", bias)
        super().__init__()
        self.gate_proj = Linear(hidden, inner, bias, device, dtype, recipe=recipe)
        self.up_proj = Linear(hidden, inner, bias, device, dtype, recipe=recipe)
        self.down_proj = Linear(inner, hidden, bias, device, dtype, recipe=recipe)
        self.gate = gate
        self.preactivation = preactivation
        self._both = Both()
        self.join()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return down_proj(f(gate_proj(x)) * up_proj(x)).

        Args:
            x: [.., hidden].

        Returns:
            [.., hidden].
        """
        gate, up, down = (self._modules[name] for name in PROJECTIONS)
        function = self._modules.get("act_fn")
        if function is not None and not _applies(function, self.gate):
            return cast("torch.Tensor", down(function(gate(x)) * up(x)))  # type: ignore[misc]
        both = cast("GateUp | None", self._modules.get("gate_up"))
        if both is not None and both.holds(gate, up) and all(map(_unhooked, both.layers)):
            return cast("torch.Tensor", down(both(x, self.gate)))  # type: ignore[misc]
        if getattr(gate, "recipe", None) is not None:
            quantised = self._in_float8(x, gate, up, down)
            if quantised is not None:
                return quantised
        if x.dim() > 1 and torch.is_grad_enabled():
            trained = self._trained(x, gate, up, down)
            if trained is not None:
                return trained
        if not torch.compiler.is_compiling() and x.dim() > 1:
            if type(gate) is Float8Linear and type(up) is Float8Linear:
                hidden = self._by_blocks(x, gate, up)
            else:
                hidden = self._gated(x, gate, up)
            if hidden is not None:
                return cast("torch.Tensor", down(hidden))  # type: ignore[misc]
        by_torch = function or ACTIVATIONS[self.gate]
        return cast("torch.Tensor", down(by_torch(gate(x)) * up(x)))  # type: ignore[misc]

    @classmethod
    def from_torch(cls, module: torch.nn.Module) -> Self:
        """Return a layer that shares the parameters of a gated layer of transformers.

        Args:
            module: A LlamaMLP, or any layer with the same expression in its `forward`.

        Returns:
            The new layer. The memory of gate and up is joined, which takes the memory of both once
            more until it is done; the parameters stay the same objects.

        Raises:
            ProblemError: For a module that computes something else.
        """
        gate = gate_of(module)
        if gate is None:
            raise ProblemError(
                f"a {type(module).__name__}",
                rule=f"must compute {_FORWARD} of torch.nn.Linear, with an activation of "
                f"{', '.join(FUNCTIONS)}",
                fix="make a warploom.nn.GatedMLP and load its state dict",
            )
        made = cls.__new__(cls)
        vars(made).update(vars(module))
        for name in ("_parameters", "_buffers", "_modules"):
            vars(made)[name] = vars(module)[name].copy()
        vars(made).update(gate=gate, _both=Both())
        made.join()
        return made

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 (as torch has it)
        """Return the tensors of a module in the memory of the parameters, a storage for each.

        Savers such as safetensors refuse tensors that share a storage, as joined weights do.

        Args:
            args: Of torch.nn.Module.state_dict.
            kwargs: Of the same.

        Returns:
            The tensors by their names.
        """
        state = super().state_dict(*args, **kwargs)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        names = (f"{prefix}{layer}.{name}" for layer in PROJECTIONS for name in ("weight", "bias"))
        separate_storages(state, names)
        return state

    def extra_repr(self) -> str:
        """The function of the gate."""
        return f"gate={self.gate!r}, kernels=warploom"

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        """As a module's, after which parameters have memory of their own: it is joined again."""
        both = cast("GateUp | None", self._modules.get("gate_up"))
        with nullcontext() if both is None else both.moving():
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.join()
        return self

    def join(self) -> None:
        """Let the memory of gate and up be one, where kernels can read it."""
        gate, up = (self._modules[name] for name in PROJECTIONS[:2])
        if interleavable(gate, up):
            self.gate_up = GateUp(*cast("tuple[QuantizedLinear, QuantizedLinear]", (gate, up)))
        weight = gate._parameters.get("weight")  # type: ignore[union-attr]
        if weight is None or not gated_by_kernels(weight):
            return
        for name in ("weight", "bias", "weight_scale_inv"):
            one, other = (layer._parameters.get(name) for layer in (gate, up))  # type: ignore[union-attr]
            if one is None or other is None or joined(one, other):
                continue
            if joinable(one, other):
                join(one, other)

    def separate(self) -> None:
        """Give the parameters of gate and up memory of their own, as they had before."""
        both = cast("GateUp | None", self._modules.pop("gate_up", None))
        if both is not None:
            both.separate()
        for layer in PROJECTIONS[:2]:
            for module in cast("torch.nn.Module", self._modules[layer]).modules():  # an adapter's
                for parameter in module._parameters.values():
                    separate(parameter)

    def _trained(
        self,
        x: torch.Tensor,
        gate: torch.nn.Module | None,
        up: torch.nn.Module | None,
        down: torch.nn.Module | None,
    ) -> torch.Tensor | None:
        """The layer as one function of autograd; None where that is not for it."""
        compiling = torch.compiler.is_compiling()
        if not all(_plain(one, training=not compiling) for one in (gate, up, down)):
            return None
        layers = cast("tuple[torch.nn.Linear, ...]", (gate, up, down))
        parameters = _parameters(x, layers)
        if parameters is None:
            return None
        (first, second, last), biases = parameters
        read = (x, first, second, last, *biases)
        if not any(one is not None and one.requires_grad for one in read):
            return None
        if torch._C._is_any_autocast_enabled():
            x = lowered(x)
        types = {one.dtype for one in (x, *read[1:]) if one is not None}
        if len(types) > 1 or refusal(x, first) or refusal(x, last) or first.shape[0] % MULTIPLE:
            return None
        main_grads = MainGrads()
        if not compiling:  # whose operator reads them where they are by then
            if self._both.view("weight", first, second) is None:
                return None
            main_grads = _main_grads(layers)
            added = any(one is not None for one in main_grads)
            if added and not launchable(x, first, second, last):
                return None
        function = cast("GateFunction", self.gate)
        return gated_layer(
            x, (first, second, last), biases, function, self.preactivation, main_grads
        )

    def _in_float8(
        self,
        x: torch.Tensor,
        gate: torch.nn.Module | None,
        up: torch.nn.Module | None,
        down: torch.nn.Module | None,
    ) -> torch.Tensor | None:
        """The layer in fp8 as one function of autograd; None where that is not for it."""
        recipe = cast("Recipe", getattr(gate, "recipe", None))
        if recipe not in GATED_RECIPES or not all(
            _plain(one, training=True, recipe=recipe) for one in (gate, up, down)
        ):
            return None
        layers = cast("tuple[Linear, ...]", (gate, up, down))
        parameters = _parameters(x, layers)
        if parameters is None:
            return None
        (first, second, last), biases = parameters
        if torch._C._is_any_autocast_enabled():
            x = lowered(x)
        if len({x.dtype, first.dtype, second.dtype, last.dtype}) > 1 or x.dtype not in PRODUCTS:
            return None
        by_blocks = isinstance(SCHEMES[recipe].weight.block, tuple)
        if not x.numel() or first.shape[0] % (SCALE_BLOCK if by_blocks else MULTIPLE):
            return None
        compiling = torch.compiler.is_compiling()
        if compiling and any(map(_accumulates, layers)):
            return None
        into = MainGrads() if compiling else _main_grads(layers)
        # A compiler knows no addresses: it has both copied.
        both = None if compiling else self._both.view("weight", first, second)
        if both is None and not compiling:
            return None
        if both is None:
            both = torch.cat((first.detach(), second.detach()))
        caches = self._both.quantised, layers[2]._quantised
        if any(getattr(one, "_is_fsdp_managed_module", False) for one in layers):
            caches = ParameterCache(), ParameterCache()
        how = Gated(
            Options(recipe, None, x.dtype),
            cast("GateFunction", self.gate),
            self.preactivation,
            into,
            *caches,
        )
        rows = x.reshape(-1, x.shape[-1])
        layer = Layer(rows, first, second, last, *biases)
        return gated_float8(layer, both, how).view(*x.shape[:-1], last.shape[0])

    def _gated(
        self, x: torch.Tensor, gate: torch.nn.Module | None, up: torch.nn.Module | None
    ) -> torch.Tensor | None:
        """f(gate(x)) * up(x) by one kernel; None where that is not for it."""
        if gate is None or up is None or not (_plain(gate) and _plain(up)):
            return None
        read = [layer._parameters[name] for name in ("weight", "bias") for layer in (gate, up)]
        wanted = torch.is_grad_enabled() and (
            x.requires_grad or any(one is not None and one.requires_grad for one in read)
        )
        first, second, bias, other = read
        if wanted or first is None or second is None or refusal(x, first):
            return None
        if first.dtype != x.dtype:  # autocast's: each layer's weight is converted
            return None
        weight = self._both.view("weight", first, second)
        if weight is None or (bias is None) != (other is None):
            return None
        biases = None
        if bias is not None and other is not None:
            biases = self._both.view("bias", bias, other)
            if biases is None:
                return None
        return gemm(x, weight.t(), bias=biases, gate=self.gate)

    def _by_blocks(
        self, x: torch.Tensor, gate: Float8Linear, up: Float8Linear
    ) -> torch.Tensor | None:
        """f(gate(x)) * up(x) of x quantized once, by one kernel; None where that is not for it."""
        if (torch.is_grad_enabled() and x.requires_grad) or not (_unhooked(gate) and _unhooked(up)):
            return None
        if x.dtype not in INPUTS or (x.is_cuda and unserved(x.get_device()) is not None):
            return None
        if not gated_by_kernels(gate.weight) or gate.bias is not None or up.bias is not None:
            return None
        if is_distributed(x) or any(map(is_distributed, (gate.weight, up.weight))):
            return None
        weight = self._both.view("weight", gate.weight, up.weight)
        scale = self._both.view("scale", gate.weight_scale_inv, up.weight_scale_inv)
        if weight is None or scale is None:
            return None
        return multiplied(x, weight, scale, gate=self.gate)


class Both:
    """Views of the parameters of gate and up, one behind the other; a copy has none.

    quantised   the weights as one, as they were quantised before
    """

    __slots__ = ("_views", "quantised")

    def __init__(self) -> None:
        self._views: dict[str, tuple[int, int, torch.Tensor]] = {}
        self.quantised: ParameterCache[WithTranspose] = ParameterCache()

    def view(self, name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
        """Both as one tensor of twice the rows, without a copy; None where they lie apart."""
        at = one.data_ptr(), other.data_ptr()
        found = self._views.get(name)
        if found is not None and found[:2] == at and found[2].dtype == one.dtype:
            both = found[2]
            # A layer that was pruned may have fewer rows or columns at the same addresses.
            if both.stride() == one.stride() and both.numel() == 2 * one.numel():
                return both
        self._views.pop(name, None)
        if not joined(one, other):
            return None
        shape = (2 * one.shape[0], *one.shape[1:])
        both = one.detach().as_strided(shape, one.stride())
        self._views[name] = (*at, both)
        return both

    def __deepcopy__(self, memo: object) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


def joinable(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the memory of two parameters can be joined, or is: each has all of its storage, or
    both share one, as those of a model do whose copy was patched before.
    """
    if type(one) not in _PLAIN or type(other) not in _PLAIN or one.device != other.device:
        return False
    whole = all(
        each.is_contiguous() and each.untyped_storage().nbytes() == each.numel() * each.itemsize
        for each in (one, other)
        if each.device.type != "meta"
    )
    # What other processes read, or a host copies from, would stay behind.
    placed = one.device.type == "cpu" and any(
        each.is_shared() or each.is_pinned()  # type: ignore[no-untyped-call]
        for each in (one, other)
    )
    alike = one.shape == other.shape and one.dtype == other.dtype
    there = one is not other and one.device.type != "meta"
    return there and alike and (joined(one, other) or (whole and not placed))


def gated_by_kernels(weight: torch.Tensor) -> bool:
    """Whether one kernel reads a gate's weight [I, K], and up's behind it."""
    if weight.dtype == E4M3:
        return weight.shape[0] % SCALE_BLOCK == 0  # no block of scales has rows of both
    return weight.dtype in PRODUCTS and weight.shape[0] % MULTIPLE == 0


def join(one: torch.Tensor, other: torch.Tensor) -> None:
    """Move two parameters, which stay what they are, to where the second follows the first."""
    with torch.inference_mode(False):  # whose tensors could not be trained
        both = torch.cat((one.detach(), other.detach()))
    one.data, other.data = both[: len(one)], both[len(one) :]


def gate_of(module: torch.nn.Module) -> str | None:
    """The function of a module's gate, where it computes what GatedMLP does; else None."""
    layers = [module._modules.get(name) for name in PROJECTIONS]
    activation = type(module._modules.get("act_fn")).__name__
    fp8 = Float8Linear, fp8_linear_type()
    gated = (
        all(type(layer) in (torch.nn.Linear, Linear, QuantizedLinear, *fp8) for layer in layers)
        and set(module._modules) == {*PROJECTIONS, "act_fn"}
        and not module._parameters
        and "forward" not in vars(module)
        and _reads_alike(type(module))  # type: ignore[arg-type]
    )
    return FUNCTIONS.get(activation) if gated else None


@cache
def _reads_alike(kind: type[torch.nn.Module]) -> bool:
    """Whether a class's forward is the expression of a gated layer, and nothing else."""
    try:
        lines = inspect.getsource(kind.forward).strip().splitlines()
    except (OSError, TypeError):  # no source at hand
        return False
    text = "".join("".join(lines).split())
    return text in (
        f"defforward(self,x):down_proj={_FORWARD}returndown_proj",
        f"defforward(self,x):return{_FORWARD}",
    )


def _plain(
    layer: torch.nn.Module | None, *, training: bool = False, recipe: Recipe | None = None
) -> bool:
    """Whether a layer is a product by a recipe and a bias, and nobody is told of its calls.

    Where it trains, its weight may have its gradients added up elsewhere.
    """
    if type(layer) is Linear:
        if layer.activation or layer.recipe != recipe or layer.gradient_dtype is not None:
            return False
        if layer.accumulate_into_main_grad and not training:
            return False
    elif type(layer) is not torch.nn.Linear or recipe is not None:
        return False
    return _unhooked(layer)


def _applies(activation: torch.nn.Module, gate: str) -> bool:
    """Whether a module of transformers is this function, and nobody is told of its calls."""
    return FUNCTIONS.get(type(activation).__name__) == gate and _unhooked(activation)


def _unhooked(layer: torch.nn.Module) -> bool:
    """Whether nobody is told of a layer's calls, or makes them."""
    hooks = (layer._forward_hooks, layer._forward_pre_hooks)
    behind = (layer._backward_hooks, layer._backward_pre_hooks)
    return not any((*hooks, *behind)) and "forward" not in vars(layer)


_Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # of gate, up and down
_Biases = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _parameters(
    x: torch.Tensor, layers: tuple[torch.nn.Linear, ...]
) -> tuple[_Weights, _Biases] | None:
    """The weights and biases of gate, up and down; None where they make no gated layer."""
    weights = [one._parameters["weight"] for one in layers]
    gate_bias, up_bias, down_bias = [one._parameters["bias"] for one in layers]
    if any(one is None or is_distributed(one) for one in (x, *weights)):
        return None
    gate, up, down = cast("list[torch.Tensor]", weights)
    if gate.shape != up.shape or down.shape[1:] != gate.shape[:1]:
        return None
    if (gate_bias is None) != (up_bias is None):
        return None
    return (gate, up, down), (gate_bias, up_bias, down_bias)


def _main_grads(layers: tuple[torch.nn.Linear, ...]) -> MainGrads:
    """Where gradients of the layers' weights are added; ProblemError where one has no place."""
    return MainGrads(*[main_grad(one.weight) if _accumulates(one) else None for one in layers])


def _accumulates(layer: torch.nn.Module) -> bool:
    return type(layer) is Linear and layer.accumulate_into_main_grad


def _check_preactivation(preactivation: object) -> None:
    if preactivation not in ("save", "recompute"):
        raise ProblemError(
            f"preactivation {shown(preactivation)}",
            rule="must be save or recompute",
            fix='leave it out: "save" keeps the input of the gate for backward',
        )


def _check_gate(gate: object) -> None:
    if gate not in GATES:
        raise ProblemError(
            f"gate {shown(gate)}",
            rule=f"must be one of {', '.join(GATES)}",
            fix="leave it out for silu",
        )
