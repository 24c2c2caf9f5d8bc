"""Whether the tests notice faults: each of tests/faults.yaml is put into a copy of the tree.

A fault is one edit. It is caught where tests that pass without it fail with it, or cannot even be
collected.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "faults.yaml"
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", "*.egg-info")
OUTCOMES = {0: "missed", 1: "caught", 2: "caught"}  # by pytest's exit status


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, the text that is replaced in `file`, and the tests that should fail."""

    fault: str
    file: str
    replace: str
    by: str
    caught_by: tuple[str, ...]

    def text(self, root: Path) -> str:
        """Return the file with the fault in it; LookupError unless there is one place for it."""
        whole = (root / self.file).read_text()
        if whole.count(self.replace) != 1:
            raise LookupError(
                f"{self.fault}: {self.file} must have {self.replace!r} once, "
                f"and has it {whole.count(self.replace)} times"
            )
        return whole.replace(self.replace, self.by)


def faults(path: Path = TABLE) -> list[Fault]:
    """Return the faults of a table, in its order."""
    listed = yaml.safe_load(path.read_text())
    return [Fault(**{**entry, "caught_by": tuple(entry["caught_by"])}) for entry in listed]


def copied(root: Path, to: Path) -> Path:
    """Return a copy of the tree, whose links lead within it."""
    return Path(shutil.copytree(root, to / "tree", symlinks=True, ignore=LEFT_OUT))


def tried(root: Path, tests: Sequence[str]) -> int:
    """Run tests in the tree at `root` until one fails; return pytest's exit status."""
    path = os.pathsep.join((str(root / "src"), str(root)))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(  # noqa: S603 (this interpreter, and the table's tests)
        command, cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    if run.returncode not in OUTCOMES:
        click.echo(run.stdout[-2000:] + run.stderr[-2000:])
    return run.returncode


def outcome(root: Path, fault: Fault) -> str:
    """Put a fault into the tree at `root`, run its tests, and take it out again."""
    file = root / fault.file
    whole = file.read_text()
    try:
        file.write_text(fault.text(root))
        return OUTCOMES.get(tried(root, fault.caught_by), "could not be tried")
    finally:
        file.write_text(whole)


@click.command()
@click.option("--table", default=TABLE, type=click.Path(exists=True, path_type=Path))
@click.option("--tree", default=ROOT, type=click.Path(exists=True, path_type=Path))
@click.option("--only", default="", help="Faults whose descriptions have this in them.")
def main(table: Path, tree: Path, only: str) -> None:
    """Try every fault of the table; exit status 1 where one is missed."""
    chosen = [fault for fault in faults(table) if only in fault.fault]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        root = copied(tree, Path(folder))
        tests = sorted({test for fault in chosen for test in fault.caught_by})
        if tried(root, tests):
            raise click.ClickException("the tests must pass before there is a fault")
        for fault in chosen:
            began = time.monotonic()
            try:
                told = outcome(root, fault)
            except (LookupError, OSError) as error:
                told = f"does not apply: {error}"
            wrong += told != "caught"
            click.echo(f"{told} in {time.monotonic() - began:.0f} s: {fault.fault}")
    click.echo(f"{len(chosen) - wrong} of {len(chosen)} faults caught")
    sys.exit(bool(wrong) or not chosen)


if __name__ == "__main__":
    main()
