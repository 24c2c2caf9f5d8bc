"""The `warploom` command: a click group whose commands live one per file and load when named.

Exit codes: 0 good, 1 the user's input (wrong usage included), 2 compilation, 3 wrong result.
What a command prints, and how an error becomes an exit code, is decided in `output.py`.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, NoReturn, cast

import click

COMMANDS = (
    "emit",
    "compile",
    "list",
    "show",
    "tune",
    "records",
    "bench",
    "cache",
    "schema",
    "doctor",
)


class CommandGroup(click.Group):
    """Commands by module name, imported on first use; wrong usage exits with 1, not click's 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order of a kernel's life."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command; None for a name that is none of them."""
        if cmd_name not in COMMANDS:
            return None
        return cast("click.Command", import_module(f"{__name__}.{cmd_name}").command)

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run as click does and end the process, with 1 after any usage error."""
        options["standalone_mode"] = False
        try:
            code = super().main(*arguments, **options)
        except click.ClickException as error:
            error.show()
            code = 1
        except click.Abort:
            click.echo("Aborted.", err=True)
            code = 1
        sys.exit(code)


@click.group(cls=CommandGroup)
@click.version_option(package_name="warploom")
def main() -> None:
    """Weave GPU kernels from YAML: generate, compile, store and inspect them."""
