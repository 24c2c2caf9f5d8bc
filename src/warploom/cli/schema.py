"""`warploom schema`: what a configuration may hold, as JSON for editors, as Markdown to read."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

import click

from warploom.atomic_file import replace_file
from warploom.cli.output import Output, reporting
from warploom.errors import ConfigurationError


@click.command("schema")
@click.option("--check", is_flag=True, help="Exit with 1 if configs/schema.json is out of date.")
@click.option("--markdown", is_flag=True, help="Print tables of every field instead.")
@click.option(
    "--write",
    "path",
    metavar="FILE",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Renew the tables of each family whose markers FILE has.",
)
@reporting
def command(output: Output, check: bool, markdown: bool, path: Path | None) -> None:
    """Print the JSON schema of configurations.

    An editor that knows the schema completes fields and marks mistakes. The same is printed as
    tables to read, or compared with configs/schema.json.

    \b
    Examples:
      warploom schema > schema.json
      warploom schema --markdown
      warploom schema --check
    """
    from warploom.generator.config import schema
    from warploom.generator.config_reference import reference

    if path:
        _write(path)
        return
    if markdown:
        output.text("reference", reference())
        return
    if not check:
        if output.as_json:
            output.value("schema", json.loads(schema()))
        else:
            output.text("schema", schema())
        return
    file = files("warploom.configs") / "schema.json"
    current = file.is_file() and file.read_text() == schema()
    output.value("up to date", current)
    if not current:
        output.line("`warploom schema > configs/schema.json` renews it")
    output.exit_code = 0 if current else 1


def _write(path: Path) -> None:
    from warploom.generator.config_reference import renewed

    try:
        replace_file(path, renewed(path.read_text()))
    except ValueError as error:
        raise ConfigurationError(
            f"{path}", rule=str(error), fix="add the two lines where the tables belong"
        ) from error
