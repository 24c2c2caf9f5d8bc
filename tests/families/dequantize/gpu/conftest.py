"""What the gpu tests of this family share: its kernels, built at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import dequantize_cases as cases
import pytest

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec


@pytest.fixture(scope="session")
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """Every kernel of the cases, by name."""
    return build(cases.KERNELS)
