"""What the model knows of a GPU kind: a JSON file for each, in configs/model.

Every figure in it is fitted (`warploom records fit`); the file says from how many measurements and
how well, and which of the constants they do not determine. Nothing in it is written by hand.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from warploom.errors import RecordsError
from warploom.generator import json_file
from warploom.generator.gpus import file_name

SCHEMA = 1
GOOD = 1.04  # behind the best known: the tables' picks, which it replaces, are 9 to 10 % behind
# Of the median error: on the average the least of 80 predictions, each off by a normal error, is
# 3.6 of them too small, since the least is one that was.
DOUBT = 4
ENOUGH = 20  # swept problems: fewer are of too few shapes and types for a call to go by


@dataclass(frozen=True, slots=True)
class Quality:
    """What the model is worth, held against sweeps that it was not fitted to.

    problems   swept problems that it was held against
    first      geometric mean of its first choice's time over the best of the sweep
    kept       share of problems whose best of the first 12 is within 3 % of that
    """

    problems: int
    first: float
    kept: float

    @property
    def decides(self) -> bool:
        """True when the model may choose where nothing near was measured."""
        return self.problems >= ENOUGH and self.first <= GOOD and self.kept >= 0.90


@dataclass(frozen=True, slots=True)
class FamilyConstants:
    """The constants of one family: by name, what they were fitted from, and what that is worth.

    measurements, problems   how many of each the fit saw
    error                    the median of |log(predicted / measured)|
    fitted_on                another GPU kind, whose constants these are, rescaled; empty: this one
    assumed                  of which constants these say too little: they are the start's, or near
    """

    values: Mapping[str, float]
    measurements: int
    problems: int
    error: float
    assumed: tuple[str, ...] = ()
    quality: Quality | None = None
    fitted_on: str = ""

    @property
    def doubt(self) -> float:
        """How many times as fast the least of many predictions has to be to be believed."""
        return math.exp(DOUBT * self.error)


@dataclass(frozen=True, slots=True)
class Constants:
    """All that is known of one GPU kind."""

    gpu: str
    multiprocessors: int
    families: Mapping[str, FamilyConstants] = field(default_factory=dict)

    def decides(self, family: str) -> bool:
        """True where a family's model may choose by itself: it was found good enough."""
        fitted = self.families.get(family)
        return fitted is not None and fitted.quality is not None and fitted.quality.decides


def files() -> list[Path]:
    """Every file of constants: those of the package."""
    folder = resources.files("warploom.configs").joinpath("model")
    return sorted(Path(str(folder)).glob("*.json"))


def shipped(gpu: str) -> Constants | None:
    """The constants that were fitted on this very GPU kind; None where there are none."""
    own = [path for path in files() if path.name == file_name(gpu)]
    return read(own[0]) if own else None


@cache
def read(path: Path) -> Constants:
    """Read a file of constants; RecordsError for one that is damaged or of another schema."""
    try:
        document = json_file.parse(json_file.content(path))
        if document["schema"] != SCHEMA:
            raise ValueError(f"schema {document['schema']}, this version reads {SCHEMA}")
        families = {name: _family(entry) for name, entry in document["families"].items()}
        return Constants(document["gpu"], document["multiprocessors"], families)
    except (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RecordsError(
            f"{path}: {json_file.reason(error)}",
            rule="a file of constants must be what `warploom records fit` writes",
            fix="move it away, and fit again",
        ) from error


def _family(entry: Mapping[str, Any]) -> FamilyConstants:
    values = {name: float(value) for name, value in entry["values"].items()}
    if not all(math.isfinite(value) and value > 0 for value in values.values()):
        raise ValueError("a constant is finite and greater than 0")
    quality = entry["quality"]
    return FamilyConstants(
        values,
        entry["measurements"],
        entry["problems"],
        entry["error"],
        tuple(entry["assumed"]),
        None if quality is None else Quality(**quality),
    )


def text(constants: Constants) -> str:
    """Return the file of `constants`; figures have four digits."""
    families = {
        name: {
            "values": {key: float(f"{value:.4g}") for key, value in one.values.items()},
            "measurements": one.measurements,
            "problems": one.problems,
            "error": float(f"{one.error:.3g}"),
            "assumed": list(one.assumed),
            "quality": None
            if one.quality is None
            else {
                "problems": one.quality.problems,
                "first": float(f"{one.quality.first:.4g}"),
                "kept": float(f"{one.quality.kept:.4g}"),
            },
        }
        for name, one in sorted(constants.families.items())
    }
    document = {
        "schema": SCHEMA,
        "gpu": constants.gpu,
        "multiprocessors": constants.multiprocessors,
        "families": families,
    }
    return json.dumps(document, indent=1) + "\n"
