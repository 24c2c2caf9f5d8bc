"""The guide's programs run on a GPU as they do on the CPU, those marked `gpu` included."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
GUIDE = (Path(__file__).parents[2] / "docs" / "guide.md").read_text()


def test_every_program_of_the_guide_works_on_a_gpu(tmp_path: Path) -> None:
    blocks = re.findall(r"^```(\w+)(?: gpu)?\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
    for language, text in blocks:
        if language == "yaml":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    program = "\n".join(text for language, text in blocks if language == "python")
    assert "CUDAGraph" in program
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
