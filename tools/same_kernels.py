"""Whether two versions of Warploom emit the same machine code: `collect` in each, then `compare`.

A collection has every kernel of the samples, the shipped records and the untuned tables, by the
digest of its spec: what its text hashes to, and what each of its entries compiles to. Names are
left out of all of it, since they may change. The version is the one on PYTHONPATH.
"""

# ruff: noqa: ANN401 (functions and specs of whichever version is there are values here)

from __future__ import annotations

import hashlib
import importlib
import json
import pkgutil
import re
import struct
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import click
import yaml

ARCH = "sm_90a"
FLUSH_SECONDS = 60.0
# Sections of a cubin with data, in memory and in constant banks but that of the parameters, and
# with what a launch is told of an entry.
DATA = re.compile(r"\.nv\.constant[1-9]|\.nv\.global|\.nv\.info\.|\.rodata|\.data|\.bss")
Collection = dict[str, Any]  # "toolchain", and "kernels": a mapping by digest


# ---- What a version of Warploom has, wherever its modules lie ------------------------------------


@cache
def _modules() -> tuple[Any, ...]:
    package = importlib.import_module("warploom.generator")
    names = [found.name for found in pkgutil.walk_packages(package.__path__, "warploom.generator.")]
    return tuple(map(importlib.import_module, names))


@cache
def defined(name: str, module: str = "") -> Any:
    """Return what the generator defines as `name`, in a module whose name ends in `module`."""
    for found in _modules():
        value = vars(found).get(name)
        whose = getattr(value, "__module__", found.__name__)
        if value is not None and whose == found.__name__ and whose.endswith(module):
            return value
    raise click.ClickException(f"{name}: the generator must define it")


def configs() -> Path:
    """Return the folder of shipped configurations."""
    (package,) = importlib.import_module("warploom").__path__
    return Path(package, "configs").resolve()


@cache
def families() -> dict[str, Any]:
    """Return every family by its name, which is that of its folder."""
    package = importlib.import_module("warploom.generator.families")
    folders = [found.name for found in pkgutil.iter_modules(package.__path__) if found.ispkg]
    return {name: package.family(name) for name in folders if not name.startswith("_")}


# ---- The kernels ---------------------------------------------------------------------------------


@cache
def samples() -> tuple[Any, ...]:
    """Every spec of the sample configurations."""
    paths = sorted(configs().rglob("smoke.yaml"))
    return tuple(spec for path in paths for spec in defined("expand_file")(path).specs)


@cache
def recorded() -> tuple[Any, ...]:
    """Every spec that a shipped record names."""
    paths = [path for path in sorted(configs().rglob("*.json")) if path.parent.name == "records"]
    return tuple(
        defined("KernelSpec")(ARCH, record.operation, timed.schedule)
        for path in paths
        for record in defined("read", "records_file")(path).records
        for timed in record.contenders
    )


def tabled(operations: Iterable[Any], each: int = 1) -> Iterator[Any]:
    """Every spec of the untuned tables that is legal for one of `operations`.

    Or those of every so many rows alone: whether a schedule is legal is what takes its time.
    """
    for operation, schedule in islice(rows(operations), 0, None, each):
        yield from _legal(families()[operation.family], operation, schedule)


def rows(operations: Iterable[Any]) -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Each of `operations` with every schedule of the untuned tables, legal or not."""
    for operation in operations:
        for row in _tables()[operation.family]:
            if _fits(row, operation):
                for schedule in chain.from_iterable(map(_each, row["schedules"])):
                    yield operation, schedule


@cache
def _tables() -> dict[str, list[dict[str, Any]]]:
    """The classes of each family's untuned table."""
    tables = {}
    for path in configs().rglob("*schedules.yaml"):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text())
        tables[_of(path)] = loader.get_single_data()["classes"]
    return tables


