"""`warploom.patch`: a model's linear layers and its attention on Warploom, and back again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self, cast
from weakref import WeakSet

import torch

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations import quantized_experts
from warploom.integrations.bit_linear import BitLinear, bit_linear_types, bit_refusal
from warploom.integrations.expert_layers import layers_of
from warploom.integrations.float8_linear import Float8Linear, fp8_linear_type
from warploom.integrations.float8_linear import refusal as float8_refusal
from warploom.integrations.gated_mlp import (
    GATED_RECIPES,
    PROJECTIONS,
    GatedMLP,
    gate_of,
    gated_by_kernels,
    joinable,
)
from warploom.integrations.linear import Linear
from warploom.integrations.linear_rules import PRODUCTS, refusal
from warploom.integrations.patch_attention import ATTENTIONS, PatchedAttention
from warploom.integrations.patch_experts import PatchedExperts
from warploom.integrations.patch_journal import Journal
from warploom.integrations.patch_report import AS_IT_WAS, Row, table
from warploom.integrations.patch_weights import Asked, Chosen, Weights, choose_linear, output_heads
from warploom.integrations.quantized_gate import interleavable
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.integrations.recipes import Recipe, require_recipe
from warploom.integrations.sparse_linear import SparseLinear
from warploom.runtime.tensors import shown

_patched: WeakSet[torch.nn.Module] = WeakSet()  # models, and the layers that they got


class Patch:
    """What `warploom.patch` did to a model: prints as a table, and undoes it.

    As a context manager it undoes it at the end of its block. Where weights were packed it
    cannot be undone, nor be a context manager: those that there were are dropped.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        rows: list[Row],
        layers: dict[torch.nn.Linear, Linear | Float8Linear],
        calls: Sequence[PatchedAttention | PatchedExperts],
        *,
        gated: Mapping[torch.nn.Module, GatedMLP],
        quantized: bool = False,
    ) -> None:
        self.rows = tuple(rows)
        self._quantized = quantized
        self._title = f"warploom.patch({type(model).__name__})"
        self._model: torch.nn.Module | None = model
        self._originals = {layer: original for original, layer in layers.items()}
        # Layers that cannot be put back have the weights that were quantized.
        self._gated = {} if quantized else {layer: one for one, layer in gated.items()}
        self._calls = calls

    def undo(self) -> None:
        """Put the model's own modules and its attention back; a second time does nothing.

        The modules are the objects that they were, wherever the layers in their place are by now,
        with the parameters, the mode and the hooks that these have; gated layers have the modules,
        such as adapters, that were put into them since. One that was interrupted is finished by
        another call. Raises ProblemError, and leaves the model as it is, where a
        layer's parameters have other names than its own had, and where weights were packed.
        """
        self._require_weights()
        model = self._model
        if model is None:
            return
        for layer, original in self._originals.items():
            _check_names(layer, original)
        for layer, original in self._originals.items():
            original._parameters.update(layer._parameters)
            original.training = layer.training
        for parent, name, child in list(_children(model)):
            if isinstance(child, Linear | Float8Linear) and child in self._originals:
                parent._modules[name] = self._originals[child]
        for parent, name, child in list(_children(model)):
            if isinstance(child, GatedMLP) and child in self._gated:
                own = self._gated[child]
                child.separate()
                own.training = child.training
                own._modules = {**child._modules}  # adapters and all that came since
                parent._modules[name] = own
        for one in self._calls:
            one.undo()
        _patched.difference_update([*self._originals, *self._gated, model])
        self._model = None

    def _require_weights(self) -> None:
        if self._quantized:
            raise ProblemError(
                f"{self._title}, whose weights were quantized",
                rule="cannot be undone: the weights that there were are dropped",
                fix="load the model again; copy.deepcopy(model) before a patch keeps them",
            )

    def __enter__(self) -> Self:
        self._require_weights()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        return "\n  ".join([self._title, *table(self.rows)])


