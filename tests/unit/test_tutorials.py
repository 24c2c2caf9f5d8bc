"""Tutorials and notebooks run on a CPU as they are written, and notebooks print what they show."""

from __future__ import annotations

import json
import re
from pathlib import Path

import notebooks
import pytest
import shell

ROOT = Path(__file__).parents[2]
TUTORIALS = {path.stem: path.read_text() for path in (ROOT / "docs" / "tutorials").glob("*.md")}
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
LINES = 110  # of a tutorial, at most


def blocks(text: str, language: str) -> list[str]:
    """The contents of the code blocks marked exactly so."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_runs_as_it_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it says to save is there; its program runs and prints what it says; its commands run."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    tutorial = TUTORIALS[name]
    for block in blocks(tutorial, "yaml"):
        (tmp_path / block.splitlines()[0].removeprefix("# ")).write_text(block)
    (tmp_path / "tutorial.py").write_text("\n".join(blocks(tutorial, "python")))
    commands = "".join(blocks(tutorial, "console")).splitlines()
    assert all(line.startswith("$ ") for line in commands)
    for command in ("python -m tutorial", *(line.removeprefix("$ ") for line in commands)):
        done = shell.run(command, tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)
        if command == "python -m tutorial":
            assert all(output in done.stdout for output in blocks(tutorial, "text"))


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_is_short_says_what_it_is_for_and_what_comes_next(name: str) -> None:
    lines = TUTORIALS[name].splitlines()
    assert len(lines) <= LINES
    assert lines[0].startswith("# ") and lines[2][0].isupper()
    assert "## Next" in lines


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_it_shows(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    document = json.loads(path.read_text())
    (tmp_path / "notebook.py").write_text(notebooks.program(document))
    done = shell.run("python -m notebook", tmp_path)
    assert done.returncode == 0, done.stderr
    stored = [notebooks.shown(cell) for cell in notebooks.code(document)]
    assert len(stored) > 4
    assert notebooks.printed(done.stdout) == stored, (
        "python tools/notebooks.py docs/notebooks/*.ipynb"
    )


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_one_that_jupyter_reads(path: Path) -> None:
    document = json.loads(path.read_text())
    assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
    assert document["metadata"]["kernelspec"]["name"] == "python3"
    identities = [cell["id"] for cell in document["cells"]]
    assert len(set(identities)) == len(identities)
    assert "".join(document["cells"][0]["source"]).startswith("# ")
    assert all({"execution_count", "outputs"} <= cell.keys() for cell in notebooks.code(document))
