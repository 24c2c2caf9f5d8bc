"""What `make` says to someone whose Python is too old, before it makes anything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLD = f"""#!{sys.executable}
import sys
sys.version_info = (3, 10, 13, "final", 0)
exec(sys.argv[2])
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make here")
@pytest.mark.parametrize("verb", ["demo", "test"])
def test_a_python_that_is_too_old_is_told_in_one_line(verb: str, tmp_path: Path) -> None:
    """It was pip that ended, minutes later, with a page about versions."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    before = sorted(tmp_path.iterdir())
    python = tmp_path.parent / f"{tmp_path.name}-python3.10"
    python.write_text(OLD)
    python.chmod(0o755)
    command = ["make", verb, f"PYTHON={python}"]
    # Not as a part of the make that runs the tests, which would say where it is.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(
        command, cwd=tmp_path, env=alone, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0 and done.stdout == ""
    told, _ = done.stderr.splitlines()  # and make's own, that it stops
    assert told == (
        f"Warploom needs Python 3.11 or later, and {python} is 3.10: "
        "name another, as in make PYTHON=python3.12"
    )
    assert sorted(tmp_path.iterdir()) == before
