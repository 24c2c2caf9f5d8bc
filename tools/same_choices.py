"""Whether two versions choose the same kernels: `collect` in each, then `same_kernels compare`.

Of every operation of the shipped configurations at every cell of the benchmarks: the kernel that
calls run, why, how fast it should be, and what came next; on a GPU with records, on one that the
model of another stands in for, and on one of which nothing is known.
"""

# ruff: noqa: ANN401 (choices of whichever version is there are values here)

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from same_kernels import configs, defined, write

GPUS = ((132, "NVIDIA H200"), (132, "NVIDIA H100 80GB HBM3"), (114, ""))
NVRTC = "13.0"  # that shipped records are of


def described(choice: Any) -> dict[str, Any]:
    """Return a choice as JSON values; kernels by their digests, since names may change."""
    return {
        "kernel": choice.spec.digest,
        "reason": choice.reason,
        "seconds": choice.seconds,
        "runners_up": [[one.spec.digest, one.seconds, one.source] for one in choice.runners_up],
    }


def chosen(path: Path, multiprocessors: int, gpu: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each problem of a configuration in words, and what is chosen for it."""
    ahead = importlib.import_module("warploom.tuning.ahead").ahead
    device = defined("DeviceLimits")(multiprocessors, gpu, NVRTC)
    try:
        every = ahead(path, device)
    except importlib.import_module("warploom.errors").ConfigurationError:  # it has no cells
        return
    for found in every:
        fields = {"family": found.operation.family, **asdict(found.operation)}
        where = json.dumps({**fields, **asdict(found.shape)}, sort_keys=True)
        yield f"{multiprocessors} {gpu} {where}", described(found.choice)


@click.command()
@click.argument("path", metavar="OUT.json", type=click.Path(path_type=Path))
def main(path: Path) -> None:
    """Write what is chosen for every problem to OUT.json."""
    kernels: dict[str, Any] = {}
    paths = sorted({*configs().rglob("*smoke.yaml"), *configs().rglob("*space*.yaml")})
    with tempfile.TemporaryDirectory() as empty:
        os.environ["WARPLOOM_RECORDS_DIR"] = empty  # a user's own would decide
        for multiprocessors, gpu in GPUS:
            for one in paths:
                for problem, choice in chosen(one, multiprocessors, gpu):
                    known = kernels.setdefault(
                        problem, {"name": problem, "text": "", "entries": {}}
                    )
                    known["entries"].setdefault(choice["kernel"], choice)
    write(path, {"toolchain": "", "kernels": kernels})
    click.echo(f"{len(kernels)} problems")


if __name__ == "__main__":
    main()
