"""The families of kernels as torch calls see them, each in a folder of its name.

A folder's `family.py` has `FAMILY`, what the machinery asks of it. Folders whose name begins with
`_` hold what several families share.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from warploom.generator import families

if TYPE_CHECKING:
    from warploom.runtime.family import RuntimeFamily


@cache
def family(name: str) -> RuntimeFamily:
    """Return the runtime's half of the family called `name`, or raise UnknownNameError."""
    found: RuntimeFamily = import_module(f"{__name__}.{families.family(name).name}.family").FAMILY
    return found


def every() -> list[RuntimeFamily]:
    """The runtime's halves of all families, in the order of their names."""
    return [family(name) for name in families.names()]
