"""Families are found by their folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from warploom.errors import UnknownNameError
from warploom.generator import families
from warploom.runtime import families as runtime_families
from warploom.runtime.family import RuntimeFamily


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose packages are families too, for one test."""
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path)])
    families.names.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    families.names.cache_clear()


def test_a_family_is_called_as_its_folder() -> None:
    assert [one.name for one in families.every()] == list(families.names())


def test_a_folder_is_a_family_and_what_several_share_is_none(folder: Path) -> None:
    before = families.names()
    for name in ("another", "_shared"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("")
    (folder / "module.py").write_text("")
    families.names.cache_clear()
    assert families.names() == tuple(sorted([*before, "another"]))
    with pytest.raises(UnknownNameError, match=r"family '_shared': known families: .*another"):
        families.family("_shared")


@pytest.mark.parametrize("name", families.names())
def test_a_family_has_a_half_that_runs(name: str) -> None:
    """A half that lacks a method cannot be made, which no other import would tell."""
    assert isinstance(runtime_families.family(name), RuntimeFamily)
