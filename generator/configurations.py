"""The package's own configurations: a folder for each family, and the names of its spaces.

`NAME` is configs/NAME/space.yaml and `NAME_x` its space_x.yaml; what the names of several families
begin with stands for the spaces of all of them. Families are looked for in every folder on the
path of warploom.configs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from warploom import configs
from warploom.errors import UnknownNameError
from warploom.generator import families, models


def _found(pattern: str) -> list[Path]:
    """What fits a pattern in any of the folders, in order of names."""
    found = (path for folder in configs.__path__ for path in Path(folder).glob(pattern))
    return sorted(found, key=lambda path: path.parts[-2:])


def smoke() -> list[Path]:
    """The small set of every family that reaches all choices that it has."""
    return _found("*/smoke.yaml")


def serving() -> list[Path]:
    """What a model runs while it generates, of every family that has a part in it."""
    return _found("*/serving.yaml")


def every() -> list[Path]:
    """Every configuration of every family, small sets first and spaces last."""
    others = [path for path in _found("*/*.yaml") if path.name != "schedules.yaml"]
    return sorted(others, key=lambda path: (path.stem.startswith("space"), path.stem != "smoke"))


def table(family: str) -> dict[str, Any]:
    """A family's measured table of schedules, as it stands in its file."""
    (path,) = _found(f"{family}/schedules.yaml")
    return _read(path)


@cache
def spaces() -> dict[str, tuple[Path, ...]]:
    """The spaces to tune by every name that they have."""
    shapes = {family.name: family.shape for family in families.every()}
    own = {
        path.parent.name + path.stem.removeprefix("space"): (path,)
        for path in _found("*/space*.yaml")
    }
    together: dict[tuple[str, type | None], tuple[Path, ...]] = {}  # those of the same shapes
    for path in _found("*/space.yaml"):
        words = path.parent.name.split("_")
        for count in range(1, len(words)):
            alike = "_".join(words[:count]), shapes.get(path.parent.name)
            together[alike] = (*together.get(alike, ()), path)
    several = {name: paths for (name, _), paths in together.items() if len(paths) > 1}
    return dict(sorted((several | own).items()))


@cache
def cells() -> dict[str, Any]:
    """benchmarks/cells.yaml, which the package has among its configurations."""
    path = Path(configs.__path__[0], "cells.yaml")
    return _read(path)


def served(model: str | None) -> list[dict[str, Any]]:
    """The heads of a model that generates, or of all that benchmarks/cells.yaml knows.

    Each has heads, kv_heads and dim; batch and keys are what kernels are built for. A model may be
    the path of a config.json.
    """
    listed = cells()["serving"]
    both = {name: listed[name] for name in ("batch", "keys")}
    if model is not None and models.is_path(model):
        found = models.read(model)
        return [{name: getattr(found, name) for name in ("heads", "kv_heads", "dim")} | both]
    known = listed["models"]
    if model is not None and model not in known:
        raise UnknownNameError(
            f"model {model!r}",
            rule=f"benchmarks/cells.yaml has heads of {', '.join(known)}",
            fix="name one of them, or give the path of a config.json, or a FILE and --shapes",
        )
    chosen = known if model is None else {model: known[model]}
    return [heads | both for heads in chosen.values()]


def _read(path: Path) -> dict[str, Any]:
    """What a file says; libyaml, where PyYAML has it, reads it in a tenth of the time."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text())
    try:
        return cast("dict[str, Any]", loader.get_single_data())
    finally:
        loader.dispose()
