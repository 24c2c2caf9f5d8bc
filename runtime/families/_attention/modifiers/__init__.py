"""The modifiers of attention: an option is one class in one file, and stands in the list here."""

from __future__ import annotations

from collections.abc import Iterable

from warploom.runtime.families._attention.modifiers.alibi import Alibi
from warploom.runtime.families._attention.modifiers.bias import Bias
from warploom.runtime.families._attention.modifiers.blocks import Blocks
from warploom.runtime.families._attention.modifiers.dropped import Dropped
from warploom.runtime.families._attention.modifiers.mask import Mask
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier
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
    "fields_of",
    "gradient_fields",
    "modifiers_of",
]

MODIFIERS: list[type[Modifier]] = [Softcap, Sinks, Blocks, Alibi, Bias, Mask, Dropped]
"""In the order in which calls are checked, and samples drawn."""


def modifiers_of(call: Arguments) -> tuple[Modifier, ...]:
    """The modifiers of a call, with their values."""
    kinds = [kind for kind in MODIFIERS if getattr(call, kind.argument) is not None]
    return tuple([modifier for kind in kinds if (modifier := kind.of(call)) is not None])


def fields_of(modifiers: Iterable[Modifier], call: Arguments) -> Fields:
    """The fields of an operation that a call's modifiers decide."""
    return {name: value for one in modifiers for name, value in one.fields(call).items()}


def gradient_fields(
    modifiers: Iterable[Modifier], fields: Fields, wanted: tuple[str, ...]
) -> Fields:
    """The fields of the operation of gradients, of those of a call, `wanted` tensors' too."""
    for one in modifiers:
        fields = one.gradient_fields(fields, wanted)
    return fields
