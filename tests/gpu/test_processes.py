"""What needs a process of its own: forks, stores, mutants and sanitizers."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path

import arena
import attention_backward_mutants
import attention_mutants
import cases
import mutant
import pytest
from cases import SIMPLE
from sanitized import FAMILIES

import warploom
from warploom.errors import KernelMissingError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("processes_built")]
HERE = Path(__file__).parent
Note = Callable[[str, str], None]
NOTICED = ("caught", "hung")  # what may become of a mutant

START = """
import json, os, sys, torch, warploom
from warploom.errors import DeviceError
name = sys.argv[1]
a = torch.ones(67, 64, device="cuda", dtype=torch.bfloat16)
b, out = torch.ones(64, 72, device="cuda", dtype=torch.bfloat16).t().contiguous().t(), None
"""
COUNT = (
    START
    + """
d = warploom.gemm(a, b, spec=name)
assert (d == 64).all()
print(json.dumps(warploom.counters.as_dict()))
"""
)
FORK = (
    START
    + """
half, out = a[:32], torch.zeros(67, 72, device="cuda", dtype=torch.bfloat16)
plan = warploom.plan(a, b, out=out, spec=name)
plan(a, b, out)
warploom.gemm(a, b, out=out, spec=name)
q = torch.ones(1, 2, 67, 64, device="cuda", dtype=torch.bfloat16)
warploom.attention(q, q, q)
torch.cuda.synchronize()
calls = {
    "a warm call": lambda: warploom.gemm(a, b, out=out, spec=name),
    "a new call": lambda: warploom.gemm(half, b, spec=name),
    "a plan": lambda: plan(a, b, out),
    "a warm attention": lambda: warploom.attention(q, q, q),
}
child = os.fork()
if child == 0:
    said = {}
    for what, call in calls.items():
        try:
            call()
        except BaseException as error:
            said[what] = f"{type(error).__name__}: {error}"
    print(json.dumps(said), flush=True)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert (plan(a, b, out) == 64).all()
"""
)


def run(
    *command: str, timeout: float = 180, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command that finds the same modules as this process."""
    path = os.pathsep.join(entry for entry in sys.path if entry)
    return subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_python(code: str, **environment: str) -> dict[str, object]:
    """Run code with a kernel's name, and return the JSON that it prints."""
    done = run(sys.executable, "-c", code, SIMPLE["tma"].name, **environment)
    assert done.returncode == 0, done.stderr
    printed: dict[str, object] = json.loads(done.stdout)
    return printed