def _each(schedule: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schedules that a row stands for: with several `split_k`, one with each."""
    many = schedule.get("split_k")
    yield from ({**schedule, "split_k": n} for n in many) if isinstance(many, list) else (schedule,)


def _of(path: Path) -> str:
    """Return the family that a table is of: its folder's, or the one that its name begins."""
    if path.parent.name in families():
        return path.parent.name
    word = path.stem.removesuffix("_schedules")
    return next(name for name in families() if name in (word, f"{word}_forward"))


def _fits(row: Mapping[str, Any], operation: Any) -> bool:
    """Whether a class of a table is for the types, or the head dimension, that it names."""
    if "bits" in row and hasattr(operation, "a"):  # of decoding, the bits are those of its caches
        return bool(row["bits"] == defined("element")(operation.a).bits)
    return "dim" not in row or bool(row["dim"] == operation.dim)


def _legal(family: Any, operation: Any, schedule: Mapping[str, Any]) -> Iterator[Any]:
    known = {field for field in family.schedule.__dataclass_fields__ if field in schedule}
    fields = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in schedule.items()
        if name in known
    }
    stores = ("tma", "direct") if "store" in family.schedule.__dataclass_fields__ else (None,)
    for store in stores:
        given = fields | ({"store": store} if store else {})
        try:
            complete = family.complete(ARCH, operation, given)
            yield defined("KernelSpec")(ARCH, operation, complete)
        except importlib.import_module("warploom.errors").SpecificationError:
            continue


def every() -> list[Any]:
    """Every kernel, each once: the samples, then the others in an order that depends on digests."""
    first = dict.fromkeys(samples())
    operations = dict.fromkeys(spec.operation for spec in (*first, *recorded()))
    rest = {*recorded(), *tabled(operations)} - first.keys()
    return [*first, *sorted(rest, key=lambda spec: hashlib.sha256(spec.digest.encode()).digest())]


# ---- What a kernel is compiled to ----------------------------------------------------------------


