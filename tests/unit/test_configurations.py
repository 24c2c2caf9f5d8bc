"""The package's configurations are found in the folders of their families, whatever these are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from warploom import configs
from warploom.cli.shapes import shipped
from warploom.errors import ConfigurationError
from warploom.generator import configurations, families


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of configurations that are found in the package's place, for one test."""
    monkeypatch.setattr(configs, "__path__", [str(tmp_path)])
    configurations.spaces.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    configurations.spaces.cache_clear()


def fill(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text("")


def test_a_space_is_called_by_its_family_and_what_several_begin_with_is_all_of_them(
    folder: Path,
) -> None:
    fill(folder, "sum/space.yaml", "sum/space_wide.yaml", "sum/schedules.yaml")
    fill(folder, "sort_up/space.yaml", "sort_up/space_wide.yaml", "sort_down/space.yaml")
    names = {
        name: [path.relative_to(folder).as_posix() for path in paths]
        for name, paths in configurations.spaces().items()
    }
    assert names == {
        "sort": ["sort_down/space.yaml", "sort_up/space.yaml"],
        "sort_down": ["sort_down/space.yaml"],
        "sort_up": ["sort_up/space.yaml"],
        "sort_up_wide": ["sort_up/space_wide.yaml"],
        "sum": ["sum/space.yaml"],
        "sum_wide": ["sum/space_wide.yaml"],
    }
    assert shipped(Path("sort")) == [folder / path for path in names["sort"]]


def test_a_family_whose_name_others_begin_with_keeps_it(folder: Path) -> None:
    fill(folder, "sort/space.yaml", "sort_up/space.yaml", "sort_down/space.yaml")
    assert configurations.spaces()["sort"] == (folder / "sort/space.yaml",)


def test_a_table_is_no_configuration_and_a_misspelt_space_is_known(folder: Path) -> None:
    fill(folder, "sort/schedules.yaml", "sort/space.yaml", "sort/other.yaml", "sort/smoke.yaml")
    assert [path.name for path in configurations.every()] == [
        *("smoke.yaml", "other.yaml", "space.yaml")
    ]
    with pytest.raises(ConfigurationError, match=r"spaces: sort: did you mean sort\?"):
        shipped(Path("sotr"))


@pytest.mark.parametrize("name", families.names())
def test_every_family_has_a_small_set_and_a_space(name: str) -> None:
    assert name in [path.parent.name for path in configurations.smoke()]
    assert configurations.spaces()[name][0].parts[-2:] == (name, "space.yaml")
