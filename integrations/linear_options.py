"""The options of `warploom.nn.Linear`: what they may be, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict, get_args

import torch
import torch.nn.functional as F

from warploom.arguments import require_boolean
from warploom.errors import ProblemError
from warploom.integrations.block_dropout import check_probability
from warploom.integrations.float8 import GRADIENT_TYPES
from warploom.integrations.recipes import RECIPES, Recipe
from warploom.runtime.families.gemm.gradient_rule import Preactivation
from warploom.runtime.tensors import shown

ACTIVATIONS: dict[str | None, Callable[[torch.Tensor], torch.Tensor]] = {
    None: lambda x: x,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


class Options(TypedDict, total=False):
    """The keywords that `Linear` has beside those of torch.nn.Linear."""

    activation: str | None
    preactivation: Preactivation
    recipe: Recipe | None
    gradient_dtype: torch.dtype | None
    accumulate_into_main_grad: bool
    dropout_blocks: float


DEFAULTS: Options = {
    "activation": None,
    "preactivation": "save",
    "recipe": None,
    "gradient_dtype": None,
    "accumulate_into_main_grad": False,
    "dropout_blocks": 0.0,
}
FIXED = ("blockwise", "delayed", "fp4_qat")  # recipes that say what gradients are multiplied in
_CHOICES: dict[str, tuple[object, ...]] = {
    "activation": tuple(ACTIVATIONS),
    "preactivation": get_args(Preactivation),
    "recipe": (None, *RECIPES),
    "gradient_dtype": (None, *GRADIENT_TYPES),
    "accumulate_into_main_grad": (False, True),
}


def check(options: Options) -> None:
    """Raise ProblemError for an option that there is not, or that means nothing beside others."""
    dropped = options["dropout_blocks"]
    check_probability("dropout_blocks", dropped)
    for name, value in options.items():
        choices = _CHOICES.get(name)
        if choices is None:
            continue
        if not any(type(value) is type(one) and value == one for one in choices):
            raise ProblemError(
                f"{name} {shown(value)}",
                rule=f"must be one of {', '.join(map(str, choices))}",
                fix=f"leave it out for {DEFAULTS[name]}",  # type: ignore[literal-required]
            )
    if options["gradient_dtype"] is not None and options["recipe"] in FIXED:
        raise ProblemError(
            f"gradient_dtype {options['gradient_dtype']} with recipe {options['recipe']!r}",
            rule="must be None: the recipe determines the dtype in which gradients are multiplied",
            fix="leave it out, or take recipe tensorwise, rowwise or rowwise_with_gw_hp",
        )
    if options["gradient_dtype"] is not None and options["recipe"] is None:
        raise ProblemError(
            f"gradient_dtype {options['gradient_dtype']} without a recipe",
            rule="must be None: without a recipe gradients have the dtype of the operands",
            fix='leave it out, or pass a recipe of fp8, such as recipe="rowwise"',
        )

    if dropped and (options["recipe"] is not None or options["accumulate_into_main_grad"]):
        raise ProblemError(
            f"dropout_blocks {dropped} with recipe {options['recipe']!r}, "
            f"accumulate_into_main_grad {options['accumulate_into_main_grad']}",
            rule="must be without both: layers that drop blocks multiply 16-bit operands, and have "
            "their gradients in .grad",
            fix="leave dropout_blocks out, or the others",
        )


def check_torchs(bias: object, dtype: object) -> None:
    """Raise ProblemError for arguments of torch.nn.Linear's that are of other types."""
    require_boolean("bias", bias)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ProblemError(
            f"dtype {shown(dtype)}",
            rule="must be a torch.dtype, or None: torch's default",
            fix="pass the torch.dtype itself, for example torch.bfloat16",
        )


def shown_options(layer: Any) -> str:  # noqa: ANN401 (the layer's module imports this one)
    """The options of a layer that are not at their defaults, as its repr goes on."""
    given = ((name, getattr(layer, name)) for name in DEFAULTS)
    return "".join(f", {name}={one!r}" for name, one in given if one != DEFAULTS[name])  # type: ignore[literal-required]
