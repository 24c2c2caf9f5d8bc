"""Which schedules of a space are near one another: neighbours of the best are measured next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import lru_cache
from operator import ne
from typing import Any

from warploom.generator.knob import ANY, knobs
from warploom.generator.specification import KernelSpec


@lru_cache(maxsize=8)
def steps(space: frozenset[KernelSpec]) -> Steps:
    """What is near in a space, which most problems of a run share."""
    return Steps(tuple(space))


class Steps:
    """What it is to be near in a space: one field apart, by at most two of its values there.

    A search asks for the neighbours of few specs among thousands: what is known of these is kept.
    """

    def __init__(self, space: Sequence[KernelSpec]) -> None:
        self._space = space
        self._places = {spec: place for place, spec in enumerate(space)}
        self._parts = [_parts(spec) for spec in space]
        names = self._parts[0] if space else {}
        said = knobs(type(space[0].schedule)) if space else {}
        self._leads = {name: said[name].follows or name for name in names if name in said}
        self._values = {name: sorted({_sortable(p[name]) for p in self._parts}) for name in names}
        self._coupled: dict[str, list[str]] = {}
        for name in names:
            if (lead := self._leads.get(name, name)) != ANY:
                self._coupled.setdefault(lead, []).append(name)
        self._groups = [self._grouped(parts) for parts in self._parts]

    def near(self, one: KernelSpec, but: Iterable[KernelSpec]) -> list[KernelSpec]:
        """The specs of the space that are near one, but for some."""
        left_out = {self._places.get(spec) for spec in but}
        mine = _parts(one)
        groups = self._grouped(mine)
        close = [  # most of a space is not, and this says so without a look at its fields
            place for place, its in enumerate(self._groups) if sum(map(ne, groups, its)) <= 1
        ]
        return [
            self._space[place]
            for place in close
            if place not in left_out and self._adjacent(mine, self._parts[place])
        ]

    def _grouped(self, parts: Mapping[str, Any]) -> tuple[tuple[Any, ...], ...]:
        """The values of each field and of what is coupled to it."""
        return tuple(tuple(parts.get(name) for name in names) for names in self._coupled.values())

    def adjacent(self, one: KernelSpec, other: KernelSpec) -> bool:
        """True when two specs, of the space or not, are near."""
        return self._adjacent(_parts(one), _parts(other))

    def _adjacent(self, mine: Mapping[str, Any], its: Mapping[str, Any]) -> bool:
        """True when the two differ in one field, or what is coupled to it, by a step or two."""
        differing = [name for name, value in mine.items() if value != its.get(name)]
        moved = [name for name in differing if self._leads.get(name) != ANY]
        if not differing or len({self._leads.get(name, name) for name in moved}) > 1:
            return False
        return all(self._close(name, mine[name], its[name]) for name in moved)

    def _close(self, name: str, one: object, other: object) -> bool:
        if not isinstance(one, int) or isinstance(one, bool):
            return True
        values = self._values[name]
        low, high = sorted((_sortable(one), _sortable(other)))
        return sum(low < value < high for value in values) <= 1


def _parts(spec: KernelSpec) -> dict[str, Any]:
    """A schedule's fields, a tile's extents each by itself."""
    found: dict[str, Any] = {}
    for field in fields(spec.schedule):
        value = getattr(spec.schedule, field.name)
        if field.name == "tile":
            found |= {f"tile {index}": extent for index, extent in enumerate(value)}
        else:
            found[field.name] = value
    return found


def _sortable(value: object) -> tuple[str, float, str]:
    number = float(value) if isinstance(value, int | float) else 0.0
    return type(value).__name__, number, str(value)