def sections(cubin: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield name, size and content of every section of an ELF file of 64 bits, little-endian."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("a cubin must be an ELF file of 64 bits, little-endian")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, named_by = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, start + i * size) for i in range(count)]
    names = headers[named_by][4]
    for name, kind, _, _, offset, length in headers:
        end = cubin.index(b"\0", names + name)
        content = b"" if kind == 8 else cubin[offset : offset + length]  # 8: zeros, not in the file
        yield cubin[names + name : end].decode(), length, content


def compiled(artifact: Any) -> dict[str, dict[str, Any]]:
    """Return what each entry of an artifact is, by what its name has after the kernel's."""
    found = {name: (length, content) for name, length, content in sections(artifact.cubin)}
    data = hashlib.sha256()  # what code reads of its module, by whichever entry
    for name, (length, content) in sorted(found.items()):
        if DATA.match(name):
            data.update(f"{name.replace(artifact.name, '')} {length} ".encode() + content)
    return {
        entry.removeprefix(artifact.name): {
            "code": hashlib.sha256(found[f".text.{entry}"][1]).hexdigest(),
            "data": data.hexdigest(),
            "code_bytes": found[f".text.{entry}"][0],
            "shared_bytes": found.get(f".nv.shared.{entry}", (0, b""))[0],
            "parameter_bytes": found[f".nv.constant0.{entry}"][0],
            "registers": resources.registers,
            "local_bytes": resources.local_bytes,
            "spill_bytes": resources.spill_bytes,
        }
        for entry, resources in artifact.resources.items()
    }


def described(spec: Any) -> dict[str, Any]:
    """Return what a kernel is before it is compiled; its text without its name, as a hash."""
    text = defined("render")(spec).replace(spec.name, "KERNEL")
    return {
        "name": spec.name,
        "text": hashlib.sha256(text.encode()).hexdigest(),
        "entries": None,
    }


# ---- Commands ------------------------------------------------------------------------------------


@click.group()
def main() -> None:
    """Tell whether two versions emit the same kernels."""


@main.command()
@click.argument("path", metavar="OUT.json", type=click.Path(path_type=Path))
@click.option("--sample", type=int, help="Compile this many, the samples first; hash all texts.")
@click.option("--like", type=click.Path(exists=True, path_type=Path), help="Compile what it has.")
@click.option("--jobs", type=int, help="Processes that compile (default: one a CPU).")
def collect(path: Path, sample: int | None, like: Path | None, jobs: int | None) -> None:
    """Write what every kernel is to OUT.json, each minute what there is."""
    specs = every()
    kernels = {spec.digest: described(spec) for spec in specs}
    toolchain = defined("find", "toolchain")().identity
    chosen = specs[:sample]
    if like:
        there = json.loads(like.read_text())["kernels"]
        chosen = [spec for spec in chosen if there.get(spec.digest, {}).get("entries")]
    collection: Collection = {"toolchain": toolchain, "kernels": kernels}
    click.echo(f"{len(specs)} kernels, {len(chosen)} to compile")
    write(path, collection)
    compile_into(kernels, chosen, jobs, lambda: write(path, collection))
    write(path, collection)


def compile_into(
    kernels: dict[str, Any],
    specs: list[Any],
    jobs: int | None = None,
    write: Callable[[], None] = lambda: None,
) -> None:
    """Compile specs, and put what their entries are into `kernels`; call `write` each minute."""
    written = time.monotonic()
    with defined("Builder")(jobs=jobs) as builder:
        coming = [(spec, builder.submit(spec)) for spec in specs]
        for number, (spec, future) in enumerate(coming):
            artifact = future.result()
            if isinstance(artifact, Exception):
                raise click.ClickException(f"{spec.name}: {artifact}")
            kernels[spec.digest]["entries"] = compiled(artifact)
            if time.monotonic() - written > FLUSH_SECONDS:
                write()
                written = time.monotonic()
                click.echo(f"{number + 1} of {len(specs)} compiled", err=True)


def write(path: Path, collection: Collection) -> None:
    """Put a collection in the place of the file at `path`, whole."""
    beside = path.with_name(f"{path.name}.new")
    beside.write_text(json.dumps(collection, indent=1, sort_keys=True) + "\n")
    beside.replace(path)


def differences(old: Collection, new: Collection) -> list[str]:
    """Return a line for each way in which two collections differ, or could without its showing.

    A kernel that is not compiled in both is the same where its text is.
    """
    lines = []
    if old["toolchain"] != new["toolchain"]:
        lines.append(f"toolchain: {old['toolchain']}, now {new['toolchain']}")
    for digest in sorted(old["kernels"].keys() | new["kernels"].keys()):
        before, after = old["kernels"].get(digest), new["kernels"].get(digest)
        if before is None or after is None:
            where = "only in the old" if after is None else "only in the new"
            lines.append(f"{(before or after)['name']}: {where} collection")
        elif before["entries"] is not None and after["entries"] is not None:
            told = entry_differences(before["entries"], after["entries"])
            lines += [f"{after['name']}: {difference}" for difference in told]
        elif before["text"] != after["text"]:
            lines.append(f"{after['name']}: another text, and not compiled in both")
    return lines


def entry_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each way in which the entries of two versions of a kernel differ."""
    if old.keys() != new.keys():
        yield f"entries {sorted(old)}, now {sorted(new)}"
    for entry in sorted(old.keys() & new.keys()):
        for what in sorted(old[entry].keys() | new[entry].keys()):
            before, after = old[entry].get(what), new[entry].get(what)
            if before != after:
                yield f"{entry or 'kernel'}: {what} {before}, now {after}"


@main.command()
@click.argument("old", type=click.Path(exists=True, path_type=Path))
@click.argument("new", type=click.Path(exists=True, path_type=Path))
def compare(old: Path, new: Path) -> None:
    """Print what differs between two collections; exit status 1 where anything does."""
    before, after = (json.loads(path.read_text()) for path in (old, new))
    lines = differences(before, after)
    both = before["kernels"].keys() & after["kernels"].keys()
    pairs = [(before["kernels"][digest], after["kernels"][digest]) for digest in both]
    click.echo("\n".join(lines) or "the same")
    click.echo(
        f"{len(pairs)} kernels in both: {sum(a['text'] == b['text'] for a, b in pairs)} of the same"
        f" text, {sum(bool(a['entries'] and b['entries']) for a, b in pairs)} with entries"
    )
    sys.exit(bool(lines) or not pairs)


if __name__ == "__main__":
    main()
