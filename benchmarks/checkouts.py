"""Two checkouts of Warploom in one loop: did a change cost speed, on the GPU or on the host?

`python -m benchmarks.checkouts OLD/src NEW/src --json FILE`: a process for each path, which stands
first on its PYTHONPATH, measures every cell of peers/public when told to; rounds alternate in
random order, so that both meet the same clocks. Cells are captured CUDA graphs over buffers that L2
does not hold, and warm calls by the host's clock.
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import click

from benchmarks.peers import public
from benchmarks.peers.public import Cell

ROOT = Path(__file__).parents[1]
ROUNDS = 9
SECONDS = 0.02  # of replays in a round
CACHED = 120e6  # bytes: more than twice the L2 of an H200
_CALLS = 200  # of one sample of host time


# ---- In the process of one checkout --------------------------------------------------------------


def cells() -> dict[str, Cell]:
    """Every cell by name."""
    modules = [f"{public.__name__}.{module.name}" for module in iter_modules(public.__path__)]
    return {cell.name: cell for name in sorted(modules) for cell in import_module(name).CELLS}


def timed_on_gpu(cell: Cell) -> Callable[[], float]:
    """Return what measures the seconds of one call, in a replayed graph."""
    import torch

    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):  # where autograd then has its backward passes
        first, size = cell.make()
        found = [first]
        found += [cell.make()[0] for _ in range(min(15, math.ceil(CACHED / size)))]
        for call in found:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for call in found:
            call()

    def replays(count: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / count

    replays(2)
    count = max(1, math.ceil(SECONDS / replays(3)))
    return lambda: replays(count) / len(found)


def timed_on_host(cell: Cell) -> Callable[[], float]:
    """Return what measures the host's seconds of one warm call of a small problem."""
    import torch

    call, _ = cell.make()

    def seconds() -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_CALLS):
            call()
        took = time.perf_counter() - begin
        torch.cuda.synchronize()
        return took / _CALLS

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # both on one core, in turns
    seconds()
    return lambda: min(seconds() for _ in range(10))


def serve() -> None:
    """Say which cells there are; measure those that standard input names, answer with seconds."""
    known = cells()
    print(json.dumps(list(known)), flush=True)
    ready: dict[str, Callable[[], float]] = {}
    for name in map(str.strip, sys.stdin):
        if name in ready:
            print(ready[name](), flush=True)
            continue
        ready.clear()  # one cell's memory at a time
        cell = known[name]
        ready[name] = timed_on_host(cell) if cell.host else timed_on_gpu(cell)
        print("ready", flush=True)


# ---- In the process that asks --------------------------------------------------------------------


class Server:
    """The process of one checkout."""

    def __init__(self, path: Path) -> None:
        first = os.pathsep.join([str(path), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkouts", "--serve"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": first},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, name: str) -> None:
        """Have a cell made ready, or measured once."""
        if self._process.stdin:
            self._process.stdin.write(name + "\n")
            self._process.stdin.flush()

    def answer(self) -> str:
        """What it says."""
        answer = self._process.stdout.readline() if self._process.stdout else ""
        if not answer:
            raise SystemExit("a checkout's process ended: see above")
        return answer.strip()


def compared(servers: list[Server], name: str) -> list[list[float]]:
    """The seconds of a cell in each round, of both."""
    for one in servers:
        one.ask(name)
    for one in servers:
        one.answer()
    found: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for index in random.sample((0, 1), 2):
            servers[index].ask(name)
            found[index].append(float(servers[index].answer()))
    return found


@click.command()
@click.argument("paths", nargs=-1, type=click.Path(path_type=Path))
@click.option("--match", default="", help="Only cells whose name has this text.")
@click.option("--json", "file", type=click.Path(path_type=Path), help="Where every time goes.")
@click.option("--serve", "serving", is_flag=True, hidden=True)
def main(paths: tuple[Path, ...], match: str, file: Path | None, serving: bool) -> None:
    """Measure two folders that hold the package, print the ratios, write the times."""
    if serving:
        serve()
        return
    if len(paths) != 2:
        raise click.UsageError("two paths are compared")
    servers = [Server(path.resolve()) for path in paths]
    found: dict[str, list[list[float]]] = {}
    kinds: dict[str, list[float]] = {}
    listed, _ = (json.loads(one.answer()) for one in servers)
    for name in (name for name in listed if match in name):
        found[name] = compared(servers, name)
        old, new = (statistics.median(times) * 1e6 for times in found[name])
        kinds.setdefault(name.split()[0], []).append(math.log(old / new))
        click.echo(f"{name:40s} {old:10.2f} us {new:10.2f} us  old / new {old / new:.3f}")
    if file:
        from warploom.atomic_file import replace_file  # a checkout that serves may be without it

        replace_file(file, json.dumps(found, indent=1) + "\n")
    for kind, logs in kinds.items():
        click.echo(f"{kind}: geometric mean of old / new {math.exp(statistics.mean(logs)):.4f}")


if __name__ == "__main__":
    main()
