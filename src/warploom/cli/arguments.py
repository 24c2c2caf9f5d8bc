"""What arguments of several commands are: paths, and configurations with their completion."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

STANDARD_INPUT = Path("/dev/stdin")


class GivenPath(click.Path):
    """A path, as a Path. An empty one, as of a shell's unset variable, is no folder's."""

    empty = "must be a path"

    def __init__(self, **options: Any) -> None:
        super().__init__(path_type=Path, **options)

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Return the path; a usage error for an empty one."""
        if not str(value):
            self.fail(f"'': {self.empty}", param)
        return super().convert(value, param, ctx)


class ConfigurationFile(GivenPath):
    """The path of a configuration, `-` for standard input, or one of `names`, as a Path."""

    empty = "must be the path of a configuration, or - for standard input"

    def __init__(self, names: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.names = names

    def convert(
        self,
        value: str | os.PathLike[str],
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> str | bytes | os.PathLike[str]:
        """Return the path; a usage error for an empty one."""
        return STANDARD_INPUT if str(value) == "-" else super().convert(value, param, ctx)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Name what may stand here; the shell adds the files."""
        named = [CompletionItem(name) for name in self.names if name.startswith(incomplete)]
        return [*named, *super().shell_complete(ctx, param, incomplete)]


FILE = ConfigurationFile()
ANY_FILE = GivenPath(dir_okay=False)  # whatever it holds, there or not yet
