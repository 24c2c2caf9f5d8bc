"""What `warploom.patch(model, weights=...)` quantises: which layers, how, and why others stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypedDict, cast

import torch

from warploom.errors import ProblemError
from warploom.integrations.linear import Linear
from warploom.integrations.patch_training import trained
from warploom.integrations.quantized_linear import QuantizedLinear
from warploom.integrations.quantized_rules import INPUTS
from warploom.quantization import Metadata, PackedWeight
from warploom.quantization.quantize import described, quantize
from warploom.runtime.tensors import shown
from warploom.suggestions import suggestion

HEAD = "lm_head"  # what most models call the layer whose results are logits


class Quantising(TypedDict, total=False):
    """How weights are quantised, as `warploom.quantize` has it."""

    format: str
    group: int | Literal["auto"] | None
    symmetric: bool | None
    scale_dtype: torch.dtype | None


class Weights(Quantising, total=False):
    """How weights are quantised, and what is left out.

    skip    names of modules, or patterns as `*.down_proj`, whose layers keep their weights. A name
            stands for all in it, and may leave out what comes before it. By default the output
            head: `lm_head`, what a model of transformers says that it is, and every layer that
            shares the table of an embedding. Layers that train while others are frozen, and
            adapters of peft, always keep their weights
    """

    skip: Sequence[str]


Chosen = dict[Any, str]  # layers, and the names that they go by


class Asked:
    """The options of a patch's weights, checked; ProblemError for some that there are not."""

    def __init__(self, weights: str | Weights) -> None:
        given = {"format": weights} if isinstance(weights, str) else weights
        if not isinstance(given, Mapping):
            raise ProblemError(
                f"weights {shown(weights)}",
                rule="must be the name of a format, or a dict of options",
                fix='for example weights="int4"',
            )
        known = (*Quantising.__annotations__, "skip")
        for name in given:
            if name not in known:
                near = suggestion(str(name), known)
                raise ProblemError(
                    f"weights with {shown(name)}", rule=f"must be {', '.join(known)}", fix=near
                )
        self.skip = given.get("skip")
        if self.skip is not None and not isinstance(self.skip, list | tuple | set | frozenset):
            raise ProblemError(
                f"skip {shown(self.skip)}",
                rule="must be a list of names",
                fix=f"pass [{shown(self.skip)}]",
            )
        options = {name: value for name, value in given.items() if name != "skip"}
        self._options = cast("Quantising", {"format": "int4", **options})
        self.metadata((1 << 10, 1 << 10))  # which all formats and groups take

    def metadata(self, shape: Sequence[int]) -> Metadata:
        """What a weight of this shape becomes; ProblemError where it cannot."""
        o = self._options
        group, scale_dtype = o.get("group", "auto"), o.get("scale_dtype")
        return described(shape, o["format"], group, o.get("symmetric"), scale_dtype, INPUTS)

    def layer(self, linear: torch.nn.Linear) -> QuantizedLinear:
        """The layer with its weight quantised."""
        return QuantizedLinear.from_linear(linear, **self._options)

    def quantize(self, weight: torch.Tensor) -> PackedWeight:
        """A weight [N, K], quantized."""
        return quantize(weight, **self._options, activations=INPUTS)

    def described(self, kind: str = "warploom.nn.QuantizedLinear") -> str:
        """What layers become, for a report."""
        metadata = self.metadata((1 << 10, 1 << 10))
        groups = "rows" if metadata.group is None else f"groups of {metadata.group}"
        return f"{kind}, {metadata.format} in {groups}"

    def skipped(self, model: torch.nn.Module) -> Callable[[str, torch.nn.Module], str]:
        """Why a layer of a model is left out as asked; "" where it is not.

        Raises ProblemError for a name that no module has.
        """
        if self.skip is None:
            heads = set(output_heads(model))
            return lambda name, layer: "the output head" * (layer in heads)
        names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
        for one in self.skip:
            if not any(_within(name, one) for name in names):
                raise ProblemError(
                    f"skip {shown(one)}",
                    rule=f"must be the name of a module in {type(model).__name__}, or a pattern",
                    fix=suggestion(str(one), {part for name in names for part in name.split(".")}),
                )
        skip = tuple(self.skip)
        return lambda name, layer: "skipped" * any(_within(name, one) for one in skip)


def choose(
    model: torch.nn.Module,
    asked: Asked,
    is_candidate: Callable[[torch.nn.Module], bool],
    unable: Callable[[Any, Asked], str],
) -> tuple[Chosen, dict[torch.nn.Module, str]]:
    """The layers whose weights are to be quantised, by their names; and why not others.

    Args:
        model: The model, whose layers are replaced; it cannot be one of them itself.
        asked: The options of the patch.
        is_candidate: Whether a module is of the kind that is considered.
        unable: Why the weights of such a module cannot be quantised; "" where they can.
    """
    chosen: Chosen = {}
    left: dict[torch.nn.Module, str] = {}
    skipped, training = asked.skipped(model), trained(model)
    for name, module in model.named_modules():
        if not is_candidate(module):
            continue
        own = "it is the model itself" if module is model else skipped(name, module)
        reason = own or training.get(module) or unable(module, asked)
        if reason:
            left[module] = reason
        else:
            chosen[module] = name
    return chosen, left


def choose_linear(
    model: torch.nn.Module, asked: Asked
) -> tuple[Chosen, dict[torch.nn.Module, str]]:
    """The linear layers whose weights are to be quantised; and why not others."""
    return choose(model, asked, lambda one: type(one) in (torch.nn.Linear, Linear), _unable)


def _unable(layer: torch.nn.Linear, asked: Asked) -> str:
    """Why a weight cannot be quantised as asked; "" where it can."""
    if isinstance(layer, Linear) and (layer.recipe or layer.accumulate_into_main_grad):
        return "its options train a weight"
    if "weight" not in layer._parameters:
        return "its weight is computed"
    try:
        asked.metadata(layer.weight.shape)
    except ProblemError as error:
        return f"{error.value} {error.rule}"
    return ""


def _within(name: str, asked: str) -> bool:
    """Whether a module's name is, or is in, what is asked for; both may begin further in."""
    return isinstance(asked, str) and fnmatchcase(f".{name}.", f"*.{asked}.*")


def output_heads(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The layers that give logits: by name, by what models say, by the table that they share."""
    tables = {
        id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)
    }
    for name, module in model.named_modules(remove_duplicate=False):
        shares = isinstance(module, torch.nn.Linear) and id(module.weight) in tables
        if shares or HEAD in name.split("."):
            yield module
        says = getattr(module, "get_output_embeddings", None)
        if callable(says) and isinstance(found := says(), torch.nn.Module):
            yield from found.modules()  # an adapter may have wrapped it
