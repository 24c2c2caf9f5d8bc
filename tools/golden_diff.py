"""How the text of the sample kernels differs from that of another commit: `golden_diff.py BASE`.

Kernels are told apart by the digests of their specs, since names may change, and names are left out
of what is compared. Where many kernels share a hunk it is printed once, the most frequent first.
"""

# ruff: noqa: S603, S607 (git, and this program with another version's modules)

from __future__ import annotations

import difflib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click
from same_kernels import defined, samples

ROOT = Path(__file__).parents[1]
CONTEXT = 2  # lines around a change
NAMED = 3  # kernels that are named beside a hunk

Texts = Mapping[str, tuple[str, str]]  # the name and the text of a kernel, by its spec's digest


def rendered() -> Texts:
    """Return every sample kernel of the version on PYTHONPATH."""
    render = defined("render", "render")
    return {spec.digest: (spec.name, render(spec)) for spec in samples()}


@contextmanager
def files_of(commit: str) -> Iterator[Path]:
    """Put the files of a commit into a folder that is there until the context ends."""
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        raise click.ClickException(f"{commit}: must be a commit of this repository")
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def rendered_at(commit: str) -> Texts:
    """Return every sample kernel of a commit."""
    with files_of(commit) as folder:
        path = os.pathsep.join((f"{folder}/src", f"{ROOT}/tools"))
        program = "import json, golden_diff; print(json.dumps(golden_diff.rendered()))"
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            env={**os.environ, "PYTHONPATH": path},
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise click.ClickException(f"{commit}: its kernels cannot be rendered: {done.stderr}")
    return {digest: (name, text) for digest, (name, text) in json.loads(done.stdout).items()}


def hunks(name: str, old: str, new: str) -> Iterator[str]:
    """Yield what differs between two texts of a kernel, without line numbers and its own name."""
    before, after = (re.sub(rf"{name}\w*", "KERNEL", text).splitlines() for text in (old, new))
    hunk: list[str] = []
    for line in [*difflib.unified_diff(before, after, n=CONTEXT, lineterm="")][2:]:
        if line.startswith("@@"):
            if hunk:
                yield "\n".join(hunk)
            hunk = []
        else:
            hunk.append(line)
    if hunk:
        yield "\n".join(hunk)


def shared(old: Texts, new: Texts) -> list[tuple[str, list[str]]]:
    """Return each hunk with the names of the kernels that have it, the most frequent first.

    Hunks that differ in numbers alone are one, and shown as the first of them is.
    """
    sharing: dict[str, tuple[str, list[str]]] = {}
    for digest in old.keys() & new.keys():
        before, (name, after) = old[digest], new[digest]
        for hunk in hunks(name, before[1].replace(before[0], name), after):
            sharing.setdefault(re.sub(r"\d+", "0", hunk), (hunk, []))[1].append(name)
    return sorted(sharing.values(), key=lambda item: (-len(item[1]), item[0]))


@click.command()
@click.argument("base")
@click.option("--stat", is_flag=True, help="Only the names of kernels whose text differs.")
def main(base: str, stat: bool) -> None:
    """Print how the text of the sample kernels differs from that of the commit BASE."""
    old, new = rendered_at(base), rendered()
    for title, names in (
        ("only there", [old[digest][0] for digest in old.keys() - new.keys()]),
        ("new", [new[digest][0] for digest in new.keys() - old.keys()]),
    ):
        for name in sorted(names):
            click.echo(f"{name}: {title}")
    changes = shared(old, new)
    if stat:
        for name in sorted({name for _, names in changes for name in names}):
            click.echo(name)
        return
    for hunk, names in changes:
        others = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
        click.echo(f"@@ in {len(names)}: {', '.join(sorted(names)[:NAMED])}{others}\n{hunk}\n")


if __name__ == "__main__":
    main()
