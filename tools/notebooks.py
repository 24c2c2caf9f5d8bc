"""Run the notebooks of docs/notebooks, and keep what their cells print in them.

    python tools/notebooks.py docs/notebooks/*.ipynb

A cell shows what it prints, and nothing else, so that a plain Python process can run a notebook.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

ROOT = Path(__file__).parents[1]
MARK = "\x1e"  # what separates the cells in what the program prints


def code(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the cells of code of a notebook."""
    return [cell for cell in document["cells"] if cell["cell_type"] == "code"]


def program(document: dict[str, Any]) -> str:
    """Return the cells of a notebook as one program, which prints a mark before each."""
    return "\n".join(
        f"print({MARK!r}, flush=True)\n{''.join(cell['source'])}" for cell in code(document)
    )


def printed(stdout: str) -> list[str]:
    """Return what each cell printed."""
    return stdout.split(f"{MARK}\n")[1:]


def shown(cell: dict[str, Any]) -> str:
    """Return what a notebook has as the output of a cell."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def with_outputs(document: dict[str, Any], texts: Iterable[str]) -> str:
    """Return a notebook as the text of its file, with what its cells printed."""
    for number, (cell, text) in enumerate(zip(code(document), texts, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream"}
        cell["execution_count"] = number
        cell["outputs"] = [stream | {"text": text.splitlines(keepends=True)}] if text else []
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(exists=True, path_type=Path))
def main(paths: tuple[Path, ...]) -> None:
    """Run notebooks and renew their outputs."""
    for path in paths:
        document = json.loads(path.read_text())
        with TemporaryDirectory() as folder:
            file = Path(folder, "notebook.py")
            file.write_text(program(document))
            done = subprocess.run(  # noqa: S603
                [sys.executable, file],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""},
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
        path.write_text(with_outputs(document, printed(done.stdout)))


if __name__ == "__main__":
    main()
