"""The `warploom` command: a click group whose commands live one per file and load when named.

What an exit code means is in EXIT_CODES. What a command prints, and how an error becomes an exit
code, is decided in `output.py`.
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any, NoReturn, cast

import click

from warploom import variables
from warploom.suggestions import suggestion

COMMANDS = (
    "emit",
    "compile",
    "list",
    "show",
    "report",
    "explain",
    "tune",
    "records",
    "bench",
    "cache",
    "schema",
    "doctor",
)
EXIT_CODES = {
    0: "good",
    1: "input: arguments, files, the machine, or a check that found something",
    2: "compilation: a kernel did not compile, or the toolchain is not usable",
    3: "a wrong result",
    4: "`bench`: a baseline, or Warploom itself, could not be measured",
    130: "stopped by Ctrl-C (SIGINT)",
    141: "nobody reads the output any more (SIGPIPE)",
    143: "stopped by SIGTERM",
}
_HELP = ["-h", "--help"]


class SuggestingGroup(click.Group):
    """Commands, the nearest of which is suggested for a name that is none of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that the arguments begin with."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = suggestion(args[0], self.list_commands(ctx))
            if not near:
                raise
            raise click.UsageError(f"no such command {args[0]!r}: {near}", ctx) from error


class CommandGroup(SuggestingGroup):
    """Commands by module name, imported on first use; wrong usage exits with 1, not click's 2."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands in the order of a kernel's life."""
        return [*COMMANDS]  # `list` is one of them, once it was imported

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the module of a command; None for a name that is none of them."""
        if cmd_name not in COMMANDS:
            return None
        return cast("click.Command", import_module(f"{__name__}.{cmd_name}").command)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the environment variables and the exit codes."""
        from warploom.variables import VARIABLES

        with formatter.section("Environment variables"):
            formatter.write_dl([(name, one.told) for name, one in VARIABLES.items()])
        with formatter.section("Exit codes"):
            formatter.write_dl([(str(code), meaning) for code, meaning in EXIT_CODES.items()])

    def main(self, *arguments: Any, **options: Any) -> NoReturn:
        """Run as click does and end the process, with 1 after any usage error."""
        options["standalone_mode"] = False
        try:
            with _terminable():
                code = super().main(*arguments, **options)
        except click.ClickException as error:
            _refused(error, options.get("args") or [*arguments, sys.argv[1:]][0])
            code = 1
        except click.Abort as error:  # a signal outside of a command's own work
            from warploom.cli.output import ended_by

            click.echo("Stopped.", err=True)
            code = ended_by(error.__cause__)
        except OSError as error:
            code = _failed(error)
        sys.exit(code)


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM end a command as Ctrl-C does: what is open is closed, what is done is kept."""
    from warploom.cli.output import Terminated

    def terminate(_number: int, _frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _refused(error: click.ClickException, written: Sequence[object]) -> None:
    """Say what is wrong with the arguments; to a program as all other errors."""
    context = getattr(error, "ctx", None)
    flags = [option.name for option in context.command.params] if context else []
    if "--json" not in written or "as_json" not in flags:  # `bench --json` is a file
        error.show()
        return
    fields = {"value": error.format_message(), "rule": "", "fix": ""}
    click.echo(json.dumps({"type": type(error).__name__, **fields}), err=True)


def _failed(error: OSError) -> int:
    """Say which file could not be read or written; without a name, it is standard output."""
    logging.getLogger(__name__).debug("the error was met here", exc_info=error)
    from warploom.generator.json_file import reason

    with suppress(OSError):
        place = error.filename or "standard output"
        click.echo(f"Error: {place}: {reason(error)}", err=True)
    return 1


@click.group(cls=CommandGroup, context_settings={"help_option_names": _HELP})
@click.version_option(package_name="warploom")
def main() -> None:
    """Generate GPU kernels from YAML, compile, tune and measure them, and say which one calls run.

    \b
    Examples:
      warploom doctor
      warploom explain gemm --shapes 4096x6144x4096 --gpu h200
      warploom compile linear.yaml
    """
    variables.warn()
