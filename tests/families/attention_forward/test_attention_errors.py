"""The table of errors of attention in 8 bits: what is measured, and what is held to bars."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks import attention_errors as errors
from benchmarks.attention_errors import CASES, FLASH3, Measured
from benchmarks.peers._libraries import EIGHT_BITS

SMALL = {case.name: replace(case, keys=600) for case in CASES}
LIBRARIES = {name for name, _ in EIGHT_BITS.values()}


def small(name: str) -> dict[str, Measured]:
    """All contenders of a case of few keys, on the CPU."""
    return {one.contender: one for one in errors.measured(SMALL[name], 64, 2, 300, "cpu")}


def test_rounding_of_q_and_k_counts_in_one_error_and_not_in_the_other() -> None:
    """With one reference for both, a kernel's own error could not be told from its operands'."""
    found = small("sharp")
    for name in ("int8, smoothed", "e4m3, smoothed", "e4m3, promoted", "e4m3, v in bf16"):
        one = found[name]
        assert one.error and one.of_quantized
        assert one.of_quantized < one.error / 3
    bf16, int8, e4m3 = (found[name].error for name in ("bf16", "int8, smoothed", "e4m3, promoted"))
    assert bf16 and int8 and e4m3
    assert bf16 < int8 / 5 < e4m3 / 10
    assert {one.contender for one in found.values() if one.absent} == LIBRARIES


def test_a_needle_has_about_half_of_the_weight() -> None:
    given = errors.operands(SMALL["needle"], 64, 2, 300, "cpu")
    weights = (given.q.double() @ given.k.double().mT / 8).softmax(-1)[..., 600 // 2 + 3]
    assert weights.min() > 0.3 and weights.max() < 0.7


@pytest.mark.parametrize(("error", "verdict"), [(0.0019, "met"), (0.0021, "missed")])
def test_a_bar_is_held_against_flash_attention_3(error: float, verdict: str) -> None:
    ours = Measured("mean-shifted", 128, "e4m3, promoted", error, error)
    theirs = Measured("mean-shifted", 128, FLASH3, 0.04, 0.04)
    lines = list(errors.table([ours, theirs]))
    (told,) = [line for line in lines if "at most" in line]
    assert told.startswith("e4m3, promoted, mean-shifted") and told.endswith(verdict)
    assert not [line for line in errors.table([ours]) if "at most" in line]


def test_every_error_is_a_line_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "CASES", (SMALL["mean-shifted"],))
    monkeypatch.setattr(errors, "HEADS", 1)
    monkeypatch.setattr(errors, "ROWS", 256)
    path = tmp_path / "errors.jsonl"
    told = CliRunner().invoke(errors.main, ["--dims", "64", "--json", str(path)])
    assert told.exit_code == 0, told.output
    about, *found = map(json.loads, path.read_text().splitlines())
    assert "torch" in about["machine"]
    assert [one["contender"] for one in found] == [*errors.CONTENDERS]
    assert f"{FLASH3} is absent: _vllm_fa3_C" in told.output
