"""Commands that are watched and stopped, and those on a cluster whose GPUs play a sweep back."""

from __future__ import annotations

import sys
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
from warploom.tuning.fleet.gpus import Joining
from warploom.tuning.gpu import Gpu
from warploom.tuning.replay import NoCompiler

plain = engines.remote


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until(condition: Callable[[], bool], running: Running) -> int:
    """Wait for what a process does that runs, and return its id."""
    (process,) = running.processes
    end = time.monotonic() + 600
    while not condition():
        assert Path(f"/proc/{process}").exists(), running.wait()
        assert time.monotonic() < end
        time.sleep(0.01)
    return process


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
    """Run a command: sys.argv has the sweep, what the cluster calls its GPUs, and the command."""
    _, sweep, resource, *command = sys.argv
    gpus.LOOKING = 0.1
    engines.remote = remote(partial(Role, journal.read(Path(sweep))), resource)
    main(command)
