"""The kernels in the tree are those that last passed the tests on a GPU, family by family."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_records
import pytest

from warploom.generator import families

ROOT = Path(__file__).parents[2]
PLACES = gpu_records.places()
# Files of tests, by place, that no GPU has passed on code like this yet; no other may be missing.
AWAITED: dict[str, set[str]] = {}
# Places whose record is of the code before, and why; no other may be.
STALE: dict[str, str] = {}
FAMILIES = {place: name for place, name in PLACES.items() if place.startswith("families/")}


def recorded(place: str) -> dict[str, Any]:
    """The record of a place."""
    path = ROOT / "tests" / place / "record.json"
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def command(place: str) -> str:
    chosen = f"FAMILY={FAMILIES[place]}" if place in FAMILIES else f"GPU_TESTS=tests/{place}"
    return f"make gpu-test {chosen}"


def test_every_family_has_tests_on_a_gpu() -> None:
    assert set(FAMILIES.values()) == set(families.names())


@pytest.mark.parametrize("place", PLACES)
def test_no_kernel_was_changed_after_it_last_passed_on_a_gpu(place: str) -> None:
    fresh = recorded(place)["digest"] == gpu_records.digest(PLACES[place])
    assert fresh or place in STALE, (
        "templates, generator or runtime changed since the tests last passed on a GPU: "
        f"run `{command(place)}` on a GPU and commit tests/{place}/record.json"
    )
    assert not (fresh and place in STALE), f"{place} was renewed: take it out of STALE"


@pytest.mark.parametrize("place", PLACES)
def test_every_file_of_tests_passed_on_a_gpu(place: str) -> None:
    found = recorded(place)
    files = {path.name for path in (ROOT / "tests" / place).glob("test_*.py")}
    assert files - AWAITED.get(place, set()) <= set(found["tests"]) <= files
    assert all(file["passed"] > 0 for file in found["tests"].values())
    if place not in FAMILIES or "test_mutants.py" in AWAITED.get(place, ()):
        return  # what that file notes is awaited, too
    assert set(found["sanitizers"]) == {"memcheck", "racecheck", "synccheck", "initcheck"}
    assert [name for name, outcome in found["mutants"].items() if outcome == "survived"] == []
    assert len(found["mutants"]) >= 3


# ---- What a change asks for ----------------------------------------------------------------------

ATTENTION = {"attention_forward", "attention_backward", "attention_decode"}


@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("generator/families/gemm/rules.py", {"gemm", "integrations"}),
        ("templates/_product/epilogue/bias.cuh", {"gemm", "mixed_gemm", "integrations"}),
        ("runtime/families/attention_forward/plan.py", {"attention_forward", "integrations"}),
        ("templates/_attention/tile.cuh", {*ATTENTION, "integrations"}),
        ("runtime/families/_attention/mask.py", {*ATTENTION, "integrations"}),
        ("generator/slabs.py", {"mixed_gemm", "integrations"}),
        ("quantization/slabs.py", {"mixed_gemm", "integrations"}),
        ("runtime/kernel.py", {None, "integrations", *families.names()}),
        ("integrations/__init__.py", {"integrations"}),
        ("generator/families/gemm/model.py", set()),
        ("generator/store.py", set()),
        ("tuning/search.py", set()),
    ],
)
def test_a_change_asks_for_the_tests_of_those_it_may_break_alone(
    file: str, stale: set[str | None], tmp_path: Path
) -> None:
    """One record for all made a comment in a family's rules ask for every other family's tests."""
    for room in ("generator", "integrations", "quantization", "runtime", "templates", "tuning"):
        shutil.copytree(ROOT / room, tmp_path / room)
    with (tmp_path / file).open("a") as changed:
        changed.write("// and more\n")
    subjects = {None, "integrations", *families.names()}
    found = {name for name in subjects if _digest(name, tmp_path) != _digest(name, ROOT)}
    assert found == stale


def _digest(name: str | None, root: Path) -> str:
    return str(gpu_records.digest(name, root))


def test_every_file_that_a_digest_is_to_be_over_is_there() -> None:
    """A file that moved would silently be none that decides."""
    assert [one for one in gpu_records.MACHINERY if not any(ROOT.glob(one))] == []


# ---- What a session notes ------------------------------------------------------------------------

CONFTEST = f"""
import sys
from pathlib import Path
sys.path.append({str(ROOT / "tests" / "gpu")!r})
import gpu_records, pytest
pytest_plugins = ["gpu_session"]
here = Path(__file__).parents[1]
gpu_records.write.__defaults__ = (here,)
gpu_records._machine = lambda: {{"gpu": "one of paper"}}

