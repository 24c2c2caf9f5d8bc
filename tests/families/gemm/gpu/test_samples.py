"""Random legal kernels, and all that were ever found wrong."""

from __future__ import annotations

from collections.abc import Callable

import gemm_arena as arena
import gemm_samples as samples
import pytest
from gemm_ledger import LEDGER, Entry
from gemm_samples import SAMPLES, Sample

from warploom.generator.artifact import Artifact

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.kernel.digest[:8])
def test_what_the_rules_allow_the_gpu_computes(sample: Sample) -> None:
    try:
        arena.verify(arena.call(sample.kernel, *sample.shape, batches=sample.batches))
    except AssertionError as error:
        raise AssertionError(f"seed {samples.SEED}: {sample}: {error}") from error


def test_few_of_what_the_rules_allow_spill(
    built: dict[str, Artifact], note: Callable[[str, str], None]
) -> None:
    artifacts = [built[sample.kernel.name] for sample in SAMPLES]
    spilled = [a.name for a in artifacts if a.resources[a.name].spill_bytes or a.serialised]
    note("samples.spilled or serialised", f"{len(spilled)} of {len(SAMPLES)}")
    assert len(spilled) <= len(SAMPLES) // 20


@pytest.mark.parametrize("entry", LEDGER, ids=lambda entry: entry.seen.split(":")[0])
def test_what_was_once_wrong_stays_right(entry: Entry) -> None:
    arena.verify(arena.call(entry.kernel, *entry.shape, batches=entry.batches))
