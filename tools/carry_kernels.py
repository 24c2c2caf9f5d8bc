"""Compiles kernels on a machine without a GPU, for one with a GPU whose time is short.

`carry_kernels.py pack FILE [PATHS] [--config CONFIG]` compiles what GPU tests under PATHS build and
what configurations list (default: all tests) and writes it to FILE; on the other machine,
`carry_kernels.py unpack FILE STORE` puts it into the kernel cache STORE. `run_gpu_tests.py` reads
build/gpu_tests/store; everything else reads STORE where WARPLOOM_CACHE_DIR names it. Some kernels
of FILE, chosen at random, are compiled again there: if one differs nothing is taken, since the
tests would run what this machine's compiler does not make.
"""

from __future__ import annotations

import inspect
import json
import lzma
import random
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import click
import pytest

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "tools"), str(ROOT / "tests" / "gpu")]

import gpu_records  # noqa: E402

from warploom.atomic_file import beside, replace_file  # noqa: E402
from warploom.errors import WarploomError  # noqa: E402
from warploom.generator import json_file  # noqa: E402
from warploom.generator.artifact import Artifact  # noqa: E402
from warploom.generator.build import build_many  # noqa: E402
from warploom.generator.space import expand_file  # noqa: E402
from warploom.generator.specification import KernelSpec, parse_name  # noqa: E402
from warploom.generator.store import Store  # noqa: E402
from warploom.generator.store_record import Record  # noqa: E402
from warploom.generator.toolchain import find  # noqa: E402

AT_ONCE = 40  # kernels between two looks at the clock
DRAWN = 8  # kernels that are compiled again
# Kernels of a family are much alike, and lie side by side: 91 MB become 4.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 27, "nice_len": 273}]
MAGIC = b"\xfd7zXZ\0"  # with which files of lzma begin


class Collected:
    """A plugin of pytest: the kernels that fixtures of collected tests hand to `build`."""

    def __init__(self) -> None:
        self.fixtures = 0
        self.specs: list[KernelSpec] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Call every function of these tests' modules that has an argument `build`."""
        found: dict[KernelSpec, None] = {}

        def build(specs: Iterable[KernelSpec]) -> Mapping[str, Artifact]:
            found.update(dict.fromkeys(specs))
            return {}

        modules = {*session.config.pluginmanager.get_plugins()}  # a conftest.py is one
        for item in session.items:
            parent = item.getparent(pytest.Module)
            modules |= {parent.obj} if parent else set()
        functions = {
            function
            for module in modules
            if isinstance(module, ModuleType)
            for function in map(inspect.unwrap, vars(module).values())
            if inspect.isfunction(function) and "build" in inspect.signature(function).parameters
        }
        for function in functions:
            function(build)
        self.fixtures, self.specs = len(functions), list(found)


def collected(paths: Sequence[str]) -> Collected:
    """Return the kernels of the GPU tests under these paths of the repository; of all without."""
    plugin = Collected()
    chosen = list(paths) or [f"tests/{place}" for place in gpu_records.places()]
    arguments = ["--collect-only", "-qq", "--assert=plain", "-p", "no:cacheprovider", "-m", "gpu"]
    status = pytest.main([*arguments, "--rootdir", str(ROOT), *chosen], plugins=[plugin])
    if status != pytest.ExitCode.OK:
        raise click.ClickException(f"the tests were not collected: pytest ended with {status!s}.")
    return plugin


def write(kernels: Mapping[KernelSpec, Artifact], file: Path) -> None:
    """Write kernels to a file, those of like names side by side.

    Machine code is in hex, which compresses as bytes do; in base64 like instructions look unlike.
    """
    content = [
        {"record": Record.of(one).model_dump_json(), "cubin": one.cubin.hex()}
        for one in sorted(kernels.values(), key=lambda one: one.name)
    ]
    replace_file(file, lzma.compress(json.dumps(content).encode(), filters=FILTERS))


def read(file: Path) -> dict[KernelSpec, Artifact]:
    """Return the kernels of a file that `write` wrote. click.ClickException for any other file."""
    found = {}
    try:
        for one in json.loads(lzma.decompress(file.read_bytes())):
            record = Record.model_validate_json(one["record"])
            found[parse_name(record.name)] = record.artifact(bytes.fromhex(one["cubin"]))
    except (lzma.LZMAError, ValueError, KeyError, TypeError, WarploomError) as error:
        raise click.ClickException(
            f"{file} is no file of kernels of this version, or not all of one ({error}): pack it "
            "again, from this commit."
        ) from error
    return found


