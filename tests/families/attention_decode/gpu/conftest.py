"""What the gpu tests of decode attention share: their kernels, built at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import decode_cases as cases
import pytest
from decode_drawn import DRAWN
from decode_mutants import MUTANTS

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec


@pytest.fixture(scope="session")
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """Every kernel of the tables, by name."""
    mutants = [mutant.kernel for mutant in MUTANTS.values()]  # and nothing taken out of them
    return build([*cases.ALL, *DRAWN, *mutants])
