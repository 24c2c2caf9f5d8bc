"""Suggestions suggest: another word than the one written, of those that would be taken there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

import warploom
from warploom import variables
from warploom.cli import main
from warploom.errors import ConfigurationError
from warploom.generator.config import load
from warploom.suggestions import suggestion

GEMM = "{family: gemm, a: bf16, b: bf16, d: bf16}"
ATTENTION = "{family: attention_forward, element: bf16, dim: 64}"
TILE, Q_TILE = "{tile: [128, 128, 64]}", "{q_tile: 128, kv_tile: 64, rescale: needed}"


def gemm(**fields: str) -> str:
    return GEMM.replace("}", "".join(f", {name}: {value}" for name, value in fields.items()) + "}")


def problems(
    folder: Path, *operations: str, schedules: str = TILE, arch: str = "sm_90a"
) -> list[str]:
    path = folder / "some.yaml"
    path.write_text(
        f"version: 1\narch: {arch}\nkernels:\n"
        f"  - operations: [{', '.join(operations)}]\n    schedules: [{schedules}]\n"
    )
    with pytest.raises(ConfigurationError) as caught:
        load(path)
    return str(caught.value).splitlines()


@pytest.mark.parametrize(
    ("operation", "told"),
    [
        (GEMM.replace("a: bf16", "a: BF16"), "did you mean bf16?"),
        (GEMM.replace("a: bf16", "a: float16"), "did you mean fp16?"),
        (GEMM.replace("a: bf16", "a: bfloat16"), "did you mean bf16?"),
        (GEMM.replace("a: bf16", "a: float8_e4m3fn"), "did you mean e4m3?"),
        (GEMM.replace("a: bf16", "a: fp8"), "did you mean e4m3 or e5m2?"),
        (GEMM.replace("gemm", "GEMM"), "did you mean gemm?"),
        (gemm(layout_a="Row"), "did you mean row?"),
        (gemm(epilogue="[{step: activation, function: swish}]"), "did you mean silu?"),
        (gemm(epilogue="[{step: amax, element: bf16}]"), "remove it"),
        (gemm(epilogue="[{step: scale, bye: row}]"), "did you mean by?"),
        (gemm(dim="64"), "remove it"),
        (gemm(acumulation="fast"), "did you mean accumulation?"),
    ],
)
def test_a_suggestion_is_of_what_the_field_or_the_mapping_takes(
    tmp_path: Path, operation: str, told: str
) -> None:
    assert told in " ".join(problems(tmp_path, operation))


def test_a_key_in_the_wrong_case_is_known(tmp_path: Path) -> None:
    missing, unknown = problems(tmp_path, GEMM.replace("a: bf16", "A: bf16"))
    assert "a: missing" in missing and unknown.endswith("did you mean a?")


def test_auto_is_known_in_any_case(tmp_path: Path) -> None:
    (found,) = problems(tmp_path, GEMM, schedules="{tile: [128, 128, 64], stages: Auto}")
    assert found.endswith("did you mean auto?")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_80", "H100"])
def test_an_architecture_that_is_none_is_not_taken_for_another(tmp_path: Path, arch: str) -> None:
    (found,) = problems(tmp_path, GEMM, arch=arch)
    assert found.endswith("kernels exist for sm_90a (Hopper: compute capability 9.0) only")


@pytest.mark.parametrize(
    ("operations", "schedules", "place", "other"),
    [
        ((GEMM, ATTENTION), TILE, "operations[1]", "attention_forward"),
        ((GEMM,), Q_TILE, "schedules[0]", "attention_forward"),
        ((ATTENTION,), f"{Q_TILE}, {TILE}", "schedules[1]", "gemm"),
    ],
)
def test_what_is_of_another_family_is_one_problem_and_wants_an_entry_of_its_own(
    tmp_path: Path, operations: tuple[str, ...], schedules: str, place: str, other: str
) -> None:
    (found,) = problems(tmp_path, *operations, schedules=schedules)
    assert f"kernels[0].{place}: " in found
    assert found.endswith(f"an entry has one family: give {other} an entry of its own")


def test_the_word_itself_is_never_suggested() -> None:
    assert suggestion("element", ["element"]) == ""
    assert suggestion("Element", ["element"]) == "did you mean element?"
    assert suggestion("fp8", ["fp16"], {"fp8": ("e4m3",)}) == ""


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["lst"], "did you mean list?"),
        (["records", "shw"], "did you mean show?"),
        (["cache", "sats"], "did you mean stats?"),
        (["tune", "gem", "--shapes", "16x64x64"], "did you mean gemm?"),
    ],
)
def test_a_mistyped_command_or_space_is_known(arguments: list[str], told: str) -> None:
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 1 and done.stderr.count(told) == 1
    assert "Did you mean" not in done.stderr  # as some versions of click add


def test_a_mistyped_name_of_the_module_is_known() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'gem': did you mean gemm\?"):
        warploom.gem  # noqa: B018
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'$"):
        warploom.__wrapped__  # noqa: B018


@pytest.fixture
def unwarned() -> Iterator[None]:
    variables.warn.cache_clear()
    yield
    variables.warn.cache_clear()


def test_a_variable_that_is_not_read_is_told_once(
    unwarned: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WARPLOOM_CACHEDIR", "there")
    monkeypatch.delitem(vars(warploom), "gemm", raising=False)
    assert callable(warploom.gemm)
    assert CliRunner().invoke(main, ["list", "none.yaml"]).exit_code == 1
    assert [m for m in caplog.messages if "WARPLOOM_" in m] == [
        "WARPLOOM_CACHEDIR is not read: did you mean WARPLOOM_CACHE_DIR?"
    ]


def test_keys_of_a_file_reach_no_terminal_raw(tmp_path: Path) -> None:
    hostile = '"\\e]0;owned\\a\\u202e\\n": 1'
    (found,) = problems(tmp_path, GEMM.replace("}", f", {hostile}}}"))
    assert "\x1b" not in found and "\\x1b]0;owned\\x07\\u202e\\n" in found
