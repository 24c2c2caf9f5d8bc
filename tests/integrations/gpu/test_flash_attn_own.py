"""FlashAttention's own tests pass on `warploom.flash_attn`, for what it has.

They are run from a checkout of FlashAttention 2.8.3 that `--flash-attention` names; none of them is
here. What is drawn from their cases, and which are left out and why, is in flash_attn_own.py.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import flash_attn_own
import pytest

pytestmark = pytest.mark.gpu
# How many cases of each function are drawn; all where there are no more.
SAMPLES = {
    "test_flash_attn_output": 96,
    "test_flash_attn_varlen_output": 96,
    "test_flash_attn_qkvpacked": 48,
    "test_flash_attn_varlen_qkvpacked": 48,
    "test_flash_attn_causal": 48,
    "test_flash_attn_varlen_causal": 48,
    "test_flash_attn_splitkv": 48,
    "test_flash_attn_kvcache": 96,
    "test_flash_attn_deterministic": 12,
    "test_flash_attn_varlen_deterministic": 12,
    "test_flash_attn_race_condition": 10,
    "test_flash_attn_bwd_overflow": 12,
    "test_flash_attn_bwd_transpose": 16,
    "test_flash_attn_bwd_varlen_overflow": 6,
}
MOST = 24  # cases that one process runs


@pytest.fixture
def checkout(request: pytest.FixtureRequest) -> Path:
    folder: Path | None = request.config.getoption("--flash-attention")
    if folder is None:
        pytest.skip("needs --flash-attention FOLDER, a checkout of FlashAttention 2.8.3")
    return folder.resolve()


def run(
    file: Path, checkout: Path, function: str, count: int, part: str, report: Path
) -> tuple[dict[str, int], str]:
    """Run cases of a function of a file of tests; return counts by outcome, and what was said."""
    beside = Path(flash_attn_own.__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(beside), *sys.path])}
    environment.pop("PYTEST_ADDOPTS", None)  # of these tests, not of theirs
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no"]
    command += ["-p", "flash_attn_own", "-p", "no:cacheprovider", "--noconftest", "-c", os.devnull]
    command += ["--rootdir", str(file.parent), f"--junitxml={report}", f"--checkout={checkout}"]
    command += [f"--function={function}", f"--cases={count}", f"--part={part}", str(file)]
    done = subprocess.run(
        command, cwd=report.parent, env=environment, capture_output=True, text=True, check=False
    )
    said = (done.stdout + done.stderr)[-6000:]
    assert report.is_file(), said
    (suite,) = ElementTree.parse(report).getroot()
    kinds = ("tests", "failures", "errors", "skipped")
    return {kind: int(suite.attrib[kind]) for kind in kinds}, said


@pytest.mark.parametrize(("function", "part"), flash_attn_own.parts(SAMPLES, MOST))
def test_its_own_tests_pass(
    checkout: Path, function: str, part: str, tmp_path: Path, note: Callable[[str, str], None]
) -> None:
    file = checkout / "tests" / "test_flash_attn.py"
    counts, said = run(file, checkout, function, SAMPLES[function], part, tmp_path / "report.xml")
    assert counts["failures"] == counts["errors"] == 0, said
    passed = counts["tests"] - counts["skipped"]
    assert passed > 0, said
    note(f"own tests of FlashAttention.{function} {part}", f"{passed} passed")


def test_every_function_is_run(checkout: Path) -> None:
    tree = ast.parse((checkout / "tests" / "test_flash_attn.py").read_text())
    defined = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
    found = {name for name in defined if name.startswith("test")}
    assert found == SAMPLES.keys()


# ---- What runs them ------------------------------------------------------------------------------

LIKE_THEIRS = """
import pytest, torch
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import _get_block_size_n

@pytest.mark.parametrize("dropout_p", [0.0, 0.17])
@pytest.mark.parametrize("d", [32, 64])
def test_one(d, dropout_p):
    q = torch.randn(1, 70, 2, d, dtype=torch.float16, device="cuda")
    out = flash_attn_func(q, q, q, dropout_p)
    wanted = (q.transpose(1, 2) @ q.permute(0, 2, 3, 1) * d**-0.5).float().softmax(-1)
    wanted = (wanted @ q.transpose(1, 2).float()).transpose(1, 2)
    assert (out - wanted).abs().max() < 2e-2
    assert d != 64

def test_other():
    assert False
"""


def test_a_case_that_fails_is_seen_and_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    """A run of no case, or of any other `flash_attn`, would pass too."""
    file = tmp_path / "test_like_theirs.py"
    file.write_text(LIKE_THEIRS)
    counts, said = run(file, tmp_path, "test_one", 8, "0/1", tmp_path / "report.xml")
    assert counts == {"tests": 2, "failures": 1, "errors": 0, "skipped": 0}, said
    halves = [
        run(file, tmp_path, "test_one", 8, f"{part}/2", tmp_path / f"{part}.xml")[0]
        for part in range(2)
    ]
    assert [half["tests"] for half in halves] == [1, 1]
