"""The kernels in the tree are those that last passed the tests on a GPU, family by family."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import gpu_records
import module_graph
import pytest
import yaml

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
    fresh = recorded(place)["digest"] == digests()[PLACES[place]]
    assert fresh or place in STALE, (
        "host code, kernels or launches changed since the tests last passed on a GPU: run "
        f"`{command(place)}` on a GPU and commit tests/{place}/record.json; if only names changed, "
        "`python tools/carry_records.py BASE` says so, where BASE is a commit of which it holds"
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
SUBJECTS = (None, "integrations", *families.names())


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what decides digests, to change and to put back: with the first sampled kernels of
    each family alone, since all of them take 11 s.
    """
    root = tmp_path_factory.mktemp("copied")
    for name in module_graph.SUBPACKAGES:
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("records"))
    shutil.copytree(ROOT / "src", root / "src", symlinks=True)
    for path in root.glob("configs/*/smoke.yaml"):
        content = yaml.safe_load(path.read_text())
        path.write_text(yaml.safe_dump({**content, "kernels": content["kernels"][:2]}))
    return root


@cache
def digests(root: Path = ROOT) -> dict[str | None, str]:
    """The digests of a tree as it was when they were first asked for."""
    return gpu_records.digests(SUBJECTS, root)


@contextmanager
def edited(root: Path, edits: Mapping[str, Callable[[str], str]]) -> Iterator[None]:
    """Change files of a tree, by functions of their texts, as long as the context lasts."""
    texts = {root / file: (root / file).read_text() for file in edits}
    try:
        for file, edit in edits.items():
            changed = edit(texts[root / file])
            assert changed != texts[root / file], f"{file} is not changed"
            (root / file).write_text(changed)
        yield
    finally:
        for path, text in texts.items():
            path.write_text(text)


def stale(root: Path) -> set[str | None]:
    """The places whose digest differs from that of the tree before it was changed."""
    now, before = gpu_records.digests(SUBJECTS, root), digests(root)
    return {name for name in SUBJECTS if now[name] != before[name]}


@pytest.mark.parametrize(
    ("file", "places"),
    [
        ("runtime/families/attention_merge/call.py", {"attention_merge", "integrations"}),
        ("runtime/families/_attention/mask.py", {*ATTENTION, "integrations"}),
        ("quantization/slabs.py", {"dequantize", "mixed_gemm", "sparse_gemm", "integrations"}),
        ("runtime/kernel.py", {*SUBJECTS}),
        ("runtime/explanation.py", {None, "gemm", "integrations"}),
        ("integrations/__init__.py", {"integrations"}),
        ("tuning/search.py", set()),
    ],
)
def test_changed_host_code_asks_for_the_tests_of_those_that_may_run_it(
    file: str, places: set[str | None], copied: Path
) -> None:
    digests(copied)
    with edited(copied, {file: lambda text: f"{text}\nMORE = 1\n"}):
        assert stale(copied) == places


def test_what_is_emitted_asks_for_the_tests_of_its_families_and_comments_for_none(
    copied: Path,
) -> None:
    """Of kernels, of launches, and of what a call declares, each in another family.

    What chooses and stores kernels asks for none, nor do comments and docstrings anywhere. One
    emission, of seconds, shows all of it.
    """

    def documented(text: str) -> str:
        return re.sub(r'\A""".*?"""', '"""Other."""', text, flags=re.DOTALL) + "\n# more\n"

    def commented(text: str) -> str:
        return f"// more\n{text}"

    python = [
        path.relative_to(copied).as_posix()
        for package in ("runtime", "generator", "integrations", "quantization")
        for path in (copied / package).rglob("*.py")
    ]
    templates = [
        path.relative_to(copied).as_posix() for path in (copied / "templates").rglob("*.cuh*")
    ]
    comments = dict.fromkeys(python, documented) | dict.fromkeys(templates, commented)
    edits = {
        # A template that families share, and one of a family's own.
        "templates/_product/epilogue/bias.cuh": lambda text: text.replace("+", "-"),
        "templates/activation_backward/kernel.cu.jinja": lambda text: text.replace("kRows", "kRow"),
        "generator/families/attention_merge/launch.py": lambda text: text.replace(
            "early=True", "early=False"
        ),
        # What a call declares is seen in no kernel and no launch.
        "runtime/families/attention_append/call.py": lambda text: text.replace(
            'schema="Tensor(a!)"', 'schema="Tensor(c!)"'
        ),
        "generator/families/gemm/model.py": lambda text: f"{text}\nMORE = 1\n",
        "generator/store.py": lambda text: f"{text}\nMORE = 1\n",
    }
    digests(copied)
    with edited(copied, comments), edited(copied, edits):
        assert stale(copied) == {
            *("gemm", "mixed_gemm"),
            *("activation_backward", "attention_merge", "attention_append", "integrations"),
        }