@pytest.fixture(scope="session")
def private_store():
    pass
"""
PASSES = """
import pytest
pytestmark = pytest.mark.gpu
def test_one(note):
    note("mutants.a fault", "caught")
@pytest.mark.parametrize("i", range(3))
def test_some(i):
    if i == 2: pytest.skip("not here")
def test_records_are_not_asked():
    import os
    assert os.environ["WARPLOOM_RECORDS"] == "ignore"
"""
FAILS = "import pytest\n@pytest.mark.gpu\ndef test_fails():\n    assert False\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A repository of two families, `one` and `two`, with gpu tests and earlier records."""
    root = tmp_path / "tree"
    for name in ("one", "two"):
        rules = root / "generator" / "families" / name / "rules.py"
        rules.parent.mkdir(parents=True)
        rules.touch()
    files = {
        "conftest.py": CONFTEST,
        "gpu/test_passes.py": PASSES,
        "families/one/gpu/test_passes.py": PASSES,
        "families/one/gpu/test_fails.py": FAILS,
        "families/two/gpu/test_passes.py": PASSES,
        "families/two/test_of_a_cpu.py": "def test_it():\n    pass\n",
    }
    for name, text in files.items():
        path = root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "pytest.ini").write_text("[pytest]\nmarkers = gpu\naddopts = --import-mode=importlib\n")
    for name in ("one", "two"):
        before = {"digest": gpu_records.digest(name, root), "gpu": "one of paper"}
        before["tests"] = {"test_before.py": {"passed": 1}, "test_fails.py": {"passed": 1}}
        (root / "tests/families" / name / "gpu/record.json").write_text(json.dumps(before))
    return root


def session(tree: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    command += ["-p", "no:hypothesispytest", "-p", "no:anyio"]  # a second of each process
    command += ["-n", "2", "--dist", "loadgroup", "--record", "noted", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout


def test_one_session_notes_each_family_in_its_own_record(tree: Path) -> None:
    session(tree)
    found = {
        path.parent.relative_to(tree / "noted").as_posix(): json.loads(path.read_text())
        for path in (tree / "noted").rglob("record.json")
    }
    assert set(found) == {"gpu", "families/one/gpu", "families/two/gpu"}
    count, earlier = {"passed": 4, "skipped": 1}, {"passed": 1}
    tests = {place: record["tests"] for place, record in found.items()}
    assert tests["gpu"] == {"test_passes.py": count}
    assert tests["families/one/gpu"] == {"test_before.py": earlier, "test_passes.py": count}
    assert tests["families/two/gpu"] == {
        "test_before.py": earlier,
        "test_fails.py": earlier,  # it is of `one` that this file has failed
        "test_passes.py": count,
    }
    assert all(record["mutants"] == {"a fault": "caught"} for record in found.values())
    assert len({record["digest"] for record in found.values()}) == 3


def test_what_other_code_passed_is_noted_no_more(tree: Path) -> None:
    (tree / "generator/families/two/rules.py").write_text("# other\n")
    session(tree, "tests/families/two/gpu")
    (path,) = (tree / "noted").rglob("record.json")
    assert set(json.loads(path.read_text())["tests"]) == {"test_passes.py"}


@pytest.mark.parametrize(
    "some", [("-k", "test_one"), ("tests/families/two/gpu/test_passes.py::test_one",)], ids=str
)
def test_some_tests_of_a_file_are_not_noted_for_the_whole(tree: Path, some: tuple[str]) -> None:
    session(tree, *some)
    assert not (tree / "noted").exists()
