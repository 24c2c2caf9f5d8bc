"""Every command's --help says in a sentence what it is for, and has examples that can be typed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from warploom.cli import main


def commands(group: click.Group, *path: str) -> Iterator[tuple[str, click.Command]]:
    """All commands by the words that name them, groups of commands too."""
    yield " ".join(("warploom", *path)), group
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command
        if isinstance(command, click.Group):
            yield from commands(command, *path, name)
        else:
            yield " ".join(("warploom", *path, name)), command


COMMANDS = dict(commands(main))


def examples(command: click.Command) -> list[str]:
    block = (command.help or "").partition("Examples:\n")[2].partition("\n\n")[0]
    return [line.strip() for line in block.splitlines() if line.strip()]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_begins_with_a_sentence_on_what_the_command_is_for(name: str) -> None:
    first = (COMMANDS[name].help or "").partition("\n")[0]
    assert re.fullmatch(r"[A-Z].*\.", first) and 4 <= len(first.split()) <= 20


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_printed_line_by_line_and_their_options_exist(name: str) -> None:
    lines = examples(COMMANDS[name])
    assert lines
    printed = CliRunner().invoke(main, [*name.split()[1:], "--help"]).stdout
    assert [line for line in lines if f"\n    {line}\n" not in printed] == []
    for line in lines:
        words = shlex.split(line.partition(" > ")[0])
        owner = max((one for one in COMMANDS if f"{line} ".startswith(f"{one} ")), key=len)
        assert owner.startswith(name), line
        command = COMMANDS[owner]
        # It refuses unknown options, and options without a value; it looks at no value.
        command.make_parser(click.Context(command)).parse_args(words[len(owner.split()) :])