def test_a_second_process_compiles_nothing_even_where_it_must_not(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    first = run_python(COUNT, WARPLOOM_CACHE_DIR=store)
    assert (first["compiles"], first["store_hits"], first["loads"]) == (1, 0, 1)
    second = run_python(COUNT, WARPLOOM_CACHE_DIR=store, WARPLOOM_COMPILE="forbid")
    assert (second["compiles"], second["store_hits"], second["loads"]) == (0, 1, 1)
    assert second["copies"] == 0


def test_a_kernel_that_must_not_be_compiled_is_a_typed_error_before_a_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = arena.call(cases.spec((128, 64), group=99), 257, 136, 193)
    counters = warploom.counters.as_dict()
    monkeypatch.setenv("WARPLOOM_COMPILE", "forbid")
    with pytest.raises(KernelMissingError, match=made.spec.name):
        made.run()
    assert warploom.counters.as_dict() == counters
    monkeypatch.delenv("WARPLOOM_COMPILE")
    arena.verify(made)


def test_a_fork_after_cuda_was_used_is_told_so_before_the_driver_is() -> None:
    said = run_python(FORK)
    assert set(said) == {"a warm call", "a new call", "a plan", "a warm attention"}
    for message in said.values():
        assert str(message).startswith("DeviceError: a process forked after CUDA"), said


@pytest.mark.parametrize("name", mutant.MUTANTS)
def test_a_kernel_without_one_of_its_barriers_is_caught(name: str, note: Note) -> None:
    chosen = mutant.MUTANTS[name]
    arena.verify(arena.call(chosen.kernel, *chosen.shape))
    try:
        done = run(sys.executable, str(HERE / "mutant.py"), name, timeout=100)
    except subprocess.TimeoutExpired:
        note(f"mutants.{name}", "hung")
        return
    assert done.returncode in (0, 1), done.stderr
    note(f"mutants.{name}", done.stdout.strip())
    assert done.returncode == 0, f"{name}: {done.stdout}"


def outcomes(program: str, names: Iterable[str]) -> dict[str, str]:
    """What became of every mutant of a program: they run in one process, one after the other.

    One that hangs ends it, which is as good as a wrong result: the others go on in another. The
    limit is for all that is not on its clock.
    """
    found: dict[str, str] = {}
    while rest := [name for name in names if name not in found]:
        done = run(sys.executable, str(HERE / program), *rest, timeout=600)
        told = {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}
        assert told, f"{rest[0]} hangs without its fault, or fails: {done.stderr[-4000:]}"
        found |= told
    return found


@pytest.fixture(scope="module")
def attention_outcomes() -> dict[str, str]:
    return outcomes("attention_mutants.py", attention_mutants.MUTANTS)


@pytest.fixture(scope="module")
def attention_backward_outcomes() -> dict[str, str]:
    return outcomes("attention_backward_mutants.py", attention_backward_mutants.MUTANTS)


@pytest.mark.xdist_group("attention mutants")  # one process has what they share
@pytest.mark.parametrize("name", attention_mutants.MUTANTS)
def test_an_attention_kernel_that_is_wrong_in_one_place_is_caught(
    name: str, attention_outcomes: dict[str, str], note: Note
) -> None:
    note(f"mutants.attention: {name}", attention_outcomes[name])
    assert attention_outcomes[name] in NOTICED


@pytest.mark.xdist_group("attention backward mutants")
@pytest.mark.parametrize("name", attention_backward_mutants.MUTANTS)
def test_an_attention_backward_kernel_that_is_wrong_in_one_place_is_caught(
    name: str, attention_backward_outcomes: dict[str, str], note: Note
) -> None:
    note(f"mutants.attention_backward: {name}", attention_backward_outcomes[name])
    assert attention_backward_outcomes[name] in NOTICED


TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED_SECONDS = 150
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def sanitize(tool: str, family: str) -> tuple[str, str]:
    """Return `clean`, `N errors` or `not run: why`, and all that the tool printed."""
    program = shutil.which("compute-sanitizer")
    if program is None:
        return "not run: there is no compute-sanitizer here", ""
    watched = (sys.executable, str(HERE / "sanitized.py"), family)
    # cuda-bindings asks the driver for entries that this one lacks: an API error, but no defect
    flags = ("--report-api-errors", "no") if tool == "memcheck" else ()
    try:
        done = run(program, "--tool", tool, *flags, *watched, timeout=SANITIZED_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not run: {family} took more than {SANITIZED_SECONDS} seconds", ""
    printed = done.stdout + done.stderr
    found = SUMMARY.search(printed)
    count = next((int(number) for number in found.groups() if number), 0) if found else 0
    if count and "Internal Sanitizer Error" not in printed:
        return f"{count} errors in {family}", printed
    if found and not count and "verified" in printed:
        return "clean", printed
    lines = [line for line in printed.splitlines() if "rror" in line] or printed.splitlines()[-1:]
    return f"not run: {lines[0].strip('= ') if lines else 'it printed nothing'}", printed


@pytest.fixture(scope="module")
def sanitized() -> dict[str, tuple[str, str]]:
    """What each tool says of all families: what it says of the first that is not clean."""
    pairs = list(product(TOOLS, FAMILIES))
    with ThreadPoolExecutor(len(pairs)) as pool:
        found = dict(zip(pairs, pool.map(sanitize, *zip(*pairs, strict=True)), strict=True))
    return {
        tool: max((found[tool, family] for family in FAMILIES), key=lambda told: told[0] != "clean")
        for tool in TOOLS
    }


@pytest.mark.xdist_group("sanitizers")
@pytest.mark.parametrize("tool", TOOLS)
def test_a_sanitizer_that_runs_finds_nothing(
    tool: str, sanitized: dict[str, tuple[str, str]], note: Note
) -> None:
    outcome, printed = sanitized[tool]
    note(f"sanitizers.{tool}", outcome)
    assert outcome == "clean" or outcome.startswith("not run"), printed[-4000:]
