"""Programs of the guide and of the families' pages run on a GPU, those marked `gpu` included."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
DOCS = Path(__file__).parents[2] / "docs"
PAGES = [DOCS / "guide.md", *sorted((DOCS / "families").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)(?: gpu)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_program_of_a_page_works_on_a_gpu(page: Path, tmp_path: Path) -> None:
    blocks = BLOCK.findall(page.read_text())
    for language, text in blocks:
        if language == "yaml":
            (tmp_path / text.splitlines()[0].removeprefix("# ")).write_text(text)
    program = "\n".join(text for language, text in blocks if language == "python")
    assert "CUDAGraph" in program or page != PAGES[0]
    (tmp_path / "program.py").write_text(program)
    command = [sys.executable, "program.py"]
    settings = {**os.environ, "WARPLOOM_RECORDS_DIR": str(tmp_path / "records")}
    settings.pop("WARPLOOM_RECORDS", None)  # a user has records, which autotune adds to
    done = subprocess.run(
        command, cwd=tmp_path, env=settings, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
