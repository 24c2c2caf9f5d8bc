"""A GPU kind is a row: what depends on one reads the table, and a new row is all that it takes."""

from __future__ import annotations

import pytest

from warploom.generator.gpus import DEFAULT, KINDS, GpuKind, kind
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.targets import names, target

OTHER = GpuKind("Maker's Other", "sm_90a", 40, at_a_time={1: 40, 2: 18, 4: 5})


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> GpuKind:
    """A second kind, whose clusters are not in proportion to the default's."""
    monkeypatch.setitem(KINDS, OTHER.name, OTHER)
    return OTHER


def test_rows_stand_under_their_names_and_the_default_has_every_figure() -> None:
    assert {name: row.name for name, row in KINDS.items()} == {name: name for name in KINDS}
    assert sorted(DEFAULT.at_a_time) == list(range(1, 9))
    for row in KINDS.values():
        assert not row.at_a_time or row.at_a_time[1] == row.multiprocessors


def test_clusters_are_those_of_the_kind_and_of_a_part_of_it_in_proportion(other: GpuKind) -> None:
    whole, half = DeviceLimits(40, other.name), DeviceLimits(20, other.name)
    assert [whole.clusters(size) for size in (1, 2, 4)] == [40, 18, 5]
    assert [half.clusters(size) for size in (1, 2, 4)] == [20, 9, 2]
    assert DeviceLimits(1, other.name).clusters(4) == 1


@pytest.mark.parametrize("name", ["", "NVIDIA H300", "NVIDIA H100 80GB HBM3"])
def test_a_kind_that_nobody_asked_for_its_clusters_has_the_defaults_in_proportion(
    name: str,
) -> None:
    count = DEFAULT.multiprocessors
    for size, whole in DEFAULT.at_a_time.items():
        assert DeviceLimits(count, name).clusters(size) == whole
        assert DeviceLimits(count // 2, name).clusters(size) == whole // 2


def test_a_row_is_a_gpu_that_kernels_can_be_chosen_for_by_name(other: GpuKind) -> None:
    found = target("maker's other")
    assert (found.gpu, found.multiprocessors, found.arch) == (other.name, 40, other.arch)
    assert other.name in names() and target("maker's other:7").multiprocessors == 7


def test_calls_on_the_cpu_are_planned_for_the_default() -> None:
    assert (NO_GPU.multiprocessors, NO_GPU.arch) == (DEFAULT.multiprocessors, DEFAULT.arch)
    assert NO_GPU.gpu == "" and kind(NO_GPU.gpu) is DEFAULT
