"""`warploom emit FILE ...`: the source of every kernel of configurations, one .cu file each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from warploom.atomic_file import replace_file
from warploom.cli.arguments import FILE, GivenPath
from warploom.cli.output import Output, reporting
from warploom.errors import ConfigurationError


@click.command("emit")
@click.argument("paths", metavar="FILE...", nargs=-1, required=True, type=FILE)
@click.option(
    "--out",
    metavar="DIR",
    type=GivenPath(),
    default=Path("emitted"),
    show_default=True,
    help="The folder of the .cu files.",
)
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if DIR is out of date.")
@reporting
def command(output: Output, paths: Sequence[Path], out: Path, check: bool) -> None:
    """Write the source of every kernel of a FILE to DIR/NAME.cu.

    In place of a FILE may be a kernel, as `warploom show` takes it. With --check, name the files
    there that are stale, missing or extra instead.

    \b
    Examples:
      warploom emit linear.yaml --out kernels
      warploom emit linear.yaml --out kernels --check
    """
    from warploom.cli.kernels import listed
    from warploom.generator import json_file, names
    from warploom.generator.render import render

    specs = [spec for path in paths for spec in listed(path)]
    sources = {names.file(spec.name, "cu"): render(spec).encode() for spec in specs}
    files = [file for file in sorted(out.glob("*.cu")) if file.is_file()]
    present = {file.name: file.read_bytes() for file in files}
    if check:
        _compare(output, sources, present)
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in sources.items():
            if text != present.get(name):
                replace_file(out / name, text)
    except OSError as error:
        raise ConfigurationError(
            f"{out}: cannot be written", rule=json_file.reason(error), fix="give another --out"
        ) from error
    if others := present.keys() - sources.keys():
        output.note(
            f"{out} has .cu files of other kernels, {len(others)} of them: --check names them"
        )
    rows = [[name, len(text.splitlines())] for name, text in sources.items()]
    output.table("files", ["file", "lines"], rows)
    output.value("folder", out)


def _compare(output: Output, sources: dict[str, bytes], present: dict[str, bytes]) -> None:
    states = {
        "missing": sorted(sources.keys() - present.keys()),
        "extra": sorted(present.keys() - sources.keys()),
        "stale": [name for name in sources if present.get(name, sources[name]) != sources[name]],
    }
    rows = [[state, name] for state, names in states.items() for name in names]
    output.table("differences", ["state", "file"], rows)
    output.value("up to date", not rows)
    output.exit_code = 1 if rows else 0
