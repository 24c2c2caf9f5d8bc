"""`warploom schema`: the JSON schema of configurations, which editors check a YAML file with."""

from __future__ import annotations

from importlib.resources import files

import click

from warploom.cli.output import Output, reporting


@click.command("schema")
@click.option("--check", is_flag=True, help="Exit with 1 if configs/schema.json is out of date.")
@reporting
def command(output: Output, check: bool) -> None:
    """Print the JSON schema of configurations, or compare configs/schema.json with it."""
    from warploom.generator.config import schema

    if not check:
        output.text("schema", schema())
        return
    file = files("warploom.configs") / "schema.json"
    current = file.is_file() and file.read_text() == schema()
    output.value("up to date", current)
    if not current:
        output.line("`warploom schema > configs/schema.json` renews it")
    output.exit_code = 0 if current else 1
