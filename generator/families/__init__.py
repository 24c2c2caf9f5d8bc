"""The kernel families: a folder here is one, and nothing outside knows a family by name.

A folder's package has `FAMILY`, its surface (see base.py). Folders whose names begin with `_`
hold what several families share.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING

from warploom.errors import UnknownNameError

if TYPE_CHECKING:  # families are found by name, and made of specs, which look for theirs here
    from warploom.generator.families.base import Family


@cache
def names() -> tuple[str, ...]:
    """The families there are, in alphabetical order: every folder on this package's path."""
    found = (module.name for module in iter_modules(__path__) if module.ispkg)
    return tuple(sorted(name for name in found if not name.startswith("_")))


@cache
def family(name: str) -> Family:
    """Return the family called `name`, or raise UnknownNameError listing all."""
    if name not in names():
        raise UnknownNameError(
            f"family {name!r}", rule=f"must be one of {', '.join(names())}", fix="use one of them"
        )
    found: Family = import_module(f"{__name__}.{name}").FAMILY
    return found


def every() -> list[Family]:
    """All families, in the order of `names`."""
    return [family(name) for name in names()]
