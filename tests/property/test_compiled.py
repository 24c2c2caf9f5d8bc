"""A sample of all legal specs compiles for real: what the rules let through is a kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import Phase, given, settings
from hypothesis.internal.conjecture.providers import HypothesisProvider
from hypothesis.strategies import SearchStrategy
from precompiled import Report, reports
from strategies import attention_backward_specs, gemm_specs

from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.names import full
from warploom.generator.specification import KernelSpec

GEMMS, BACKWARDS = 20, 8


def sample(specs: SearchStrategy[KernelSpec], size: int) -> list[KernelSpec]:
    """Return specs that differ: of those that hypothesis makes up, what has the rarest words.

    What it makes up depends on its version, and not on the constants in the code that is loaded: a
    draw that any edit changes is of other kernels each time.
    """
    made: dict[KernelSpec, None] = {}

    @settings(max_examples=8 * size, derandomize=True, phases=(Phase.generate,), database=None)
    @given(specs)
    def collect(spec: KernelSpec) -> None:
        made[spec] = None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HypothesisProvider, "_maybe_draw_constant", lambda *_: None)
        collect()
    chosen: list[KernelSpec] = []
    seen: Counter[str] = Counter()
    for _ in range(size):
        chosen.append(max(made, key=lambda spec: sum(2.0 ** -seen[word] for word in words(spec))))
        del made[chosen[-1]]
        seen.update(words(chosen[-1]))
    return chosen


@cache
def words(spec: KernelSpec) -> set[str]:
    """What a spec says, defaults too: a sample by what is unusual would be of the edges alone."""
    return {*full(spec.operation).split("_"), *full(spec.schedule).split("_")}


# The table's kernels that have the fewest registers to spare: a sample may not hold them.
TIGHT = [
    KernelSpec(
        "sm_90a",
        AttentionBackwardOperation("bf16", 256, mask, softcap=True),
        AttentionBackwardSchedule(
            64, 128, accumulate="direct", cluster_split="rows", single_do=True
        ),
    )
    for mask in get_args(get_type_hints(AttentionBackwardOperation)["mask"])
]


Reports = Mapping[str, Report]


@pytest.fixture(scope="module")
def gemms(request: pytest.FixtureRequest) -> Reports:
    """A sample of legal GEMMs, by name."""
    path = Path(__file__).with_name("compiled_gemm.json")
    renew = request.config.getoption("--update-golden")
    return reports(sample(gemm_specs(), GEMMS), path, renew=renew)


def test_the_sample_is_not_of_one_kind(gemms: Reports) -> None:
    for word in ("batched", "promoted", "swap", "pingpong", "amax", "direct", "int8"):
        assert 0 < sum(f"_{word}_" in name for name in gemms) < len(gemms), word


def test_a_legal_spec_compiles_to_its_entry(gemms: Reports) -> None:
    for name, report in gemms.items():
        assert name in report.resources
        # Others add up parts of k, and the sums of columns.
        others = report.resources.keys() - {name, f"{name}_reduction"}
        assert (f"{name}_reduction" in report.resources) is ("_splitk" in name)
        assert all(entry.startswith(f"{name}_column_sum_") for entry in others)
        assert report.serialised == ()


def test_next_to_none_of_them_spills(gemms: Reports) -> None:
    """The registers that the rules expect are fitted: a few specs at the edge need some more."""
    spilled = [name for name in gemms if gemms[name].resources[name].spill_bytes]
    assert len(spilled) <= 1, spilled


def test_a_legal_attention_backward_neither_spills_nor_serialises(
    request: pytest.FixtureRequest,
) -> None:
    specs = [*sample(attention_backward_specs(), BACKWARDS), *TIGHT]
    path = Path(__file__).with_name("compiled_backward.json")
    renew = request.config.getoption("--update-golden")
    for name, report in reports(specs, path, renew=renew).items():
        entries = {f"{name}{suffix}" for suffix in ("_preprocess", "", "_postprocess")}
        assert set(report.resources) == entries
        assert [entry for entry, one in report.resources.items() if not one.clean] == []
        assert report.serialised == ()
