"""What arguments of several commands are: paths, and configurations with their completion."""

from __future__ import annotations

import os
from collections.abc import Callable
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


def not_empty(rule: str) -> Callable[[object, object, str | None], str | None]:
    """Make a callback of an option that refuses an empty text, as of a shell's unset variable."""

    def checked(_context: object, _option: object, value: str | None) -> str | None:
        if value is not None and not value.strip():
            raise click.BadParameter(f"{value!r}: {rule}")
        return value

    return checked


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
GPU_KIND = not_empty("must be a kind of GPU, such as 'NVIDIA H200'")
ANY_FILE = GivenPath(dir_okay=False)  # whatever it holds, there or not yet
