"""Tests that several processes share, of which one ends its process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CRASHES = """
import os, pathlib, pytest, time

def ran(name):
    with pathlib.Path(name).open("a") as file:
        file.write("ran\\n")

def test_before():
    ran("before")

def test_that_ends_its_process():
    ran("crash")
    os._exit(1)

@pytest.mark.parametrize("index", range(3))
def test_after(index):
    ran("after")
"""


@pytest.mark.parametrize("how", ["loadscope", "loadgroup"])
def test_a_test_that_ends_its_process_is_run_once(how: str, tmp_path: Path) -> None:
    """One that hung for a quarter of an hour did so in 17 processes, one after another."""
    (tmp_path / "test_crashes.py").write_text(CRASHES)
    (tmp_path / "test_others.py").write_text(CRASHES.replace("os._exit(1)", ""))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "scheduling", "-p", "no:cacheprovider"]
    kept = {name: one for name, one in os.environ.items() if not name.startswith("PYTEST_")}
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*command, "-n", "2", "--dist", how],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 1 and "1 failed, 9 passed" in done.stdout, done.stdout + done.stderr
    assert "crashed while running" in done.stdout
    counts = {one.name: one.read_text().count("ran") for one in tmp_path.glob("[a-c]*")}
    assert counts == {"before": 2, "crash": 2, "after": 6}