def patch(
    model: torch.nn.Module,
    *,
    linear: bool = True,
    attention: bool | Literal["8bit"] = True,
    experts: bool = True,
    weights: str | Weights | None = None,
    recipe: Recipe | None = None,
    filter: Callable[[torch.nn.Module, str], bool] | None = None,
    sparse: Literal["2:4"] | None = None,
) -> Patch:
    """Let an existing model run on Warploom's kernels, without rewriting it.

    Args:
        model: The model, on a GPU or a CPU.
        linear: Replace each torch.nn.Linear by a warploom.nn.Linear with the same parameters, so
            that tied weights and optimizers keep working; FP8Linear layers of transformers with
            128x128 scales by warploom.nn.Float8Linear; gated layers of transformers in 16 bits,
            such fp8 or quantized (LlamaMLP and alike) by warploom.nn.GatedMLP, except with the
            recipes "delayed" and "fp4_qat"; and BitNet layers by warploom.nn.BitLinear, which
            cannot be undone. Other subclasses stay.
        attention: Set `attn_implementation="warploom"` in models of transformers. "8bit" sets
            "warploom_8bit": q, k and v are quantized to 8 bits where kernels support it.
        experts: Set `experts_implementation="warploom"` in mixtures of experts of transformers.
        weights: Quantize the weights of linear layers: a format such as "int4", or a dict of the
            options of `warploom.quantize` and `skip`; and those of experts whose gate has kernels.
            The output head, layers whose K is not a multiple of the group, and layers that train
            stay. The original weights are dropped, so that this cannot be undone.
        recipe: Train the linear layers in fp8: a recipe of warploom.nn.Linear. "blockwise" is for
            mixtures of experts of transformers too.
        filter: filter(layer, name) says which layers train in fp8, or become sparse; by default all
            but the output head. It is asked about linear layers and, with a recipe, experts.
        sparse: "2:4" replaces linear layers by warploom.nn.SparseLinear. Their weights must be 2:4
            sparse already. The dense weights are dropped, so that this cannot be undone.

    Returns:
        What was done: `print` shows it, `undo()` restores the model, and so does the end of a
        `with` block.

    Raises:
        ProblemError: For a model that is patched or quantized already, and for linear layers
            without memory, on several devices, or with a `forward` of their own. If anything is
            raised, even KeyboardInterrupt, the model is as it was.

    Each layer decides in each call whether there is a kernel for it; torch computes the rest.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64)).bfloat16()
        >>> report = warploom.patch(model)
        >>> type(model[0])
        <class 'warploom.integrations.linear.Linear'>
    """
    require_boolean("linear", linear)
    if isinstance(attention, str) and attention not in ATTENTIONS:
        raise ProblemError(
            f"attention {shown(attention)}",
            rule='must be True, False or "8bit"',
            fix='"8bit" quantizes q, k and v of each attention to 8 bits',
        )
    if not isinstance(attention, str):
        require_boolean("attention", attention)
    require_boolean("experts", experts)
    _check(model, linear=linear, weights=weights)
    _check_recipe(recipe, filter, linear=linear, weights=weights, sparse=sparse)
    asked = None if weights is None else Asked(weights)
    chosen, left = choose_linear(model, asked) if asked else ({}, {})
    routed, unrouted = quantized_experts.choose(model, asked) if asked and experts else ({}, {})
    training = _training(model, filter) if recipe else set()
    pruned = _sparse_layers(model, filter) if sparse else {}
    layers = _layers(model, {*chosen, *pruned}, training, recipe) if linear else {}
    quantized: dict[torch.nn.Module, torch.nn.Module] = {**pruned}
    if asked:
        quantized |= _quantized(chosen, asked)
        for layer, name in routed.items():
            with _naming(name):
                quantized[layer] = quantized_experts.quantized(layer, asked)
    if linear:
        quantized |= _bit_layers(model)
    told = asked.described() if asked else ""
    told_apart = set(layers_of(model)) if experts else set()
    rows = [*_linear_rows(model, layers, quantized, left, told, told_apart)] if linear else []
    if asked:
        rows += quantized_experts.rows(routed, unrouted, asked)
    calls: list[PatchedAttention | PatchedExperts] = []
    if attention:
        calls.append(PatchedAttention(model, attention))
    if experts:
        routing = _training_experts(model, filter) if recipe else ()
        calls.append(PatchedExperts(model, routed, routing, recipe))
    journal = Journal()  # nothing has changed so far
    try:
        for one in calls:
            journal.before_change(one.undo)
            rows += one.apply()
        replaced: dict[Any, torch.nn.Module] = {**layers, **quantized}
        gateable = linear and recipe in (None, *GATED_RECIPES)
        gated = _gated_layers(model, replaced) if gateable else {}
        rows += _gated_rows(gated)
        _replace(model, {**gated, **replaced}, journal)
        for mlp in gated.values():
            journal.before_change(mlp.separate)
            mlp.join()
        return Patch(model, rows, layers, calls, gated=gated, quantized=bool(quantized))
    except BaseException:
        try:
            journal.undo()
        finally:
            journal.undo()  # finishes what another interrupt left
        raise


