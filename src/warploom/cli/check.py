"""One finding of `warploom doctor`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """What was found, and where; `advice` is empty when nothing needs to be done."""

    name: str
    found: str
    advice: str = ""
    where: str = ""