def test_every_module_that_counts_is_there() -> None:
    """One that moved would silently be none that decides."""
    modules = module_graph.modules(ROOT)
    assert modules.keys() >= gpu_records.ALWAYS | gpu_records.HOST_GENERATOR
    assert [pattern for pattern in gpu_records.EMITS if not any(ROOT.glob(pattern))] == []


# ---- What a session notes ------------------------------------------------------------------------

NOTHING: dict[str, Any] = {"kernels": {}, "unseen": []}
EMITTED = {"options": [], "families": {"one": NOTHING, "two": NOTHING}}
CONFTEST = f"""
import sys
from pathlib import Path
sys.path += [{str(ROOT / "tests" / "gpu")!r}, {str(ROOT / "tools")!r}]
import gpu_records, pytest
pytest_plugins = ["gpu_session"]
here = Path(__file__).parents[1]
gpu_records.write.__defaults__ = (here,)
gpu_records.emitted = lambda root: {EMITTED!r}
gpu_records._machine = lambda: {{"gpu": "one of paper"}}

@pytest.fixture(scope="session")
def private_store():
    pass
"""
PASSES = """
import pytest, time
pytestmark = pytest.mark.gpu
def test_one(note):
    note("mutants.a fault", "caught")
    time.sleep(1)
@pytest.mark.parametrize("i", range(3))
def test_some(i):
    if i == 2: pytest.skip("not here")
def test_records_are_not_asked():
    import os
    assert os.environ["WARPLOOM_RECORDS"] == "ignore"
"""
FAILS = "import pytest\n@pytest.mark.gpu\ndef test_fails():\n    assert False\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of two families, `one` and `two`, with gpu tests and earlier records."""
    monkeypatch.setattr(gpu_records, "emitted", lambda root: EMITTED)
    root = tmp_path / "tree"
    for name in ("one", "two"):
        call = root / "runtime" / "families" / name / "call.py"
        call.parent.mkdir(parents=True)
        call.touch()
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
    command += ["--dist", "loadgroup", "--record", "noted", *arguments]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    assert "INTERNALERROR" not in done.stdout + done.stderr, done.stdout + done.stderr
    return done.stdout


def test_one_session_notes_each_family_in_its_own_record(tree: Path) -> None:
    session(tree, "-n", "2")  # the others run in one process: each takes a second to begin
    found = {
        path.parent.relative_to(tree / "noted").as_posix(): json.loads(path.read_text())
        for path in (tree / "noted").rglob("record.json")
    }
    assert set(found) == {"gpu", "families/one/gpu", "families/two/gpu"}
    count, earlier = {"passed": 4, "skipped": 1}, {"passed": 1}
    tests = {place: record["tests"] for place, record in found.items()}
    took = [one["test_passes.py"].pop("seconds") for one in tests.values()]
    assert all(seconds >= 1 for seconds in took), "files are shared out by it"
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
    (tree / "runtime/families/two/call.py").write_text("other = 1\n")
    (cut := tree / "noted/families/two/gpu/record.json").parent.mkdir(parents=True)
    cut.write_text('{"digest": "of')  # by the end of a machine's time
    session(tree, "tests/families/two/gpu")
    (path,) = (tree / "noted").rglob("record.json")
    assert set(json.loads(path.read_text())["tests"]) == {"test_passes.py"}


def test_what_passed_with_another_driver_stays_and_is_told(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Machines of one kind differ in it: what the last one passed was lost."""
    noted = tree / "noted"
    for driver, file in (("580.1", "test_a.py"), ("580.2", "test_b.py"), ("580.3", "test_b.py")):
        state = {"gpu": "one of paper", "driver": driver}
        monkeypatch.setattr(gpu_records, "_machine", lambda state=state: state)
        counts = {f"tests/families/two/gpu/{file}": {"passed": 2}}
        (path,) = gpu_records.write(noted, counts, (), (), tree)
    record = json.loads(path.read_text())
    assert record["driver"] == "580.3"
    assert record["tests"]["test_a.py"] == {"driver": "580.1", "passed": 2}
    assert record["tests"]["test_b.py"] == {"passed": 2}


def test_some_tests_of_a_file_are_not_noted_for_the_whole(tree: Path) -> None:
    session(tree, "tests/families/two/gpu/test_passes.py::test_one")
    assert not (tree / "noted").exists()
