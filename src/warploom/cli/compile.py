"""`warploom compile FILE`: every kernel of a configuration, compiled into the store.

With shapes, it is what calls of the configuration's operations will run on a GPU, which need not be
here: the same choice that calls make. A file of recorded calls has its own shapes. `--serving` is
the same for all that a model runs while it generates. No GPU or driver is needed. What is stored
already is not compiled again. The exit code is 2 when a kernel failed, else 1 when one could not be
stored; the others are compiled and stored all the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from warploom.cli.arguments import ConfigurationFile
from warploom.cli.engines import ray_option, tasks
from warploom.cli.output import Output, reporting
from warploom.cli.shapes import check_one, shape_options, shipped, told_spaces
from warploom.errors import CompilationError, ConfigurationError, StoreError
from warploom.generator.artifact import Artifact
from warploom.generator.configurations import cells as known_cells
from warploom.generator.configurations import serving as served
from warploom.generator.configurations import spaces
from warploom.generator.gpus import DEFAULT
from warploom.generator.specification import KernelSpec

COLUMNS = (
    "digest",
    "tile",
    "threads",
    "shared bytes",
    "registers",
    "clean",
    "compile seconds",
    "cubin bytes",
    "name",
)
CALLED = ("problem", "because", "kernel")
NAMED = 10  # of the kernels that could not be stored


@click.command("compile", epilog=told_spaces())
@click.argument("paths", metavar="[FILE]...", nargs=-1, type=ConfigurationFile(tuple(spaces())))
@click.option("--arch", help="Compile for this architecture instead of the configuration's.")
@click.option(
    "-j", "--jobs", type=click.IntRange(min=1), help="Processes that compile (default: one a CPU)."
)
@shape_options
@click.option(
    "--gpu",
    help="With shapes or recorded calls: the GPU that they will run on, such as "
    f"{DEFAULT.name!r} (default: here).",
)
@ray_option
@click.option(
    "--serving",
    is_flag=True,
    help="In place of FILE: what --model runs while it generates for so many sequences (--m).",
)
@reporting
def command(
    output: Output,
    paths: Sequence[Path],
    arch: str | None,
    jobs: int | None,
    shapes: Sequence[str],
    model: str | None,
    cells: bool,
    rows: Sequence[int],
    gpu: str | None,
    address: str | None,
    serving: bool,
) -> None:
    """Compile the kernels of configurations into the kernel cache.

    In place of FILE may be a kernel, as `warploom show` takes it.

    With --shapes, --model or --cells, they are those that calls of its operations, at these
    shapes, will run on --gpu: by tuned configs, the cost model or the default table, whatever
    schedules FILE has. FILE may then be the name of a search space, as for `warploom tune`.

    FILE may also be what `warploom.recording` wrote: then they are those that the recorded calls
    will run on --gpu.

    With --serving and --model, and no FILE, they are all that the model runs to generate: its
    GEMMs with one row for each sequence, and attention to caches of every kind. The
    model is one of benchmarks/cells.yaml, or the config.json of any Llama-like model, or the
    directory that has it.

    A kernel is clean if no register spills, it uses no local memory and no wgmma is serialised.

    \b
    Examples:
      warploom compile linear.yaml
      warploom compile gemm --shapes 4096x6144x4096 --gpu h200
      warploom compile calls.json --gpu h200
      warploom compile --serving --model Llama-3.1-8B/config.json --gpu h200
    """
    from warploom.generator import build
    from warploom.generator.store import Store

    if serving is bool(paths) or (serving and (model is None or shapes or cells)):
        further = paths or shapes or cells
        raise ConfigurationError(
            f"--serving {'with FILE, --shapes or --cells' if further else 'without --model'}"
            if serving
            else "no FILE",
            rule="must be a FILE, or --serving and the --model that it is of",
            fix="for instance `warploom compile --serving --model llama3-8b`",
        )
    shaped = bool(shapes or model is not None or cells)
    if serving:
        batches = rows or known_cells()["serving"]["batch"]
        specs = _called(output, served(), arch, gpu, (), model, batches, serving=True)
    elif any(recorded := [_recorded(path) for path in paths]):
        if not all(recorded) or shaped or rows:
            raise ConfigurationError(
                f"{paths[recorded.index(True)]} with shapes or other files",
                rule="recorded calls have their shapes, and are compiled by themselves",
                fix="give files of recorded calls, and --gpu, alone",
            )
        specs = _called(output, paths, arch, gpu, (), None, ())
    elif shaped:
        check_one("compile", shapes, model, rows, cells=cells)
        spaces_of = [space for path in paths for space in shipped(path)]
        specs = _called(output, spaces_of, arch, gpu, shapes, model, rows)
    else:
        specs = list(dict.fromkeys(one for path in paths for one in _listed(path, arch, gpu, rows)))
    store, before = Store.default(), replace(build.counters)
    done: list[object] = []

    def advance(spec: KernelSpec, result: object) -> None:
        done.append(result)
        watch(len(done), spec.name)

    try:
        with (
            _compilers(address, jobs) as (tasks_at_a_time, options),
            output.watching("compiling", len(specs)) as watch,
        ):
            results = build.build_many(specs, store, tasks_at_a_time, on_done=advance, **options)
    except KeyboardInterrupt as signalled:
        stored = sum(isinstance(one, Artifact) for one in done) - len(store.kept_in_memory)
        told = f"{stored} of {len(specs)} kernels are stored; the same command goes on"
        output.stopped(signalled, told)
        return
    built = zip(specs, results, strict=True)
    table = [row(spec, result) for spec, result in built if isinstance(result, Artifact)]
    output.table("kernels", COLUMNS, table)
    compiled = build.counters.compiles - before.compiles
    output.total("compiled", compiled)
    output.total("stored", compiled - len(store.kept_in_memory))
    output.total("stored before", build.counters.store_hits - before.store_hits)
    failures = [result for result in results if isinstance(result, CompilationError)]
    output.total("failed", len(failures))
    if store.kept_in_memory:
        output.error(_not_stored(store.kept_in_memory))
    for failure in failures:
        output.error(failure)


@contextmanager
def _compilers(
    address: str | None, jobs: int | None
) -> Iterator[tuple[int | None, dict[str, Any]]]:
    """How many kernels compile at a time, and by what: this host's processes, or a cluster's."""
    if address is None:
        yield jobs, {}
        return
    from warploom.tuning.fleet.cluster import cluster

    with cluster(address) as opened:
        yield tasks(opened, jobs), {"worker": opened.compiler}


def _listed(path: Path, arch: str | None, gpu: str | None, rows: Sequence[int]) -> list[KernelSpec]:
    """The kernels that a configuration names, or the one that is written in its place."""
    from warploom.cli.kernels import listed

    for option, value in (("--gpu", gpu), ("--m", rows)):
        if value:
            raise ConfigurationError(
                f"{option} without shapes",
                rule="a configuration names its kernels, whatever the GPU and the shape",
                fix="give --shapes, --model or --cells, too; of a model's config.json, give "
                "`--serving --model` its path",
            )
    if str(path) in spaces() and not path.exists():
        raise ConfigurationError(
            f"{path} without shapes",
            rule="must be a file; the package's own operations are compiled for shapes",
            fix="give --shapes, --model or --cells, too",
        )
    return [replace(spec, arch=arch) if arch else spec for spec in listed(path)]


def _called(
    output: Output,
    paths: Sequence[Path],
    arch: str | None,
    gpu: str | None,
    shapes: Sequence[str],
    model: str | None,
    rows: Sequence[int],
    *,
    serving: bool = False,
) -> list[KernelSpec]:
    """The kernels that calls will run, each once; which calls are told."""
    from warploom.runtime.targets import ahead_of_time
    from warploom.tuning.ahead import ahead, recorded

    if arch:
        raise ConfigurationError(
            f"--arch {arch} with shapes",
            rule="must be left out: the GPU that calls run on decides it",
            fix="name the GPU with --gpu",
        )
    target = ahead_of_time(gpu)
    chosen = [
        one
        for path in paths
        for one in (
            recorded(path, target)
            if _recorded(path)
            else ahead(path, target, shapes, model=model, rows=rows, serving=serving)
        )
    ]
    output.for_people = True  # two tables
    output.value("GPU", target.gpu)
    told = [[str(one), one.choice.reason, one.choice.spec.name] for one in chosen]
    output.table("problems", CALLED, told)
    return list(dict.fromkeys(one.choice.spec for one in chosen))


def _recorded(path: Path) -> bool:
    """Whether a file has recorded calls; only a .json is looked into."""
    if path.suffix != ".json":
        return False
    from warploom.tuning.calls import holds_calls

    return holds_calls(path)


def _not_stored(missing: Mapping[str, str]) -> StoreError:
    """The error of kernels that no disk took: what is missing, and why."""
    shown = list(missing)[:NAMED]
    more = f" and {len(missing) - len(shown)} more" if len(missing) > len(shown) else ""
    return StoreError(
        f"not stored: {', '.join(shown)}{more}",
        rule="; ".join(dict.fromkeys(missing.values())),
        fix="free space, or set WARPLOOM_CACHE_DIR to a directory that can be written, and repeat",
    )


def row(spec: KernelSpec, artifact: Artifact, *, stored: bool = False) -> list[object]:
    """Return what COLUMNS says of a kernel; one that was `stored` shows no time."""
    from warploom.generator.families import family

    layout = family(spec.operation.family).layout(spec)
    resources = artifact.resources.values()
    return [
        artifact.name[-8:],
        "x".join(map(str, spec.schedule.tile)),
        spec.schedule.threads,
        layout.shared_bytes,
        max(entry.registers for entry in resources),
        all(entry.clean for entry in resources) and not artifact.serialised,
        "stored" if stored else artifact.compile_seconds,
        len(artifact.cubin),
        artifact.name,
    ]
