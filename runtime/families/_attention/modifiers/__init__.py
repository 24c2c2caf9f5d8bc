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

__all__ = [
    "GRADED",
    "MODIFIERS",
    "Alibi",
    "Bias",
    "Blocks",
    "Dropped",
    "Mask",
    "Modifier",
    "Sinks",
    "Softcap",
]

MODIFIERS: list[type[Modifier]] = [Softcap, Sinks, Blocks, Alibi, Bias, Mask, Dropped]
"""In the order in which calls are checked, and samples drawn."""

GRADED = tuple(kind for kind in MODIFIERS if kind.gradient)
"""Those whose arguments have a gradient."""
