"""Families are found by their folders."""

from __future__ import annotations

import sys
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
    with pytest.raises(UnknownNameError, match=r"family '_shared': must be one of .*another"):
        families.family("_shared")


CLASS = """
from warploom.generator.families.attention_merge import (
    AttentionMergeOperation as O, AttentionMergeSchedule as S, AttentionMergeShape as X
)
from warploom.generator.families.base import Family
class Broken(Family{types}):
    "A family that lacks something."
"""
TYPES = "[O, S, X, X]"
RULES = "def schedule_reasons(arch, operation, schedule): return []\n"
TABLES = (
    "from warploom.generator.families.table import Table\n"
    "class One(Table): ...\nclass Other(Table): ...\n"
)
LAUNCH = "def parameters(spec): ...\ndef launches(spec, problem, device): ...\n"


@pytest.mark.parametrize(
    ("types", "files", "message"),
    [
        ("", {}, r"family broken has no operation: write it in the brackets of `class Broken"),
        ("[O, S]", {}, r"family broken has no shape: write it in the brackets of `class Broken"),
        (TYPES, {}, r"family broken has no schedule_reasons: define a function of this name in"),
        (TYPES, {"rules": RULES}, r"family broken has no parameters: define a function of this"),
        (
            TYPES,
            {"rules": RULES, "launch": LAUNCH, "again": RULES},
            r"family broken has schedule_reasons in .*broken\.again and in .*broken\.rules: leave",
        ),
        (
            TYPES,
            {"rules": RULES, "launch": LAUNCH, "model": "def seconds(*given): ...\n"},
            r"broken\.model has no START",
        ),
        (
            TYPES,
            {"rules": RULES, "launch": LAUNCH, "table": TABLES},
            r"family broken has the tables One and Other: define one",
        ),
    ],
    ids=["types", "shape", "rules", "launch", "twice", "constants", "table"],
)
def test_a_family_that_lacks_a_part_says_which_at_import(
    folder: Path, types: str, files: dict[str, str], message: str
) -> None:
    (folder / "broken").mkdir()
    for name, text in {"__init__": CLASS.format(types=types), **files}.items():
        (folder / "broken" / f"{name}.py").write_text(text)
    families.names.cache_clear()
    try:
        with pytest.raises(TypeError, match=message):
            families.family("broken")
    finally:
        for module in [name for name in sys.modules if ".families.broken" in name]:
            del sys.modules[module]


@pytest.mark.parametrize("name", families.names())
def test_a_family_has_a_half_that_runs(name: str) -> None:
    """A half that lacks a method cannot be made, which no other import would tell."""
    assert isinstance(runtime_families.family(name), RuntimeFamily)
