"""Random legal kernels."""

from __future__ import annotations

from collections.abc import Callable

import mixed_arena as arena
import mixed_cases as cases
import mixed_drawn as drawn
import pytest
from mixed_drawn import DRAWN, Drawn

from warploom.generator.artifact import Artifact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("one", DRAWN, ids=lambda one: one.kernel.digest[:8])
def test_what_the_rules_allow_the_gpu_computes(one: Drawn) -> None:
    try:
        arena.verify(arena.call(one.kernel, *one.shape))
    except AssertionError as error:
        raise AssertionError(f"seed {drawn.SEED}: {one}: {error}") from error


def test_few_of_what_the_rules_allow_spill(
    built: dict[str, Artifact], note: Callable[[str, str], None]
) -> None:
    """Pairwise schedules are at the edge of what fits; how many of them spill is only noted."""
    counts = []
    for kernels in (cases.SCHEDULES, [one.kernel for one in DRAWN]):
        used = [
            (built[kernel.name], built[kernel.name].resources[kernel.name]) for kernel in kernels
        ]
        counts.append(sum(bool(one.spill_bytes) or bool(a.serialised) for a, one in used))
    note("samples.spilled or serialised", f"{counts[1]} of {len(DRAWN)}")
    note("pairwise.spilled or serialised", f"{counts[0]} of {len(cases.SCHEDULES)}")
    assert counts[1] <= len(DRAWN) // 10
