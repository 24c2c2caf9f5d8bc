"""Layers that share what another has: which modules can be taken over, and what goes along."""

from __future__ import annotations

from typing import TypeVar

import torch

from warploom.errors import ProblemError
from warploom.integrations.linear_options import DEFAULTS

LayerT = TypeVar("LayerT", bound=torch.nn.Linear)
CALLS = ("_calls", "_quantised", "scaling")  # what a layer has of its calls


# What a module has of the hooks of its calls, and of how each is called.
_HOOKS = [name for name in vars(torch.nn.Module()) if "hook" in name and "state_dict" not in name]


def share_hooks(made: torch.nn.Module, module: torch.nn.Module) -> None:
    """Give a new layer the hooks of a module's calls: a hook's handle removes it from both."""
    vars(made).update({name: vars(module)[name] for name in _HOOKS})


def check_module(module: torch.nn.Linear, *able: type[torch.nn.Linear]) -> None:
    """Raise ProblemError for a module whose calls are not, or could not be, F.linear's.

    `able` are classes that may be taken beside torch's own.
    """
    if type(module) not in (torch.nn.Linear, *able):
        raise ProblemError(
            f"a {type(module).__name__}",
            rule="must be a torch.nn.Linear itself: a subclass may compute something else",
            fix="make a warploom.nn.Linear and load its state dict",
        )
    check_unwrapped(module)
    places = {name: tensor.device for name, tensor in module.named_parameters()}
    told = ", ".join(f"{name} on {device}" for name, device in places.items())
    if any(device.type == "meta" for device in places.values()):
        raise ProblemError(
            told, rule="must be in memory", fix="load its weights first, then convert it"
        )
    if len(set(places.values())) > 1:
        raise ProblemError(told, rule="must be on one device", fix="move them together")


def check_unwrapped(module: torch.nn.Linear) -> None:
    """Raise ProblemError for a module whose forward was replaced on the instance."""
    if "forward" in vars(module):
        raise ProblemError(
            "a Linear whose forward was replaced on the instance",
            rule="must compute what torch.nn.Linear does",
            fix="convert it before its calls are wrapped, as offloading does",
        )


def sharing(made: LayerT, module: torch.nn.Linear) -> LayerT:
    """Give a new layer all that a module has but its options, and return it.

    The maps of parameters are the layer's own; those of hooks are the module's, since a hook's
    handle removes it there.
    """
    taken = {name: value for name, value in vars(module).items() if name not in (*DEFAULTS, *CALLS)}
    own = ("_parameters", "_buffers", "_modules")
    vars(made).update(taken | {name: taken[name].copy() for name in own})
    made._modules.pop("scaling", None)
    return made
