"""The proof that two versions launch kernels alike sees what a launch and a parameter are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from same_kernels import families, samples
from same_launches import launched

from warploom.generator.specification import KernelSpec


def gemm(**schedule: Any) -> dict[str, Any]:
    spec = next(s for s in samples() if s.operation.family == "gemm" and s.schedule.stages == 4)
    return launched(KernelSpec(spec.arch, spec.operation, replace(spec.schedule, **schedule)))


@pytest.mark.parametrize(
    ("schedule", "differs"),
    [
        ({"stages": 3}, {"launches"}),  # the bytes of shared memory
        ({"l2_promotion": 64}, {"a_map", "b_map"}),
        ({"swizzle_size": 7}, set()),  # is in the kernel's text, and its name is left out
    ],
)
def test_what_differs_between_launches_is_told_by_name(
    schedule: dict[str, Any], differs: set[str]
) -> None:
    one, other = gemm(), gemm(**schedule)
    assert one.keys() == other.keys() > {"block", "launches", "workspaces", "m"}
    assert {name for name in one if one[name] != other[name]} - {"a_tail_map"} == differs


@pytest.mark.parametrize("name", families())
def test_every_sample_of_a_family_can_be_launched(name: str) -> None:
    found = [launched(spec) for spec in samples() if spec.operation.family == name]
    assert len(found) > 3
    assert all(len(set(one.values())) > 5 for one in found)
