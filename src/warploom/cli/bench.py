"""`warploom bench`: Warploom beside its peers on the cells of benchmarks/cells.yaml.

It runs from a checkout, whose benchmarks/ is no part of the package. The exit code is 3 where a
result of Warploom's is wrong, 4 where it or, without --allow-missing, a peer is missing.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any, Literal

import click

from warploom.cli.output import Output, reporting_text
from warploom.errors import ConfigurationError

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command("bench")
@click.argument("what", type=click.Choice(["gemm", "attention"]))
@click.option("--peers", default="", help="cublas,triton,quack or cudnn,fa2,fa3,fa4,triton: all.")
@click.option("--cells", default="all", help="squares, llm, tuned, all; or square, grouped, all.")
@click.option("--types", default="", help="Types of products, separated by commas (default: all).")
@click.option("--passes", default="", help="Of attention: forward, backward (default: both).")
@click.option("--m", "rows", default="", help="Cells of these M, or lengths, only.")
@click.option("--match", default="", help="Only cells whose name has this text.")
@click.option("--allow-missing", is_flag=True, help="Exit with 0 although a peer is missing.")
@click.option("--json", "path", type=_FILE, help="Where the result goes.")
@click.option("--plot", type=click.Path(path_type=Path, file_okay=False), help="Pictures go here.")
@reporting_text
def command(
    output: Output,
    what: Literal["gemm", "attention"],
    peers: str,
    cells: str,
    types: str,
    passes: str,
    rows: str,
    match: str,
    allow_missing: bool,
    path: Path | None,
    plot: Path | None,
) -> None:
    """Measure products or attention next to their peers.

    It prints a table with a geometric mean, and writes a document and pictures on demand.
    """
    room = benchmarks()
    bench, kinds = room("bench"), room("peers").KINDS
    asked = bench.Asked(
        cells=_of(cells, bench.CELLS[what], "cells")[0],
        peers=_of(peers, bench.PEERS[what], "peers"),
        types=_of(types, tuple(kinds), "types"),
        passes=_of(passes, bench.PASSES, "passes"),
        m=tuple(_number(word) for word in rows.split(",") if word),
        match=match,
    )
    room("machine").require_gpu()
    output.for_people = True  # a program reads the file
    found = _measured(output, room, what, asked, path)
    told = list(dict.fromkeys(entry.contender for cell in found for entry in cell.entries))
    output.table("cells", bench.columns(told), [bench.row(cell, told) for cell in found])
    output.value("summary", bench.conclusion(found))
    if len(each := bench.conclusions(found)) > 1:
        for kind, own in each.items():
            output.value(f"summary, {kind}", own)
    if absent := bench.missing(found):
        output.value("missing", absent)
    if plot:
        name, machine = f"bench_{what}", room("machine").machine()
        document = {"benchmark": name, "machine": machine, "cells": [c.as_json() for c in found]}
        drawn = room("pictures").draw(name, document, plot)
        output.value("pictures", [str(file) for file in drawn])
    output.exit_code = bench.exit_code(found, allow_missing=allow_missing)


def benchmarks() -> Any:  # noqa: ANN401 (modules that a wheel does not have)
    """Return a function that imports a module of the checkout's benchmarks/.

    ConfigurationError where the package does not run from a checkout.
    """
    import warploom.generator

    root = Path(warploom.generator.__file__).resolve().parents[1]
    folder = root / "benchmarks"
    if not (folder / "cells.yaml").is_file():
        raise ConfigurationError(
            "no benchmarks/ beside the package",
            rule="benchmarks, their peers and results are in the repository, not in the wheel",
            fix="clone it, `pip install -e .` there, and run this again",
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
    room: Any,  # noqa: ANN401
    what: str,
    asked: Any,  # noqa: ANN401
    path: Path | None,
) -> list[Any]:
    """Every cell, each recorded as soon as it is measured."""
    import torch

    machine = room("machine")
    record = room("protocol").Record(path, f"bench_{what}", machine.machine()) if path else None
    machine.warm()
    if record:
        record.state(machine.state())
    found = []
    with torch.no_grad(), output.progress("measuring", total=0) as advance:
        for cell in room("bench").measured(what, asked):
            found.append(cell)
            advance(cell.name)
            if record:
                record.add(cell)
    if record:
        record.state(machine.state())
        output.value("result", path)
    if not found:
        raise ConfigurationError(
            "no cell", rule="--cells, --m and --match leave none", fix="ask for more"
        )
    return found


def _of(written: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in written.split(",") if word.strip()) or known
    if unknown := [word for word in words if word not in known]:
        raise ConfigurationError(
            f"--{what} {unknown[0]}", rule=f"there are {', '.join(known)}", fix="name some of them"
        )
    return words


def _number(word: str) -> int:
    if not word.strip().isdecimal():
        raise ConfigurationError(
            f"--m {word}", rule="must be numbers, separated by commas", fix="such as 1,16,64"
        )
    return int(word)
