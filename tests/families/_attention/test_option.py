"""An option of attention is added by files of its own: those of `option/`, put into the package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import warploom
from warploom.generator.families._attention.modifiers import MODIFIERS
from warploom.runtime.families._attention import modifiers as runtime

OPTION = Path(__file__).parent / "option"
PACKAGE = Path(warploom.__path__[0])
TEMPLATES = PACKAGE / "templates"


def overlay(package: Path, added: Path, to: Path) -> None:
    """Make a package at `to` that is `package` with files of `added` beside its own."""
    to.mkdir()
    own = {entry.name: entry for entry in added.iterdir() if not entry.name.startswith("__")}
    for entry in package.iterdir():
        if entry.name not in own and entry.name != "__pycache__":
            (to / entry.name).symlink_to(entry.resolve())
    for name, entry in own.items():
        if entry.is_dir():
            overlay(package / name, entry, to / name)
        elif entry.parent != OPTION:
            assert not (package / name).exists()
            (to / name).symlink_to(entry)


def test_an_option_is_files_of_its_own(tmp_path: Path) -> None:
    """Kernels render, compile and are launched with no other file of the package changed."""
    overlay(PACKAGE, OPTION, tmp_path / "warploom")
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[3])])
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest"]
    command += ["-p", "no:hypothesispytest", "-p", "no:anyio"]  # a second of the process
    done = subprocess.run(
        [sys.executable, *command, str(OPTION / "checks.py")],
        env={**os.environ, "PYTHONPATH": paths},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_every_file_of_a_modifier_has_its_name() -> None:
    files = (TEMPLATES / "_attention" / "modifiers").iterdir()
    assert {re.split(r"[._]", path.name)[0] for path in files} == {kind.name for kind in MODIFIERS}


def test_every_modifier_has_a_class_of_its_name_in_generator_and_runtime() -> None:
    assert {kind.__name__ for kind in MODIFIERS} == {kind.__name__ for kind in runtime.MODIFIERS}