# ---- Checks --------------------------------------------------------------------------------------


def _check(model: torch.nn.Module, *, linear: bool, weights: object) -> None:
    """Raise ProblemError for what cannot be patched as a whole."""
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise ProblemError(
            f"model {shown(model)}",
            rule="must be a torch.nn.Module",
            fix="load the model, then patch it",
        )
    if weights is not None and not linear:
        raise ProblemError(
            f"weights {shown(weights)} with linear=False",
            rule="must be None: weights are those of linear layers",
            fix="leave one of them out",
        )
    if type(model) is torch.nn.Linear:
        raise ProblemError(
            "a torch.nn.Linear by itself",
            rule="a patch replaces the layers in a model, never the model",
            fix="use warploom.nn.Linear.from_torch(layer)",
        )
    if any(module in _patched for module in model.modules()):
        raise ProblemError(
            f"{name}, which is patched already",
            rule="a model is patched once",
            fix="call undo() of what the first patch returned, or load the model again",
        )
    able = (QuantizedLinear, fp8_linear_type(), *bit_linear_types())
    if any(type(module) in able for module in model.modules()):
        return
    if linear and any(getattr(module, "is_quantized", False) for module in model.modules()):
        raise ProblemError(
            f"{name}, which is quantized",
            rule="must have weights of 16 or 32 bits to get layers of warploom.nn.Linear",
            fix="patch(model, linear=False) gives it Warploom's attention alone; its checkpoint's "
            "weights are for warploom.nn.QuantizedLinear",
        )


def _check_recipe(
    recipe: object, filter: object, *, linear: bool, weights: object, sparse: object
) -> None:
    """Raise ProblemError for an unknown recipe or pattern, or arguments that exclude one."""
    if sparse is not None:
        if sparse != "2:4":
            raise ProblemError(
                f"sparse {shown(sparse)}",
                rule='must be "2:4", or None',
                fix='pass sparse="2:4"',
            )
        if recipe is not None or weights is not None or not linear:
            others = {"recipe": recipe, "weights": weights, "linear": linear or None}
            given = [f"{name}={shown(one)}" for name, one in others.items() if one is not None]
            raise ProblemError(
                f"sparse {shown(sparse)} with {', '.join(given) or 'linear=False'}",
                rule="is for linear layers of 16 bits whose weights do not train",
                fix="leave one of them out",
            )
        if filter is None or callable(filter):
            return
    if recipe is None and sparse is None:
        if filter is not None:
            raise ProblemError(
                f"filter {shown(filter)} without a recipe",
                rule="must be left out: it chooses the layers that train in fp8 or become sparse",
                fix='leave it out, or pass a recipe, such as recipe="rowwise"',
            )
        return
    if recipe is not None:
        require_recipe("recipe", recipe)
    if weights is not None or not linear:
        beside = "linear=False" if not linear else f"weights {shown(weights)}"
        raise ProblemError(
            f"recipe {shown(recipe)} with {beside}",
            rule="is for layers whose weights train, linear ones included",
            fix="leave one of them out; filter= chooses the layers",
        )
    if filter is not None and not callable(filter):
        raise ProblemError(
            f"filter {shown(filter)}",
            rule="must be a function of a layer and its name, or None",
            fix='for example filter=lambda layer, name: "mlp" in name',
        )


def _check_names(layer: Linear | Float8Linear, original: torch.nn.Linear) -> None:
    """Raise ProblemError for a layer whose parameters cannot be handed over."""
    if layer._parameters.keys() != original._parameters.keys():
        raise ProblemError(
            f"a {type(layer).__name__} with parameters {sorted(layer._parameters)}",
            rule=f"must have those that it had, {sorted(original._parameters)}, to be replaced",
            fix="remove what was added to it, its parametrizations for instance",
        )


# ---- Linear layers -------------------------------------------------------------------------------


