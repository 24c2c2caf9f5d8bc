"""The modifiers of attention: an option is one class in one file, and stands in the list here."""

from __future__ import annotations

from warploom.runtime.families._attention.modifiers.alibi import Alibi
from warploom.runtime.families._attention.modifiers.bias import Bias
from warploom.runtime.families._attention.modifiers.blocks import Blocks
from warploom.runtime.families._attention.modifiers.dropped import Dropped
from warploom.runtime.families._attention.modifiers.mask import Mask
from warploom.runtime.families._attention.modifiers.modifier import Modifier
from warploom.runtime.families._attention.modifiers.sinks import Sinks
from warploom.runtime.families._attention.modifiers.softcap import Softcap
from warploom.runtime.families._attention.problem import Arguments

__all__ = [
    "MODIFIERS",
    "Alibi",
    "Bias",
    "Blocks",
    "Dropped",
    "Mask",
    "Modifier",
    "Sinks",
    "Softcap",
    "modifiers_of",
]

MODIFIERS: list[type[Modifier]] = [Softcap, Sinks, Blocks, Alibi, Bias, Mask, Dropped]
"""In the order in which calls are checked, and samples drawn."""


def modifiers_of(call: Arguments) -> tuple[Modifier, ...]:
    """The modifiers of a call, with their values."""
    kinds = (kind for kind in MODIFIERS if getattr(call, kind.argument) is not None)
    every = (kind.of(call) for kind in kinds)
    return tuple(modifier for modifier in every if modifier is not None)
