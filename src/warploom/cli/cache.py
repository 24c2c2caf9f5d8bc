"""`warploom cache`: look into the kernel store, explain a miss, move kernels, collect garbage."""

from __future__ import annotations

from pathlib import Path

import click

from warploom.cli import SuggestingGroup
from warploom.cli.output import Output, reporting
from warploom.cli.units import Bytes, parse_bytes
from warploom.errors import StoreError
from warploom.generator.gpus import DEFAULT
from warploom.generator.store import Store

_SECONDS_PER_DAY = 86_400.0


@click.group("cache", cls=SuggestingGroup)
def command() -> None:
    """Look into the kernel store, move kernels, collect garbage."""


@command.command()
@reporting
def stats(output: Output) -> None:
    """Show how many kernels and bytes the store's directories hold."""
    held = Store.default().stats()
    output.table(
        "directories",
        ["path", "kernels", "objects", "bytes", "quarantined"],
        [
            [entry.path, entry.kernels, entry.objects, Bytes(entry.bytes), entry.quarantined]
            for entry in held.directories
        ],
    )


@command.command()
@click.argument("key", required=False)
@click.option("--name", help="The kernel's name.")
@click.option("--source-digest", help="SHA-256 of its source.")
@click.option("--arch", help=f"Its architecture, such as {DEFAULT.arch}.")
@click.option("--toolchain", help="The toolchain id it was compiled with.")
@click.option("--option", "options", multiple=True, help="Each compiler option, in order.")
@reporting
def explain(
    output: Output,
    key: str | None,
    name: str | None,
    source_digest: str | None,
    arch: str | None,
    toolchain: str | None,
    options: tuple[str, ...],
) -> None:
    """Say whether a kernel is stored, by KEY or by fields, and how the nearest ones differ.

    Nearest are kernels of the same name or source.
    """
    if not any((key, name, source_digest, arch, toolchain, options)):
        raise StoreError(
            "nothing to look for",
            rule="a kernel is looked up by its key or by its fields",
            fix="give a KEY, or fields such as --name and --toolchain",
        )
    explanation = Store.default().explain(
        key,
        name=name,
        source_digest=source_digest,
        arch=arch,
        toolchain=toolchain,
        options=options or None,
    )
    output.value("present", explanation.present)
    if explanation.present:
        output.value("key", explanation.nearest[0].key)
        output.value("place", explanation.nearest[0].place)
        return
    output.table(
        "nearest",
        ["key", "place", "field", "wanted", "stored"],
        [
            [neighbour.key, neighbour.place, field, wanted, stored]
            for neighbour in explanation.nearest
            for field, (wanted, stored) in neighbour.differences.items()
        ],
    )


@command.command()
@click.argument("path", type=click.Path(path_type=Path))
@reporting
def export(output: Output, path: Path) -> None:
    """Write every kernel of the store to one tar at PATH."""
    from warploom.generator.store_archive import export as write

    output.value("kernels", write(Store.default(), path))


@command.command("import")
@click.argument("path", type=click.Path(path_type=Path))
@reporting
def import_(output: Output, path: Path) -> None:
    """Verify that the tar at PATH is whole, and store the kernels in it that are new.

    Importing is trusting: calls will run these kernels, and anyone can make such a tar. It must
    come from someone whose programs you would run.
    """
    from warploom.generator.store_archive import import_ as read

    output.value("kernels", read(Store.default(), path))


@command.command()
@click.option(
    "--max-bytes",
    type=parse_bytes,
    help="Keep at most so much, such as 500MB or 2GiB.",
    metavar="BYTES",
)
@click.option(
    "--older-than",
    type=click.FloatRange(min=0),
    help="Drop what is unused for DAYS.",
    metavar="DAYS",
)
@reporting
def gc(output: Output, max_bytes: int | None, older_than: float | None) -> None:
    """Remove leftovers of crashes and, if asked, the kernels longest unused."""
    from warploom.generator.store_collection import collect

    seconds = None if older_than is None else older_than * _SECONDS_PER_DAY
    collected = collect(Store.default(), max_bytes=max_bytes, older_than=seconds)
    output.value("kernels", collected.kernels)
    output.value("leftovers", collected.leftovers)
    output.value("bytes", Bytes(collected.bytes))
