"""The package's own configurations: a folder for each family, and the names of its spaces.

`NAME` is configs/NAME/space.yaml and `NAME_x` its space_x.yaml; what the names of several families
begin with stands for the spaces of all of them.
"""

from __future__ import annotations

from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml


def folder() -> Path:
    """Where the package's configurations lie."""
    return Path(str(resources.files("warploom.configs")))


def smoke() -> list[Path]:
    """The small set of every family that reaches all choices that it has."""
    return sorted(folder().glob("*/smoke.yaml"))


def every() -> list[Path]:
    """Every configuration of every family, small sets first and spaces last."""
    others = sorted(set(folder().glob("*/*.yaml")) - set(folder().glob("*/schedules.yaml")))
    return sorted(others, key=lambda path: (path.stem.startswith("space"), path.stem != "smoke"))


@cache
def spaces() -> dict[str, tuple[Path, ...]]:
    """The spaces to tune by every name that they have."""
    own = {
        path.parent.name + path.stem.removeprefix("space"): (path,)
        for path in sorted(folder().glob("*/space*.yaml"))
    }
    together: dict[str, tuple[Path, ...]] = {}
    for path in sorted(folder().glob("*/space.yaml")):
        words = path.parent.name.split("_")
        for count in range(1, len(words)):
            name = "_".join(words[:count])
            together[name] = (*together.get(name, ()), path)
    several = {name: paths for name, paths in together.items() if len(paths) > 1}
    return dict(sorted((several | own).items()))


@cache
def cells() -> dict[str, Any]:
    """benchmarks/cells.yaml, which the package has among its configurations."""
    return cast("dict[str, Any]", yaml.safe_load((folder() / "cells.yaml").read_text()))