def require_place(file: Path) -> None:
    """Raise click.ClickException for a file that cannot be written, or holds something else: what
    is to be written there takes hours to compile.
    """
    held = b""
    if file.exists():
        with file.open("rb") as there:
            held = there.read(len(MAGIC))
    if held not in (b"", MAGIC):
        raise click.ClickException(
            f"{file} is there and has no kernels, and would be replaced: name another FILE first, "
            "and tests behind it."
        )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with beside(file):
            pass
    except OSError as error:
        raise click.ClickException(
            f"{file} cannot be written: {json_file.reason(error)}."
        ) from error


def put(artifacts: Iterable[Artifact], store: Store) -> None:
    """Put kernels into a store as if this machine's toolchain had compiled them.

    click.ClickException where a store takes none: it would be this process's memory that has them.
    """
    identity = find().identity
    for artifact in artifacts:
        own = replace(artifact, toolchain=identity)
        store.put(Record.of(own).key, own)
        if reason := store.kept_in_memory.get(own.name):
            raise click.ClickException(f"{own.name} is not stored: {reason}.")


def different(kernels: Mapping[KernelSpec, Artifact]) -> list[str]:
    """Return the names of those that this machine compiles to other bytes, of some drawn here.

    click.ClickException where it compiles them from another source, or not at all.
    """
    drawn = random.sample(list(kernels), min(DRAWN, len(kernels)))
    try:
        compiled = build_many(drawn, Store(None), policy="allow")
    except WarploomError as error:
        raise click.ClickException(f"this machine cannot compile: {error}") from error
    others = list[str]()
    for spec, made in zip(drawn, compiled, strict=True):
        if not isinstance(made, Artifact):
            raise click.ClickException(f"this machine does not compile {spec.name}: {made}")
        if made.source_digest != kernels[spec].source_digest:
            raise click.ClickException(
                f"{spec.name} has another source here than in the file, so that none of it is "
                "taken: pack it again, from this commit."
            )
        if made.cubin != kernels[spec].cubin:
            others.append(spec.name)
    return others


@click.group()
def main() -> None:
    """Compile kernels here, for a machine with a GPU."""


@main.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.argument("paths", nargs=-1)
@click.option(
    "--config",
    "configurations",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A configuration whose kernels are compiled as well; may be repeated.",
)
@click.option("--store", type=click.Path(path_type=Path), help="Where kernels are kept as well.")
@click.option("--jobs", type=int, help="Compilers at a time (default: one for each CPU).")
@click.option("--seconds", type=float, default=float("inf"), help="When to write what there is.")
def pack(
    file: Path,
    paths: tuple[str, ...],
    configurations: tuple[Path, ...],
    store: Path | None,
    jobs: int | None,
    seconds: float,
) -> None:
    """Compile the kernels of GPU tests under PATHS, and of configurations, and write them to FILE.

    Without PATHS and without --config these are the kernels of all GPU tests.
    """
    end = time.monotonic() + seconds
    require_place(file)
    specs = collected(paths).specs if paths or not configurations else []
    specs += [spec for one in configurations for spec in expand_file(one).specs]
    specs, kept = list(dict.fromkeys(specs)), Store(store)
    made: dict[KernelSpec, Artifact] = {}
    try:
        for begin in range(0, len(specs), AT_ONCE):
            if time.monotonic() > end:
                break
            some = specs[begin : begin + AT_ONCE]
            for spec, one in zip(some, build_many(some, kept, jobs), strict=True):
                if isinstance(one, Artifact):
                    made[spec] = one
                else:
                    click.echo(f"{spec.name} is not compiled: {one}")
            click.echo(f"{min(begin + AT_ONCE, len(specs))} of {len(specs)} kernels")
    except KeyboardInterrupt:
        click.echo("stopped")
    write(made, file)
    click.echo(f"{len(made)} kernels of {len(specs)} are in {file}, {file.stat().st_size} bytes")


@main.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("store", type=click.Path(file_okay=False, path_type=Path))
def unpack(file: Path, store: Path) -> None:
    """Put the kernels of FILE into STORE."""
    kernels = read(file)
    if names := different(kernels):
        raise click.ClickException(
            f"this machine compiles {', '.join(names)} to other bytes than the file has, so that "
            "none of it is taken: pack it with the versions that constraints.txt names."
        )
    put(kernels.values(), Store(store))
    click.echo(f"{len(kernels)} kernels are in {store}")


if __name__ == "__main__":
    main()
