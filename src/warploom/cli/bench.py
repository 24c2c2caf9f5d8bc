"""`warploom bench`: Warploom and its baselines, at a user's shapes or the project's cases.

With --shapes it runs from any installation (bench_shapes.py). The cells of benchmarks/cells.yaml
need a checkout, whose benchmarks/ is no part of the package. The exit code is 3 where a
result of Warploom's is wrong, 4 where it or, without --allow-missing, a peer is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from warploom.cli.arguments import ANY_FILE, GPU_KIND, GivenPath
from warploom.cli.bench_shapes import bench
from warploom.cli.engines import ray_option
from warploom.cli.operations import operation_options
from warploom.cli.output import Output, reporting_text
from warploom.cli.shapes import written_numbers, written_shapes
from warploom.errors import ConfigurationError

MOST_DIGITS = 9  # of a seed, and of how many problems it samples


@click.command("bench")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option(
    "--shapes",
    callback=written_shapes,
    help="Shapes of your own, written as on the page of their family or as tables print them.",
)
@operation_options
@click.option(
    "--cells", default="", help="Sets of benchmark cases, separated by commas (default: all)."
)
@click.option("--peers", default="", help="Baselines, separated by commas (default: all).")
@click.option("--types", default="", help="Types, separated by commas (default: all).")
@click.option(
    "--m", "rows", default="", callback=written_numbers, help="Only cases of these M, or lengths."
)
@click.option("--match", default="", help="Only cases whose name has this text.")
@click.option("--specs", type=ANY_FILE, help="A configuration, whose kernels compete as well.")
@click.option(
    "--problems", metavar="SEED[:COUNT]", help="Shapes that nobody tuned, sampled with a seed."
)
@click.option("--autotune", is_flag=True, help="Tune sampled shapes between calls first.")
@click.option("--profile", is_flag=True, help="Show kernels and host functions that take time.")
@click.option(
    "--baseline", type=ANY_FILE, help="A .cu file to compile and compare with the kernels."
)
@click.option("--allow-missing", is_flag=True, help="Exit with 0 although a baseline is missing.")
@ray_option
@click.option(
    "--gpus", type=click.IntRange(min=1), help="With --ray: how many at most (default: all)."
)
@click.option(
    "--kind", callback=GPU_KIND, help="With --ray: only GPUs of this kind, such as 'NVIDIA H200'."
)
@click.option("--json", "path", type=ANY_FILE, help="Where the result goes.")
@click.option("--plot", type=GivenPath(file_okay=False), help="Pictures go here.")
@reporting_text
def command(
    output: Output,
    names: tuple[str, ...],
    shapes: Sequence[str],
    fields: Sequence[tuple[str, str]],
    epilogue: str,
    cells: str,
    peers: str,
    types: str,
    rows: Sequence[int],
    match: str,
    specs: Path | None,
    problems: str | None,
    autotune: bool,
    profile: bool,
    baseline: Path | None,
    allow_missing: bool,
    address: str | None,
    gpus: int | None,
    kind: str | None,
    path: Path | None,
    plot: Path | None,
) -> None:
    """Measure kernels, compared with their baselines.

    NAME is a kernel family, or a prefix that several names share; without one, all are measured.
    Tables with geometric means are printed, and --json and --plot write files. `--cells all` is
    what the pages of benchmarks compare; an unknown set of cases is reported with the valid ones.
    With --ray, each case is measured on one of the GPUs of a cluster.

    With --shapes, NAME is a family or the FILE of a configuration. Its kernels are verified and
    timed at your shapes, next to the same in eager torch, in torch.compile and in cuBLAS, or for an
    attention in each backend of torch's sdpa.

    \b
    Examples:
      warploom bench gemm --shapes 4096x6144x4096,16x6144x4096
      warploom bench gemm --shapes 4096x6144x4096 --epilogue bias,gelu_tanh,residual
      warploom bench gemm --shapes 512x6144x4096 --set a=e4m3,b=e4m3
      warploom bench attention_forward --shapes 1x32x8x4096 --set dim=128,mask=causal
      warploom bench linear.yaml --shapes 4096x6144x4096 --json result.json
      warploom bench gemm attention --cells all --json result.json
    """
    if shapes:
        others = {
            "--cells": cells,
            "--peers": peers,
            "--types": types,
            "--m": rows,
            "--match": match,
            "--specs": specs,
            "--problems": problems,
            "--autotune": autotune,
            "--profile": profile,
            "--baseline": baseline,
            "--allow-missing": allow_missing,
            "--ray": address is not None,
            "--gpus": gpus,
            "--kind": kind,
            "--plot": plot,
        }
        bench(output, names, fields, epilogue, shapes, others, path)
        return
    if fields or epilogue:
        raise ConfigurationError(
            f"{'--set' if fields else '--epilogue'} without --shapes",
            rule="says which operation is measured at shapes of your own",
            fix="give --shapes, too",
        )
    _check_cluster(address, gpus, kind, autotune=autotune)
    cells = cells or ("drawn" if problems else "")
    room = benchmarks()
    runner = room("runner")
    found = runner.named(names)
    offered = runner.offered(found)
    asked = room("families").Asked(
        cells=_of(cells, offered["cells"], "cells"),
        peers=_of(peers, offered["peers"], "peers"),
        types=_of(types, offered["types"], "types"),
        m=tuple(rows),
        match=match,
        specs=runner.competing(specs, here=address is None) if specs else (),
        baseline=baseline,
        profile=profile,
        **_seeded(problems),
    )
    cases = list(runner.cases(found, asked))
    if not cases:
        raise ConfigurationError(
            "no case", rule="--cells, --types, --m and --match leave none", fix="ask for more"
        )
    output.for_people = True  # a program reads the file
    if autotune:
        cases, asked = room("autotuned").tuned(cases, asked, output.line)
    name = "_".join(["bench", *names])
    with ExitStack() as stack:
        if address is None:
            how = runner.Here(cases, asked)
        else:
            how = room("fleet").opened(
                *(stack, address, gpus, kind, output.warning, names, asked, cases)
            )
        measured, machine = _measured(output, room("protocol"), name, how, len(cases), path)
    from warploom.tuning.bench import as_json

    every = [as_json(one) for one in measured]
    document = {"benchmark": name, "machine": machine, "cells": every}
    for title, own in room("wording").sections(document).items():
        output.table(title, *room("tables").of_cells(own))
    if profile:
        said = room("profiles")
        output.table("profiles", said.COLUMNS, said.table(document["cells"]))
    for what, summary in runner.conclusions(measured).items():
        output.value(what, summary)
    if autotune:
        _autotuned(output, room("autotuned"), every)
    if absent := runner.missing(measured):
        output.value("missing", absent)
    if plot:
        drawn = room("pictures").draw(name, document, plot)
        output.value("pictures", [str(file) for file in drawn])
    output.exit_code = runner.exit_code(measured, allow_missing=allow_missing)


def _autotuned(output: Output, said: Any, cells: Sequence[Any]) -> None:  # noqa: ANN401
    """What tuning between calls changed, and what that gained."""
    output.table("changed by tuning", said.COLUMNS, said.table(cells))
    output.value("autotuned", said.summary(cells))


def benchmarks() -> Any:  # noqa: ANN401 (modules that a wheel does not have)
    """Return a function that imports a module of the checkout's benchmarks/.

    ConfigurationError where the package does not run from a checkout.
    """
    import warploom.generator

    root = Path(warploom.generator.__file__).resolve().parents[1]
    folder = root / "benchmarks"
    if not (folder / "cells.yaml").is_file():
        raise ConfigurationError(
            "no benchmarks/ next to the package",
            rule="the project's cases, their baselines and results are in the repository, not in "
            "the wheel",
            fix="clone it, `pip install -e .` there, and run this again; --shapes needs no clone",
        )
    if "benchmarks" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "benchmarks", folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None:
            raise ConfigurationError(f"{folder}: cannot be imported")
        module = importlib.util.module_from_spec(spec)
        sys.modules["benchmarks"] = module
        spec.loader.exec_module(module)
    return lambda name: importlib.import_module(f"benchmarks.{name}")


def _measured(
    output: Output,
    protocol: Any,  # noqa: ANN401
    name: str,
    how: Any,  # noqa: ANN401
    count: int,
    path: Path | None,
) -> tuple[list[Any], dict[str, Any]]:
    """Every cell in its place, each recorded as soon as it is measured; and the machine."""
    found: dict[int, Any] = {}
    record = protocol.Record(path, name, how.machine, how.states) if path else None
    with output.progress("measuring", total=count) as advance:
        for place, cell in how.measured():
            found[place] = cell
            advance(f"{cell.name}: {cell.verdict}")
            if record:
                record.add(cell, place)
    if record:
        record.write()
        output.value("result", path)
    return [found[place] for place in sorted(found)], how.machine


def _check_cluster(
    address: str | None, gpus: int | None, kind: str | None, *, autotune: bool
) -> None:
    """ConfigurationError for options that do not go together."""
    for option, value in (("--gpus", gpus), ("--kind", kind)):
        if value and address is None:
            raise ConfigurationError(
                f"{option} {value} without --ray",
                rule="chooses among the GPUs of a cluster; here, one measures all cases",
                fix="choose it with CUDA_VISIBLE_DEVICES",
            )
    if autotune and address is not None:
        raise ConfigurationError(
            "--autotune with --ray",
            rule="calls are tuned, and measured then, in one process",
            fix="leave one of them out",
        )


def _of(written: str, known: Sequence[str], what: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in written.split(",") if word.strip())
    if unknown := [word for word in words if word not in known]:
        raise ConfigurationError(
            f"--{what} {unknown[0]}", rule=f"there are {', '.join(known)}", fix="name some of them"
        )
    return words


def _seeded(problems: str | None) -> dict[str, int]:
    """The seed of drawn problems, and how many of each type, as far as they are told."""
    words = problems.split(":") if problems else []
    numbers = [word.isascii() and word.isdecimal() and len(word) <= MOST_DIGITS for word in words]
    found = list(map(int, words)) if all(numbers) else []
    if problems and (not 1 <= len(found) <= 2 or 0 in found[1:]):
        raise ConfigurationError(
            f"--problems {problems}",
            rule=f"must be SEED or SEED:COUNT, of at most {MOST_DIGITS} digits each",
            fix="such as 1:60",
        )
    return dict(zip(("seed", "count"), found, strict=False))
