"""`warploom list FILE`: the kernels of a configuration, or the schedules rejected and why."""

from __future__ import annotations

from pathlib import Path

import click

from warploom.cli.arguments import FILE
from warploom.cli.output import Output, reporting


@click.command("list")
@click.argument("path", metavar="FILE", type=FILE)
@click.option("--rejected", is_flag=True, help="Show the rejected schedules, with the reasons.")
@reporting
def command(output: Output, path: Path, rejected: bool) -> None:
    """List the kernels of a configuration, in its order.

    \b
    Examples:
      warploom list linear.yaml
      warploom list linear.yaml --rejected
    """
    from warploom.generator import names
    from warploom.generator.space import expand_file

    expansion = expand_file(path)
    if rejected:
        rows = [
            [names.full(point.operation), names.short(point.schedule), reason]
            for point in expansion.rejected
            for reason in point.reasons
        ]
        output.table("rejections", ["operation", "schedule", "reason"], rows)
    else:
        output.table("kernels", ["name"], [[spec.name] for spec in expansion.specs])
    output.total("legal", len(expansion.specs))
    output.total("rejected", len(expansion.rejected))
