"""`warploom cache`: look into the kernel store, explain a miss, move kernels, collect garbage."""

from __future__ import annotations

from pathlib import Path

import click

from warploom.cli import SuggestingGroup
from warploom.cli.arguments import GivenPath
from warploom.cli.output import Output, reporting
from warploom.cli.units import Bytes, parse_bytes
from warploom.errors import StoreError
from warploom.generator.gpus import DEFAULT
from warploom.generator.store import Store
from warploom.generator.store import source_digest as digest_of

_SECONDS_PER_DAY = 86_400.0


@click.group("cache", cls=SuggestingGroup)
def command() -> None:
    """Look into the kernel cache, copy kernels, delete old ones.

    \b
    Examples:
      warploom cache stats
      warploom cache export kernels.tar
      warploom cache import kernels.tar
    """


@command.command()
@reporting
def stats(output: Output) -> None:
    """Show the number and size of the kernels in the kernel cache.

    \b
    Examples:
      warploom cache stats
      warploom cache stats --json
    """
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
@click.argument("kernel", required=False)
@click.option("--name", help="The kernel's name, or what else `warploom show` takes.")
@click.option("--source-digest", help="SHA-256 of its source.")
@click.option("--arch", help=f"Its architecture, such as {DEFAULT.arch}.")
@click.option("--toolchain", help="The toolchain id it was compiled with.")
@click.option("--option", "options", multiple=True, help="Each compiler option, in order.")
@reporting
def explain(
    output: Output,
    kernel: str | None,
    name: str | None,
    source_digest: str | None,
    arch: str | None,
    toolchain: str | None,
    options: tuple[str, ...],
) -> None:
    """Say whether a KERNEL is in the kernel cache, and how the nearest entries differ.

    KERNEL is what `warploom show` takes: a name, a file of that name, a digest, or a key of the
    kernel cache; or give its fields as options. It counts as stored if the entry was compiled from
    the source that this version renders. Nearest are entries of the same name or source.

    \b
    Examples:
      warploom cache explain 4b296fde
      warploom cache explain --name 4b296fde
    """
    from warploom.cli.kernels import found
    from warploom.generator.render import render

    if not any((kernel, name, source_digest, arch, toolchain, options)):
        raise StoreError(
            "nothing to look for",
            rule="a kernel is looked up by its name, digest or key, or by its fields",
            fix="give a KERNEL, or fields such as --name and --toolchain",
        )
    key = None
    if kernel:
        one = found(kernel)
        key, name = one.key, one.name if name is None else found(name).name
        if one.spec:
            source_digest = source_digest or digest_of(render(one.spec))
            arch = arch or one.spec.arch
    elif name:
        name = found(name).name
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
@click.argument("path", type=GivenPath())
@reporting
def export(output: Output, path: Path) -> None:
    """Write every kernel of the kernel cache to one tar file at PATH.

    \b
    Examples:
      warploom cache export kernels.tar
    """
    from warploom.generator.store_archive import export as write

    output.value("kernels", write(Store.default(), path))


@command.command("import")
@click.argument("path", type=GivenPath())
@reporting
def import_(output: Output, path: Path) -> None:
    """Check that the tar file at PATH is complete, and add its new kernels to the cache.

    Importing is trusting: calls will run these kernels, and anyone can make such a tar. It must
    come from someone whose programs you would run.

    \b
    Examples:
      warploom cache import kernels.tar
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
    """Remove leftovers of crashes and, if asked, the kernels longest unused.

    \b
    Examples:
      warploom cache gc
      warploom cache gc --older-than 90 --max-bytes 2GB
    """
    from warploom.generator.store_collection import collect

    seconds = None if older_than is None else older_than * _SECONDS_PER_DAY
    collected = collect(Store.default(), max_bytes=max_bytes, older_than=seconds)
    output.value("kernels", collected.kernels)
    output.value("leftovers", collected.leftovers)
    output.value("bytes", Bytes(collected.bytes))
