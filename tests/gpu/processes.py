"""Processes that tests start: they find the same modules, and may be watched by a sanitizer."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

Note = Callable[[str, str], None]
NOTICED = ("caught", "hung")  # what may become of a mutant


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


def outcomes(program: Path, names: Iterable[str]) -> dict[str, str]:
    """What became of every mutant of a program: they run in one process, one after the other.

    One that hangs ends it, which is as good as a wrong result: the others go on in another. The
    limit is for all that is not on its clock.
    """
    found: dict[str, str] = {}
    while rest := [name for name in names if name not in found]:
        done = run(sys.executable, str(program), *rest, timeout=600)
        told = {k: v for line in done.stdout.splitlines() for k, v in json.loads(line).items()}
        assert told, f"{rest[0]} hangs without its fault, or fails: {done.stderr[-4000:]}"
        found |= told
    return found


TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZED_SECONDS = 150
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")


def sanitize(tool: str, program: Path) -> tuple[str, str]:
    """Return `clean`, `N errors` or `not run: why`, and all that the tool printed."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        return "not run: there is no compute-sanitizer here", ""
    watched = (sys.executable, str(program))
    # cuda-bindings asks the driver for entries that this one lacks: an API error, but no defect
    flags = ("--report-api-errors", "no") if tool == "memcheck" else ()
    try:
        done = run(sanitizer, "--tool", tool, *flags, *watched, timeout=SANITIZED_SECONDS)
    except subprocess.TimeoutExpired:
        return f"not run: it took more than {SANITIZED_SECONDS} seconds", ""
    printed = done.stdout + done.stderr
    found = SUMMARY.search(printed)
    count = next((int(number) for number in found.groups() if number), 0) if found else 0
    if count and "Internal Sanitizer Error" not in printed:
        return f"{count} errors", printed
    if found and not count and "verified" in printed:
        return "clean", printed
    lines = [line for line in printed.splitlines() if "rror" in line] or printed.splitlines()[-1:]
    return f"not run: {lines[0].strip('= ') if lines else 'it printed nothing'}", printed


def assert_nothing_found(tool: str, program: str | None, note: Note) -> None:
    """Assert that a sanitizer that runs finds nothing in what a program launches; note it."""
    outcome, printed = sanitize(tool, Path(program or ""))
    note(f"sanitizers.{tool}", outcome)
    assert outcome == "clean" or outcome.startswith("not run"), printed[-4000:]


def verify_each(check: Callable[[Any], None], of: Sequence[Any]) -> None:
    """What a program that a sanitizer watches does: tell that each was right."""
    torch.manual_seed(0)
    for one in of:
        check(one)
    print(f"verified {len(of)} kernels")
