"""What the gpu tests of attention share: their kernels, built at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attention_block_cases
import attention_cases
import attention_key_cases
import eight_bit_arena
import pytest

from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec


@pytest.fixture(scope="session")
def built(build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]]) -> dict[str, Artifact]:
    """Every attention kernel of the tables, by name."""
    return build(
        [
            *attention_cases.ALL,
            *attention_block_cases.FORWARD,
            *attention_key_cases.FORWARD,
            *eight_bit_arena.ALL,
        ]
    )
