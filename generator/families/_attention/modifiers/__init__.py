"""The modifiers of attention's kernels: a file here has the class of one.

No other code names one: whoever adds an option adds a file, which is found by scanning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from math import prod
from pkgutil import iter_modules
from typing import TypeVar

from warploom.generator.families._attention.modifiers.modifier import Modifier
from warploom.generator.model.arithmetic import Value

__all__ = ["COSTS", "DECODED", "MODIFIERS", "Modifier", "declare", "exponentials"]

KindT = TypeVar("KindT", bound=type)


def _every() -> tuple[type[Modifier], ...]:
    modules = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
    values = (value for module in modules for value in vars(module).values())
    kinds = {kind for kind in values if isinstance(kind, type) and issubclass(kind, Modifier)}
    return tuple(sorted(kinds - {Modifier}, key=lambda kind: kind.place))


MODIFIERS = _every()
"""Every modifier, in the order of their places."""

DECODED = tuple(kind for kind in MODIFIERS if kind.decodes)
"""Those that kernels of decoding have, too."""


def declare(kinds: Iterable[type[Modifier]], *, later: bool) -> Callable[[KindT], KindT]:
    """Declare the fields of modifiers in the class of an operation, which `frozen` then makes.

    Fields that its first version had come behind its mask, where names and positions have them.
    """

    def declared(operation: KindT) -> KindT:
        own = dict(operation.__annotations__)
        early = [kind for kind in kinds if not (later and kind.later)]
        late = [kind for kind in kinds if later and kind.later]
        place = [*own].index("mask") + 1
        fields = [*own.items()]
        fields[place:place] = [(kind.name, kind.kind) for kind in early]
        operation.__annotations__ = dict([*fields, *((kind.name, kind.kind) for kind in late)])
        for kind in (*early, *late):
            setattr(operation, kind.name, kind.field(later=kind in late))
        return operation

    return declared


COSTS = {kind.name: kind.cost for kind in MODIFIERS if kind.cost}
"""Constants of the cost models of both passes, where a fit begins."""


def exponentials(constants: Value, modifiers: Iterable[Modifier]) -> float:
    """How much longer the exponentials of scores take, as a factor."""
    return prod(1 + constants[one.name] for one in modifiers if one.cost)
