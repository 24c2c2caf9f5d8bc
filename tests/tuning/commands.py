"""Commands that are watched and stopped, and those on a cluster whose GPUs play a sweep back."""

from __future__ import annotations

import inspect
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from forked import Running
from roles import Role

from warploom.cli import engines, main
from warploom.tuning import journal
from warploom.tuning.fleet import gpus
from warploom.tuning.fleet.gpus import Joining, RayGpu
from warploom.tuning.gpu import Batch, Gpu
from warploom.tuning.replay import NoCompiler, Replay

plain = engines.remote


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(condition: Callable[[], bool], running: Running) -> int:
    """Wait for what a process does that runs, and return its id."""
    (process,) = running.processes
    end = time.monotonic() + 600
    while not condition():
        assert Path(f"/proc/{process}").exists(), running.wait()
        assert time.monotonic() < end, f"it never came:\n{inspect.getsource(condition)}"
        time.sleep(0.01)
    return process


def hold(kind: type[Any], results: int) -> None:
    """Have GPUs of a kind measure so many results, and nothing more until they are closed.

    Else a run may end before whoever is to stop it sees how far it is.
    """
    ended, measure, close = threading.Event(), kind.measure, kind.close

    def held(self: Any, batch: Batch) -> object:  # noqa: ANN401
        nonlocal results
        if results <= 0:
            ended.wait()
        if len(batch.specs) > 1:  # else it may be an examination, which no journal has
            results -= len(batch.specs)
        return measure(self, batch)

    def closed(self: Any) -> None:  # noqa: ANN401
        ended.set()
        close(self)

    kind.measure, kind.close = held, closed


def replayed() -> None:
    """Run a command that plays a sweep back; sys.argv has how many results, and the command."""
    _, results, *command = sys.argv
    hold(Replay, int(results))
    main(command)


def remote(
    make: Callable[[], Gpu], resource: str, together: int = 1
) -> Callable[..., engines.Engines]:
    """In place of engines.remote: what `make` makes measures, and nothing is compiled.

    The run begins when so many have joined.
    """
    simulated = {"make": make, "resource": resource, "kernels": lambda spec: None}

    def opened(*given: object, **options: object) -> engines.Engines:
        found = plain(*cast("Any", given), **cast("Any", options | simulated))
        joining, end = cast("Joining", found.joining), time.monotonic() + 600
        joined: dict[str, Gpu] = {**found.gpus}
        while len(joined) < together and time.monotonic() < end:
            joined |= joining()
            time.sleep(0.1)
        return replace(found, first=lambda: joined, compiler=NoCompiler())

    return opened


def simulated() -> None:
    """Run a command on a cluster, whose GPUs measure so many results.

    sys.argv has that number, the sweep, what the cluster calls its GPUs, and the command.
    """
    _, results, sweep, resource, *command = sys.argv
    gpus.LOOKING = 0.1
    hold(RayGpu, int(results))
    engines.remote = remote(partial(Role, journal.read(Path(sweep))), resource)
    main(command)
