"""What the gpu tests of products share: their kernels, built at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gemm_chosen
import gemm_wider as wider
import pytest
from gemm_ledger import LEDGER
from gemm_mutants import MUTANTS
from gemm_samples import SAMPLES

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec


@pytest.fixture(scope="session")
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """Every GEMM of the tables, by name."""
    others = [*(entry.kernel for entry in LEDGER), *(sample.kernel for sample in SAMPLES)]
    mutants = [mutant.kernel for mutant in MUTANTS.values()]  # and nothing taken out of them
    tables = [*gemm_chosen.ASKED, *gemm_chosen.BLOCK_SCALED]
    return build([*wider.ALL, *tables, *others, *mutants])
