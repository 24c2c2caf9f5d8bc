"""What arguments of several commands are: the file of a configuration, with its completion."""

from __future__ import annotations

import os
from pathlib import Path

import click
from click.shell_completion import CompletionItem

STANDARD_INPUT = Path("/dev/stdin")


class ConfigurationFile(click.Path):
    """The path of a configuration, `-` for standard input, or one of `names`, as a Path."""

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        super().__init__(path_type=Path)
        self.names = names

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Return the path; a usage error for an empty one."""
        if not str(value):
            self.fail("'': must be the path of a configuration, or - for standard input", param)
        return STANDARD_INPUT if str(value) == "-" else super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Name what may stand here; the shell adds the files."""
        named = [CompletionItem(name) for name in self.names if name.startswith(incomplete)]
        return [*named, *super().shell_complete(ctx, param, incomplete)]


FILE = ConfigurationFile()
