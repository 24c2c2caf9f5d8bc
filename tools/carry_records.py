"""Carries records of GPU tests over to code that does the same: `carry_records.py BASE`.

A record that holds for the commit BASE is carried over to the working tree where host code is the
same but for comments, docstrings and names of local variables, launches are equal, and kernels
whose text differs do so by names alone and are compiled to the same machine code. Machine code
alone says nothing of kernels that are not compiled here: a condition on a size may hold in these
only. Of every other place it says what differs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

import gpu_records  # noqa: E402
from golden_diff import files_of  # noqa: E402
from same_kernels import entry_differences  # noqa: E402

# Compiles specs of a checkout, by their digests: what each entry of each is.
Compile = Callable[[Path, list[str]], Mapping[str, Mapping[str, Any]]]


def compiler(jobs: int | None = None) -> Compile:
    """Return what compiles the kernels of checkouts, each once, with this machine's compiler."""
    compiled: dict[tuple[Path, str], Mapping[str, Any]] = {}

    def compile_all(root: Path, digests: list[str]) -> Mapping[str, Mapping[str, Any]]:
        if missing := [digest for digest in digests if (root, digest) not in compiled]:
            arguments = ["--compile", *(["--jobs", str(jobs)] if jobs else [])]
            printed = gpu_records.run_emitted(root, *arguments, standard_input=json.dumps(missing))
            for digest, entries in json.loads(printed).items():
                compiled[root, digest] = entries
        known = [digest for digest in digests if (root, digest) in compiled]
        return {digest: compiled[root, digest] for digest in known}

    return compile_all


def differences(subject: str | None, base: Path, root: Path, compile_all: Compile) -> Iterator[str]:
    """Yield a line for each way in which what the tests of a place see differs between checkouts.

    Kernels are compiled last, and only where nothing else differs.
    """
    reasons = [*_host(gpu_records.host(subject, base), gpu_records.host(subject, root))]
    if subject is not None:
        old, new = gpu_records.emitted(base), gpu_records.emitted(root)
        if old["options"] != new["options"]:
            reasons.append(f"options of the compiler: {old['options']}, now {new['options']}")
        every = subject == gpu_records.INTEGRATIONS
        names = sorted(old["families"].keys() | new["families"].keys()) if every else [subject]
        nothing: dict[str, Any] = {"kernels": {}, "unseen": []}
        for name in names:
            before, after = (one["families"].get(name, nothing) for one in (old, new))
            reasons += _launches(before["kernels"], after["kernels"])
            lines = {*before["unseen"]} ^ {*after["unseen"]}
            reasons += [f"{line}: differs, and no kernel that is compared has it" for line in lines]
            if not lines and before["unseen"] != after["unseen"]:
                reasons.append(f"{name}: lines that no kernel has are in another order")
            if not reasons:
                reasons += _code(before["kernels"], after["kernels"], base, root, compile_all)
    yield from reasons


def _host(old: Mapping[str, str], new: Mapping[str, str]) -> Iterator[str]:
    for module in sorted(old.keys() | new.keys()):
        if module not in old or module not in new:
            yield f"{module}: only in the {'old' if module in old else 'new'} code"
        elif old[module] != new[module]:
            yield f"{module}: other code"


def _launches(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    for digest in sorted(old.keys() | new.keys()):
        if digest not in old or digest not in new:
            one = old.get(digest) or new[digest]
            yield f"{one['name']}: only in the {'old' if digest in old else 'new'} code"
        elif old[digest]["launches"] != new[digest]["launches"]:
            yield f"{new[digest]['name']}: launches differ"


def _code(
    old: Mapping[str, Any], new: Mapping[str, Any], base: Path, root: Path, compile_all: Compile
) -> Iterator[str]:
    """Yield a line for each kernel that differs by more than names, or else in machine code."""
    digests = sorted(digest for digest in old if old[digest]["text"] != new[digest]["text"])
    if more := [digest for digest in digests if old[digest]["form"] != new[digest]["form"]]:
        yield from (f"{new[digest]['name']}: differs by more than names" for digest in more)
        return
    if not digests:
        return
    before, after = compile_all(base, digests), compile_all(root, digests)
    for digest in digests:
        name = new[digest]["name"]
        if not before.get(digest) or not after.get(digest):
            yield f"{name}: was not compiled in both"
            continue
        for difference in islice(entry_differences(before[digest], after[digest]), 1):
            yield f"{name}: {difference}"


def carried(place: str, base: Path, root: Path, compile_all: Compile) -> list[str]:
    """Give the record of a place the digest of `root` if it may have it; else return why not."""
    subject = gpu_records.places(root)[place]
    path = root / "tests" / place / "record.json"
    record = json.loads(path.read_text())
    digest = gpu_records.digest(subject, root)
    if record["digest"] == digest:
        return []
    if record["digest"] != gpu_records.digest(subject, base):
        return ["the record is neither of this code nor of BASE"]
    reasons = [*differences(subject, base, root, compile_all)]
    if not reasons:
        path.write_text(json.dumps({**record, "digest": digest}, indent=2) + "\n")
    return reasons


@click.command()
@click.argument("base")
@click.option("--jobs", type=int, help="Processes that compile (default: one a CPU).")
def main(base: str, jobs: int | None) -> None:
    """Carry the records that hold for the commit BASE over to the working tree.

    The exit status is 1 where one could not be carried over: the tests of its place have to run.
    """
    failed = False
    compile_all = compiler(jobs)
    with files_of(base) as folder:
        for place in gpu_records.places(ROOT):
            before = (ROOT / "tests" / place / "record.json").read_text()
            reasons = carried(place, folder, ROOT, compile_all)
            same = before == (ROOT / "tests" / place / "record.json").read_text()
            outcome = "is not carried over" if reasons else "holds" if same else "is carried over"
            click.echo("\n  ".join([f"tests/{place}/record.json {outcome}", *reasons]))
            failed |= bool(reasons)
    sys.exit(failed)


if __name__ == "__main__":
    main()
