"""docs/examples.md: every example is told, by commands that it takes."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "examples.md").read_text()
COMMANDS = re.findall(
    r"^\$ (?:python|torchrun --nproc-per-node 2) examples/(\w+)\.py(.*)$", PAGE, re.MULTILINE
)
PROGRAMS = {
    path.stem for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text()
}


def test_every_program_is_told() -> None:
    assert {name for name, _ in COMMANDS} == PROGRAMS and len(PROGRAMS) > 1


@pytest.mark.parametrize(("name", "arguments"), COMMANDS, ids=range(len(COMMANDS)))
def test_every_command_is_one_that_its_program_takes(name: str, arguments: str) -> None:
    main: click.Command = import_module(name).main
    assert main.make_context(name, shlex.split(arguments.replace("PATH", "."))).params.keys() >= {
        "tiny",
        "as_json",
    }
