"""What the gpu tests of gradients share: their kernels, built at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attention_backward_cases as cases
import attention_block_cases
import pytest

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec


@pytest.fixture(scope="session")
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """Every backward kernel of the tables, by name, and what forward passes before them need."""
    return build([*cases.ALL, *cases.FORWARD, *attention_block_cases.BACKWARD, *cases.KEYS])
