"""What the generator says of the family: rules and launches."""

from __future__ import annotations

from typing import Any

import pytest

from warploom.errors import SpecificationError
from warploom.generator.families import family
from warploom.generator.families.fp32_pieces import (
    Fp32PiecesOperation,
    Fp32PiecesProblem,
    Fp32PiecesSchedule,
)
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec

FAMILY = family("fp32_pieces")


def spec(q: str = "fp16", count: int = 2, layout: str = "row", threads: int = 256) -> KernelSpec:
    operation: Any = Fp32PiecesOperation(q, count, layout)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, Fp32PiecesSchedule(threads))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"count": 3}, "count 3 of q fp16: must be 2"),
        ({"layout": "col", "threads": 128}, "threads 128 with layout col: must be 256"),
    ],
    ids=str,
)
def test_what_is_not_legal_is_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(SpecificationError, match=problem):
        spec(**fields)


def test_scales_of_rows_that_are_read_across_take_a_launch_of_their_own() -> None:
    problem, device = Fp32PiecesProblem(4096, 5000, 4096, 5056), DeviceLimits(132)
    first, second = FAMILY.launches(spec(layout="col"), problem, device)
    assert first.entry.endswith("_peaks")
    assert first.grid == 128 * -(-5000 // 256)
    assert second.grid == 64 * 79
    (only,) = FAMILY.launches(spec(), Fp32PiecesProblem(4096, 5000, 5000, 5056), device)
    assert only.grid == 4096
    *zeroed, workspace = FAMILY.workspaces(spec(layout="col"), problem)
    assert [one.tensor for one in zeroed if one.kept] == ["maxima", "sums"]
    assert workspace.bytes == 4 * 4096 * 20
    assert not FAMILY.workspaces(spec("bf16", 3, "col"), problem)