def _children(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """Every place of a module in a model: its parent, its name there, and itself."""
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                yield parent, name, child


def _replace(
    model: torch.nn.Module, made: Mapping[torch.nn.Module, torch.nn.Module], journal: Journal
) -> None:
    """Put the layers that were made in the places of those that they were made of."""
    known = [model, *made.values()]
    journal.before_change(lambda: _patched.difference_update(known))
    _patched.update(known)
    # Those inside of what is replaced are replaced in what is there instead.
    for kind in (False, True):
        for parent, name, child in list(_children(model)):
            if child in made and isinstance(child, torch.nn.Linear) is kind:
                journal.before_change(partial(parent._modules.__setitem__, name, child))
                parent._modules[name] = made[child]


def _training(
    model: torch.nn.Module, filter: Callable[[torch.nn.Module, str], bool] | None
) -> set[torch.nn.Module]:
    """The layers that are to train in fp8, or to be sparse: by default all but output heads."""
    heads = set() if filter else set(output_heads(model))
    return {
        module
        for name, module in model.named_modules()
        if type(module) is torch.nn.Linear
        and (filter(module, name) if filter else module not in heads)
    }


def _training_experts(
    model: torch.nn.Module, filter: Callable[[torch.nn.Module, str], bool] | None
) -> list[torch.nn.Module]:
    """The layers of experts that are to train in fp8: by default all."""
    able = set(layers_of(model))
    return [
        module
        for name, module in model.named_modules()
        if module in able and (filter is None or filter(module, name))
    ]


def _sparse_layers(
    model: torch.nn.Module, filter: Callable[[torch.nn.Module, str], bool] | None
) -> dict[torch.nn.Module, SparseLinear]:
    """Make a layer for each that is to be sparse; the model has none of them yet."""
    chosen = _training(model, filter)
    layers: dict[torch.nn.Module, SparseLinear] = {}
    for name, module in model.named_modules():
        if module in chosen:
            with _naming(name):
                layers[module] = SparseLinear.from_linear(cast("torch.nn.Linear", module))
    return layers


def _layers(
    model: torch.nn.Module,
    chosen: Container[torch.nn.Module],
    training: Container[torch.nn.Module],
    recipe: Recipe | None,
) -> dict[torch.nn.Linear, Linear | Float8Linear]:
    """Make a layer for each torch.nn.Linear that is not chosen, and for each FP8Linear whose
    weights kernels read; the model has none of them yet. Those in `training` have the recipe.
    """
    layers: dict[torch.nn.Linear, Linear | Float8Linear] = {}
    fp8 = fp8_linear_type()
    for name, module in model.named_modules():
        if type(module) is torch.nn.Linear and module not in chosen:
            with _naming(name):
                own = recipe if module in training else None
                layers[module] = Linear.from_torch(module, recipe=own)
        elif fp8 is not None and type(module) is fp8 and float8_refusal(module) is None:
            with _naming(name):
                layers[module] = Float8Linear.from_fp8(module)
    return layers


def _gated_layers(
    model: torch.nn.Module, replaced: Mapping[torch.nn.Module, torch.nn.Module]
) -> dict[torch.nn.Module, GatedMLP]:
    """Make a layer for each gated one whose layers are to be ours, and whose memory can be joined.

    They have one recipe, or none.
    """
    made = {}
    for name, module in model.named_modules():
        if module is not model and gate_of(module) and _joinable(module, replaced):
            with _naming(name):
                made[module] = GatedMLP.from_torch(module)
    return made


def _joinable(module: torch.nn.Module, replaced: Mapping[torch.nn.Module, torch.nn.Module]) -> bool:
    """Whether kernels take the weights of gate and up, and hooks know nothing of the layer."""
    projections: list[Any] = [module._modules[name] for name in PROJECTIONS]
    gate, up, down = (replaced.get(layer, layer) for layer in projections)
    if module._forward_hooks or module._forward_pre_hooks:
        return False
    if isinstance(gate, QuantizedLinear):
        return interleavable(gate, up)
    if not all(isinstance(one, Linear | Float8Linear) for one in (gate, up)):
        return False
    recipes = {getattr(layer, "recipe", None) for layer in (gate, up, down)}
    alike = isinstance(down, Linear | Float8Linear | QuantizedLinear) and len(recipes) == 1
    weights = [layer.weight for layer in projections[:2]]
    return alike and gated_by_kernels(weights[0]) and joinable(*weights)


def _gated_rows(gated: Mapping[torch.nn.Module, GatedMLP]) -> Iterator[Row]:
    """What becomes of gated layers."""
    for what, count in Counter(type(module).__name__ for module in gated).most_common():
        yield Row(what, count, "warploom.nn.GatedMLP")


def _quantized(chosen: Chosen, asked: Asked) -> dict[torch.nn.Module, QuantizedLinear]:
    """Make a layer for each that is chosen; the model has none of them yet."""
    layers: dict[torch.nn.Module, QuantizedLinear] = {}
    for module, name in chosen.items():
        with _naming(name):
            layers[module] = asked.layer(module)
    return layers


def _bit_layers(model: torch.nn.Module) -> dict[torch.nn.Module, BitLinear]:
    """Make a layer for each of BitNet that holds a ternary weight; the model has none of them."""
    able, layers = bit_linear_types(), {}
    for name, module in model.named_modules():
        if type(module) in able and not bit_refusal(module):
            with _naming(name):
                layers[module] = BitLinear.from_bitnet(module)
    return layers


@contextmanager
def _naming(layer: str) -> Iterator[None]:
    """An error of a layer tells its name."""
    try:
        yield
    except ProblemError as error:
        raise ProblemError(f"{layer}: {error.value}", rule=error.rule, fix=error.fix) from error


def _linear_rows(
    model: torch.nn.Module,
    layers: Mapping[torch.nn.Linear, Linear | Float8Linear],
    quantized: Mapping[torch.nn.Module, torch.nn.Module],
    left: Mapping[torch.nn.Module, str],
    told: str,
    told_apart: Container[torch.nn.Module],
) -> Iterator[Row]:
    """What becomes of modules that multiply by a matrix, most common first.

    `told` is what quantised ones are; `left` says why some of the others are not. Those that are
    `told_apart` have rows of their own.
    """
    counted: Counter[tuple[str, str, str]] = Counter()
    fp8 = fp8_linear_type()
    for module in model.modules():
        if module in told_apart:
            continue
        why = left.get(module, "")
        if isinstance(quantized.get(module), BitLinear):
            counted[type(module).__name__, "warploom.nn.BitLinear", ""] += 1
        elif isinstance(quantized.get(module), SparseLinear):
            counted[_known(module), "warploom.nn.SparseLinear, 2:4", ""] += 1
        elif isinstance(module, torch.nn.Linear) and module in quantized:
            reason = _inputs_by_torch(module.weight)
            now = told + (", torch's product" if reason else "")
            counted[_known(module), now, reason] += 1
        elif isinstance(module, torch.nn.Linear) and isinstance(layers.get(module), Float8Linear):
            counted[type(module).__name__, "warploom.nn.Float8Linear", ""] += 1
        elif isinstance(module, torch.nn.Linear) and module in layers:
            recipe = getattr(layers[module], "recipe", None)
            reason = "" if recipe else _by_torch(module.weight)
            now = "warploom.nn.Linear" + (f", fp8 {recipe}" if recipe else "")
            now += ", torch's product" if reason else ""
            counted[_known(module), now, "; ".join(filter(None, (why, reason)))] += 1
        elif isinstance(module, Linear | QuantizedLinear):
            counted[_known(module), AS_IT_WAS, why] += 1
        elif _multiplies(module):
            reason = "a subclass" if isinstance(module, torch.nn.Linear) else "no torch.nn.Linear"
            if fp8 is not None and type(module) is fp8:
                reason = float8_refusal(module) or reason
            if type(module) in bit_linear_types():
                reason = bit_refusal(module) or reason
            counted[type(module).__name__, AS_IT_WAS, reason] += 1
    for (what, now, reason), count in counted.most_common():
        yield Row(what, count, now, reason)


def _known(module: torch.nn.Module) -> str:
    """A class of layers as users write it."""
    room = "warploom.nn" if isinstance(module, Linear | QuantizedLinear) else "torch.nn"
    return f"{room}.{type(module).__name__}"


def _inputs_by_torch(before: torch.Tensor) -> str:
    """Why torch computes a quantised layer's products, with inputs of the type before; or ""."""
    if before.dtype in PRODUCTS:
        return ""
    kind = str(before.dtype).removeprefix("torch.")
    return f"inputs of {kind} are torch's; bfloat16 and float16, and autocast, run on Warploom"


def _by_torch(weight: torch.Tensor) -> str:
    """Why torch computes the products of a weight, with inputs of its type on a GPU; or ""."""
    if weight.dtype not in PRODUCTS:
        kind = str(weight.dtype).removeprefix("torch.")
        return f"{kind} weights; bfloat16 and float16 ones, and autocast, run on Warploom"
    row = torch.empty(1, weight.shape[-1], dtype=weight.dtype, device="meta")
    return refusal(row, weight.detach(), named=True) or ""


def _multiplies(module: torch.nn.Module) -> bool:
    """Whether a module has a matrix of its own, other than a table that is looked up."""
    if isinstance(module, torch.nn.Embedding):
        return False
    return any(parameter.dim() >= 2 for parameter in module.parameters(recurse=False))
