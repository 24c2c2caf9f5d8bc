"""Expansion: every legal point once, in stable order, and a reason for each that is not legal."""

from __future__ import annotations

from pathlib import Path

import pytest

from warploom.errors import ConfigurationError
from warploom.generator import space
from warploom.generator.space import Expansion, expand_file

BF16 = "{family: gemm, a: bf16, b: bf16, d: bf16}"
INT8 = "{family: gemm, a: int8, b: int8, d: int32}"


def write(path: Path, *entries: tuple[list[str], list[str]]) -> Path:
    """Write a configuration: operations in line 4, 6 ... and schedules in the lines after them."""
    lines = ["version: 1", "arch: sm_90a", "kernels:"]
    for operations, schedules in entries:
        lines.append(f"  - operations: [{', '.join(operations)}]")
        lines.append(f"    schedules: [{', '.join(schedules)}]")
    path.write_text("\n".join(lines))
    return path


def expand(tmp_path: Path, *entries: tuple[list[str], list[str]]) -> Expansion:
    return expand_file(write(tmp_path / "some.yaml", *entries))


def failure(tmp_path: Path, *entries: tuple[list[str], list[str]]) -> list[str]:
    with pytest.raises(ConfigurationError) as caught:
        expand(tmp_path, *entries)
    return str(caught.value).replace(f"{tmp_path}/", "").splitlines()


def test_a_space_is_the_product_of_its_lists_with_the_last_field_fastest(tmp_path: Path) -> None:
    tiles, clusters = "[[128, 256, 64], [128, 128, 64]]", "[[2, 1], [1, 1]]"
    schedule = f"{{tile: {tiles}, cluster: {clusters}, raster: [along_n, along_m]}}"
    found = expand(tmp_path, ([BF16], [schedule]))
    points = [
        (spec.schedule.tile, spec.schedule.cluster, spec.schedule.raster)  # type: ignore[attr-defined]
        for spec in found.specs
    ]
    assert points == [
        (tile, cluster, raster)
        for tile in ((128, 256, 64), (128, 128, 64))
        for cluster in ((2, 1), (1, 1))
        for raster in ("along_n", "along_m")
    ]
    assert found.rejected == []


def test_auto_stages_fill_shared_memory_and_numbers_stay(tmp_path: Path) -> None:
    schedule = "{tile: [128, 256, 64], stages: [auto, 3], store: [tma, direct]}"
    found = expand(tmp_path, ([BF16], [schedule]))
    stages = [spec.schedule.stages for spec in found.specs]  # type: ignore[attr-defined]
    assert stages == [4, 4, 3, 3]


def test_points_that_two_entries_share_come_once(tmp_path: Path) -> None:
    schedule = "{tile: [[128, 256, 64], [96, 256, 64]]}"
    found = expand(tmp_path, ([BF16, BF16], [schedule, schedule]), ([BF16], [schedule]))
    assert (len(found.specs), len(found.rejected)) == (1, 1)


def test_a_rejected_point_says_every_rule_that_it_breaks(tmp_path: Path) -> None:
    schedule = "{tile: [[128, 256, 64], [96, 252, 32]]}"
    (rejection,) = expand(tmp_path, ([BF16], [schedule])).rejected
    assert rejection.schedule.tile == (96, 252, 32)  # type: ignore[attr-defined]
    assert rejection.reasons == (
        "tile m 96: must be one of 64, 128, 256",
        "tile n 252: must be what wgmma takes: multiples of 8, at most 256",
        "tile k 32: must be 64",
    )


def test_an_illegal_operation_is_an_error_with_its_line(tmp_path: Path) -> None:
    mixed = BF16.replace("b: bf16", "b: fp16")
    (found,) = failure(tmp_path, ([BF16, mixed], ["{tile: [128, 256, 64]}"]))
    assert found.startswith(
        "some.yaml:4: kernels[0].operations[1]: b fp16: must be of the type of a"
    )


def test_an_operation_without_a_legal_schedule_names_the_rules_that_leave_none(
    tmp_path: Path,
) -> None:
    schedule = "{tile: [[128, 256, 64], [128, 250, 64]], stages: [2, 9]}"
    (found,) = failure(tmp_path, ([INT8], [schedule]))
    assert found.startswith("some.yaml:4: kernels[0].operations[0]: no legal schedule: ")
    assert "tile k 64: must be 128 (4 of 4 schedules)" in found
    wgmma = "8, 24 and multiples of 16, at most 256"
    assert f"tile n 250: must be what wgmma takes: {wgmma} (2 of 4 schedules)" in found


def test_the_problems_of_all_operations_are_reported_together(tmp_path: Path) -> None:
    mixed = BF16.replace("b: bf16", "b: fp16")
    found = failure(
        tmp_path,
        ([mixed], ["{tile: [128, 256, 64]}"]),
        ([BF16], ["{tile: [128, 256, 64]}"]),
        ([INT8], ["{tile: [128, 256, 64]}"]),
    )
    assert [line.split(": ")[:2] for line in found] == [
        ["some.yaml:4", "kernels[0].operations[0]"],
        ["some.yaml:8", "kernels[2].operations[0]"],
    ]


def test_too_many_points_are_refused_before_they_are_expanded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(space, "_expand", None)
    groups = f"[{', '.join(map(str, range(1, 102)))}]"
    schedule = f"{{tile: [128, 256, 64], swizzle_size: {groups}, stages: {groups}}}"
    (found,) = failure(tmp_path, ([BF16], [schedule]))
    assert found.startswith("some.yaml:3: kernels: 10201 points: a configuration has at most 10000")


@pytest.mark.parametrize(
    "tile", ["[0, 0, 0]", "[-64, -8, -64]", "[7, 7, 7]", f"[64, {10**17}, 64]"]
)
def test_a_tile_that_makes_no_sense_is_rejected_and_never_a_crash(
    tmp_path: Path, tile: str
) -> None:
    schedule = (
        f"{{tile: [{tile}, [128, 256, 64]], cluster: [[1, 1], [0, 0]], cluster_split_k: [1, 0]}}"
    )
    found = expand(tmp_path, ([BF16], [schedule]))
    assert (len(found.specs), len(found.rejected)) == (1, 7)


def test_a_tile_narrower_than_any_box_is_rejected_and_never_a_crash(tmp_path: Path) -> None:
    by_rows = BF16.replace("b: bf16", "b: bf16, layout_b: row")
    found = expand(tmp_path, ([by_rows], ["{tile: [[128, 1, 64], [128, 256, 64]]}"]))
    assert (len(found.specs), len(found.rejected)) == (1, 1)
