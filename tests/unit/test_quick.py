"""`make quick` runs the tests of what was changed: which those are, and since when."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import quick

ROOT = Path(__file__).parents[2]


def test_tests_follow_from_what_was_changed() -> None:
    """By imports, names, families and seeded faults, each with one that nothing else gives."""
    for file, test in {
        "runtime/families/gemm/call.py": "tests/families/gemm/test_calls.py",
        "templates/attention_merge/kernel.cu.jinja": "tests/families/attention_merge/test_calls.py",
        "configs/mixed_gemm/space.yaml": "tests/families/mixed_gemm/test_rules.py",
        "benchmarks/peers/gemm.py": "tests/families/gemm/test_bench.py",
        "docs/families/gemm.md": "tests/families/gemm/test_page.py",
        "runtime/plan.py": "tests/unit/test_runtime_plan.py",
        "integrations/linear.py": "tests/integrations/test_linear_gradients.py",
        "tests/toy/conftest.py": "tests/toy/test_generator.py",
        "generator/rules.py": "tests/families/gemm/test_rules.py",
        "quantization/slabs.py": "tests/quantization/test_slabs.py",
        "tools/same_kernels.py": "tests/unit/test_same_launches.py",
        "tests/unit/pretended_gpu.py": "tests/unit/test_runtime_negation.py",
        "tests/unit/test_quick.py": "tests/unit/test_quick.py",
        "templates/_product/tiles.cuh.jinja": "tests/golden/test_golden.py",
    }.items():
        assert test in quick.touched([file]), file


def test_tests_of_another_family_are_not_touched() -> None:
    for file in ("runtime/families/gemm/call.py", "docs/families/gemm.md"):
        touched = quick.touched([file])
        assert [test for test in touched if test.startswith("tests/families/attention")] == []
    assert quick.touched(["docs/notebook.md"]) == sorted(
        ["tests/unit/test_pages.py", "tests/unit/test_site.py", *quick.ALWAYS]
    )
    assert quick.touched([]) == []


def test_no_gpu_test_and_none_that_is_gone_is_run() -> None:
    files = ["tests/families/gemm/gpu/test_shapes.py", "tests/unit/test_that_is_gone.py"]
    assert quick.touched(files) == sorted(quick.ALWAYS)


def test_slow_tests_run_only_where_they_are_changed() -> None:
    slow = quick.slowest()
    assert len(slow) > 10 and all((ROOT / file).is_file() for file in slow)
    record = "tests/unit/test_record.py"
    assert record in slow
    assert record in quick.touched([record], slow)
    assert record in quick.touched(["tests/gpu/gpu_records.py"])
    assert record not in quick.touched(["tests/gpu/gpu_records.py"], slow)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A branch `mine` with a commit of its own, where main has a later one."""

    def git(*arguments: str) -> None:
        names = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *names, *arguments], cwd=tmp_path, check=True, capture_output=True)

    def commit(file: str) -> None:
        (tmp_path / file).write_text(file)
        git("add", file)
        git("commit", "-m", file)

    git("init", "-b", "main")
    commit("both.py")
    git("switch", "-c", "mine")
    commit("committed.py")
    git("switch", "main")
    commit("theirs.py")
    git("switch", "mine")
    return tmp_path


def test_what_was_changed_is_what_differs_from_where_the_branch_left(repository: Path) -> None:
    assert quick.changed("main", repository) == ["committed.py"]
    (repository / "both.py").write_text("other")
    (repository / "new.py").touch()
    assert quick.changed("main", repository) == ["both.py", "committed.py", "new.py"]
    (repository / "both.py").unlink()
    assert "both.py" in quick.changed("main", repository)


def test_a_base_that_is_none_is_an_error_that_says_so(repository: Path) -> None:
    with pytest.raises(Exception, match="git merge-base nowhere HEAD: fatal"):
        quick.changed("nowhere", repository)
