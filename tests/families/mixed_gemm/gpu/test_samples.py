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
    kernels = [*(one.kernel for one in DRAWN), *cases.SCHEDULES]
    artifacts = [built[kernel.name] for kernel in kernels]
    spilled = [a.name for a in artifacts if a.resources[a.name].spill_bytes or a.serialised]
    note("samples.spilled or serialised", f"{len(spilled)} of {len(kernels)}")
    assert len(spilled) <= len(kernels) // 10
