"""Families are found by their folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from warploom.errors import ProblemError, UnknownNameError
from warploom.generator import families
from warploom.generator.configurations import smoke
from warploom.generator.families._attention.shape import AttentionShape
from warploom.generator.records import problem_text
from warploom.generator.shapes import Shape
from warploom.generator.space import operations
from warploom.generator.specification import Operation
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


# ---- Shapes as tables print them -----------------------------------------------------------------


def shapes_of(name: str, operation: Operation) -> set[Shape]:
    """Some cells of an operation, and what else its family reads."""
    family = families.family(name)
    found = set(family.cells(operation, None, ())[:9])
    for text in ("1x64x128", "2x64x128x256", "4x8", "4x4x4x256", "2x4x2x8x64", "64"):
        for told in ("", ":window=16", ":total=512", ":window=16:total=512"):
            try:
                found.add(family.parse_shape(operation, text + told))
            except ProblemError:
                continue
    return found


@pytest.mark.parametrize("name", families.names())
def test_what_tables_print_for_a_shape_is_read_as_that_shape(name: str) -> None:
    """`tune --shapes` refused what the tables of tune, bench, explain and records print."""
    (path,) = (path for path in smoke() if path.parent.name == name)
    family, seen = families.family(name), 0
    for operation in operations(path):
        for shape in shapes_of(name, operation):
            for text in (str(shape), problem_text(operation, shape)):
                assert family.read_shape(operation, text) == shape
            seen += 1
    assert seen


def test_a_shape_without_queries_or_of_two_lengths_is_read_by_the_names_of_its_sizes() -> None:
    """Numbers alone cannot say that heads are 0, nor have two totals."""
    append = families.family("attention_append")
    operation = append.operation(element="bf16", dim=128)
    assert append.read_shape(operation, "tokens8 kv_heads2") == append.shape(8, 2, 0)
    forward = families.family("attention_forward")
    packed = forward.operation(element="bf16", dim=64, lengths="packed")
    shape = AttentionShape(3, 4, 2, 100, 200, 64, total_q=150, total_k=210)
    assert forward.read_shape(packed, str(shape)) == shape


@pytest.mark.parametrize(
    ("name", "fields", "text", "told"),
    [
        ("gemm", {}, "3 of 4x64x64", "must be m ?x ?n ?x ?k"),
        ("gemm", {}, "m4 n64 k64 batches3", "must be of one GEMM: .*write 4x64x64"),
        ("gemm", {}, "m4 n64", "no k: a shape of gemm must have m n k: add kNUMBER"),
        ("gemm", {}, "m4 n64 k64 k64", "'k': a size of gemm must be one of m, n, k, batches, once"),
        ("gemm", {}, "m4 n64 kk64", "'kk': .*, once: did you mean"),
        ("gemm", {}, "m0 n64 k64", "m '0': must be an integer greater than 0"),
        ("gemm", {}, "m4 n64 k9999999999", "k 9999999999: must be at most"),
        (
            "attention_forward",
            {"dim": 64},
            "batch1 heads4 kv_heads4 seq_q8 seq_k8 dim128",
            "dim 128",
        ),
        (
            "attention_forward",
            {"dim": 64},
            "batch1 heads4 kv_heads4 seq_q8 seq_k8 dim64 window8",
            "window 8: must be left out: the operation's mask is none",
        ),
        (
            "attention_forward",
            {"dim": 64, "lengths": "packed"},
            "batch1 heads4 kv_heads4 seq_q8 seq_k8 dim64 total_q8",
            "total_q and total_k must be given",
        ),
        (
            "attention_forward",
            {"dim": 64, "lengths": "packed"},
            "batch2 heads4 kv_heads4 seq_q8 seq_k8 dim64 total_q8 total_k17",
            "total must be between",
        ),
    ],
)
def test_a_printed_shape_that_the_operation_cannot_have_is_refused(
    name: str, fields: dict[str, Any], text: str, told: str
) -> None:
    family = families.family(name)
    kinds = {"a": "bf16", "b": "bf16", "d": "bf16"} if name == "gemm" else {"element": "bf16"}
    with pytest.raises(ProblemError, match=told):
        family.read_shape(family.operation(**kinds, **fields), text)
