"""The kernel families. Each module has the same surface; nothing outside knows a family by name."""

from __future__ import annotations

from typing import Any

from warploom.errors import UnknownNameError
from warploom.generator.families import attention_backward, attention_forward, gemm
from warploom.generator.families.family import Family

FAMILIES: dict[str, Family[Any, Any, Any]] = {
    known.name: known
    for known in (gemm.FAMILY, attention_forward.FAMILY, attention_backward.FAMILY)
}


def family(name: str) -> Family[Any, Any, Any]:
    """Return the family called `name`, or raise UnknownNameError listing all."""
    try:
        return FAMILIES[name]
    except KeyError:
        raise UnknownNameError(
            f"family {name!r}", rule=f"known families: {', '.join(FAMILIES)}", fix="use one of them"
        ) from None
