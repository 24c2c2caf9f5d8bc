"""What no file of the repository may hold: too many lines, pickle or eval, a private path.

A Python file is one concept, of 100 to 800 lines, and is not cut for its length alone.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAXIMUM_LINES = 800
MAXIMUM_BYTES = 2 << 20
PACKAGES = ("generator", "runtime", "tuning", "quantization", "integrations", "src")
SLACK = 2_500  # lines below its limit at which a count asks for a lower one
# Lines of what is written by hand or kept: the limit, and the aim.
BUDGET = {
    "product": (87_500, 43_000),
    "tests": (107_600, 55_000),
    "emitted": (28_100, 19_000),
    "benchmarks/results": (2_000, 3_000),
}
PRIVATE_PATH = re.compile(rb"(?<![\w./-])/(?:home|root|work|Users)/\w[^\s\"'`)]*")
UNSAFE_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load"}


def tracked(pattern: str = "*") -> list[Path]:
    """Files that are in git or would be added to it."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_python_file_is_longer_than_a_person_reads() -> None:
    lengths = {str(path): len(path.read_text().splitlines()) for path in tracked("*.py")}
    assert len(lengths) > 10
    assert {path: count for path, count in lengths.items() if count > MAXIMUM_LINES} == {}


def test_no_output_of_a_tool_is_tracked() -> None:
    """Twice a file of 20 MB that a tool had written was added with the rest of a change."""
    sizes = {str(path): path.stat().st_size for path in tracked()}
    assert {path: size for path, size in sizes.items() if size > MAXIMUM_BYTES} == {}


def lines_of(*patterns: str) -> int:
    return sum(len(path.read_bytes().splitlines()) for one in patterns for path in tracked(one))


def test_the_repository_does_not_grow_beyond_its_budget() -> None:
    """What is there has to be read by whoever changes it: new code takes the place of old."""
    counts = {
        "product": lines_of(*(f"{package}/*.py" for package in PACKAGES)),
        "tests": lines_of("tests/*.py"),
        "emitted": lines_of("emitted/*"),
        "benchmarks/results": lines_of("benchmarks/results/*"),
    }
    over = {name: count for name, count in counts.items() if count > BUDGET[name][0]}
    assert over == {}, f"delete what is no longer needed before more is added; aims: {BUDGET}"
    # A limit that stays behind lets all grow again that was deleted.
    loose = {name: count for name, count in counts.items() if count < BUDGET[name][0] - SLACK}
    assert loose == {}, "lower these limits"


def test_nothing_deserialises_or_evaluates_code() -> None:
    found: set[tuple[str, str]] = set()
    words = UNSAFE_MODULES | {name.split(".")[-1] for name in UNSAFE_CALLS}
    for path in tracked("*.py"):
        text = path.read_text()
        if not any(word in text for word in words):
            continue  # to parse them all takes long
        for node in ast.walk(ast.parse(text)):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
                called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
                if called in words and ast.unparse(node.func) in UNSAFE_CALLS:
                    found.add((str(path), ast.unparse(node.func)))
            found |= {(str(path), name) for name in names if name.split(".")[0] in UNSAFE_MODULES}
    assert found == set()


def test_no_file_names_a_path_of_one_machine() -> None:
    found = {
        (str(path), match.group().decode())
        for path in tracked()
        for match in PRIVATE_PATH.finditer(path.read_bytes())
    }
    assert found == set()


def test_helpers_of_tests_have_names_of_their_own() -> None:
    """They are imported by name alone: of two, or of a library's, the first found would be both."""
    names = [
        path.stem
        for path in tracked("tests/*.py")
        if not path.name.startswith(("test_", "conftest"))
        if not path.with_name("__init__.py").is_file()
    ]
    assert {name: count for name, count in Counter(names).items() if count > 1} == {}
    assert set(names) & sys.stdlib_module_names == set()
