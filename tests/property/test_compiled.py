"""A sample of all legal specs compiles for real: what the rules let through is a kernel."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import Phase, given, settings
from hypothesis.strategies import SearchStrategy
from strategies import attention_backward_specs, gemm_specs

from warploom.generator.artifact import Artifact
from warploom.generator.build import build_many
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.specification import KernelSpec
from warploom.generator.store import Store

SIZE = 32


def sample(specs: SearchStrategy[KernelSpec], size: int) -> list[KernelSpec]:
    """Return the same specs every time: some that hypothesis makes up, of which it varies each."""
    made: dict[KernelSpec, None] = {}

    @settings(max_examples=4 * size, derandomize=True, phases=(Phase.generate,), database=None)
    @given(specs)
    def collect(spec: KernelSpec) -> None:
        made[spec] = None

    collect()
    return list(made)[:: max(1, len(made) // size)]


SAMPLE = {spec.name: spec for spec in sample(gemm_specs(), SIZE)}
# The table's kernels that have the fewest registers to spare: a sample may not hold them.
TIGHT = [
    KernelSpec(
        "sm_90a",
        AttentionBackwardOperation("bf16", 256, mask, softcap=True),
        AttentionBackwardSchedule(64, 128, accumulate="direct", share="rows", single_do=True),
    )
    for mask in get_args(get_type_hints(AttentionBackwardOperation)["mask"])
]
BACKWARD = {spec.name: spec for spec in (*sample(attention_backward_specs(), SIZE // 2), *TIGHT)}


@pytest.fixture(scope="module")
def artifacts(private_store: Path) -> dict[str, Artifact]:
    results = build_many([*SAMPLE.values(), *BACKWARD.values()], Store.default())
    failures = [str(result) for result in results if not isinstance(result, Artifact)]
    assert failures == []
    return {result.name: result for result in results if isinstance(result, Artifact)}


def test_the_sample_is_not_of_one_kind() -> None:
    assert len(SAMPLE) > SIZE // 2
    for word in ("batched", "promoted", "swap", "pingpong", "amax", "direct", "int8"):
        assert 0 < sum(f"_{word}_" in name for name in SAMPLE) < len(SAMPLE), word


@pytest.mark.parametrize("name", SAMPLE)
def test_a_legal_spec_compiles_to_its_entry(name: str, artifacts: dict[str, Artifact]) -> None:
    assert list(artifacts[name].resources) == [name]
    assert artifacts[name].serialised == ()


def test_next_to_none_of_them_spills(artifacts: dict[str, Artifact]) -> None:
    """The registers that the rules expect are fitted: a few specs at the edge need some more.

    Operations are counted, since hypothesis likes to vary one spec's schedule.
    """
    spilled = [name for name in SAMPLE if artifacts[name].resources[name].spill_bytes]
    assert len({SAMPLE[name].operation for name in spilled}) <= SIZE // 16, spilled


@pytest.mark.parametrize("name", BACKWARD)
def test_a_legal_attention_backward_neither_spills_nor_serialises(
    name: str, artifacts: dict[str, Artifact]
) -> None:
    entries = {f"{name}{suffix}" for suffix in ("_preprocess", "", "_postprocess")}
    assert set(artifacts[name].resources) == entries
    assert all(resources.clean for resources in artifacts[name].resources.values())
    assert artifacts[name].serialised == ()
