"""The family of this folder joins those of the package for the tests beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from warploom.generator import config_models, configurations, families
from warploom.generator.families.base import Family
from warploom.generator.specification import KernelSpec
from warploom.runtime import families as runtime_families

HERE = Path(__file__).parent
ROOMS = ("generator.families", "templates", "runtime.families", "configs")
CACHES = (
    families.names,
    families.family,
    runtime_families.family,
    config_models.file_model,
    configurations.spaces,
)


@pytest.fixture(scope="module", autouse=True)
def axpy() -> Iterator[Family]:
    """Look for families in this tree, too: its folders join the path of the package's."""
    with pytest.MonkeyPatch.context() as patch:
        for room in ROOMS:
            package = import_module(f"warploom.{room}")
            here = str(HERE.joinpath(*room.split(".")))
            patch.setattr(package, "__path__", [*package.__path__, here])
        for cached in CACHES:
            cached.cache_clear()
        yield families.family("axpy")
    for cached in CACHES:
        cached.cache_clear()


@pytest.fixture
def make(axpy: Family) -> Callable[..., KernelSpec]:
    """Return a maker of kernels of fields of operation and schedule."""

    def make(element: str = "bf16", *, relu: bool = False, **fields: Any) -> KernelSpec:
        operation = axpy.operation(element, relu)
        schedule = axpy.complete("sm_90a", operation, {"threads": 128, **fields})
        return KernelSpec("sm_90a", operation, schedule)

    return make
