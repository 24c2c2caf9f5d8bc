"""What a run costs the machine that drives it: 64 GPUs of 8 nodes that answer after a second.

    python tools/simulated_fleet.py [GPUS]

Times are the model's own. Prints the processor time of the run without that of the GPUs, for each
result; and, by itself, what ranking the spaces took before.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import click

from warploom.generator.families import family
from warploom.generator.gpus import DEFAULT
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import load
from warploom.generator.records import Record, Records
from warploom.generator.specification import KernelSpec
from warploom.runtime.records import environment
from warploom.tuning.fleet.members import FAILURES, Fleet
from warploom.tuning.fleet.standing import Condition
from warploom.tuning.gpu import About, Batch
from warploom.tuning.journal import Journal, Result
from warploom.tuning.problems import problems
from warploom.tuning.replay import NoCompiler
from warploom.tuning.searches import anchor
from warploom.tuning.tuner import Tuner

ROOT = Path(__file__).parents[1]
KIND = About(DEFAULT.name, DEFAULT.multiprocessors)


class Simulated:
    """A GPU that answers with the model's times, after a second."""

    about = KIND
    spent = 0.0
    lock = threading.Lock()

    def condition(self) -> Condition:
        """As all the others."""
        return Condition("simulated")

    def measure(self, batch: Batch) -> dict[KernelSpec, Result]:
        """What the model says."""
        time.sleep(1.0)
        begun = time.thread_time()
        known = family(batch.operation.family)
        found = {}
        for spec in batch.specs:
            asked = (batch.operation, spec.schedule, batch.shape, KIND.multiprocessors)
            found[spec] = known.seconds(known.constants, *asked)
        base = found[batch.specs[0]]
        with Simulated.lock:
            Simulated.spent += time.thread_time() - begun
        return {
            spec: Result(spec.schedule, "correct", seconds, 0.004, seconds / base)
            for spec, seconds in found.items()
        }

    def close(self) -> None:
        """Nothing is to be ended."""


@click.command()
@click.argument("count", metavar="[GPUS]", type=click.IntRange(min=1, max=1024), default=64)
def main(count: int) -> None:
    """Tune the cells of one model on so many GPUs, and print what that took."""
    listed = problems(ROOT / "configs" / "gemm" / "space.yaml", model="llama3-8b")
    here = {"gemm": environment(DeviceLimits(KIND.multiprocessors, KIND.gpu, "13.0"), "gemm")}
    gpus = {f"node{index // 8}/{index % 8}": Simulated() for index in range(count)}
    saved: list[Record] = []
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.jsonl")
        begun = time.process_time()
        fleet = Fleet(
            KIND,
            gpus,
            joining=dict,
            failures=FAILURES,
            anchor=anchor(listed, here),
            confirms=True,
        )
        tuner = Tuner(
            *(listed, fleet, NoCompiler(), journal, Records(KIND.gpu), here),
            budget=1e6,
            constants=load(KIND.gpu),
            save=saved.append,
        )
        ranked, started = time.process_time(), time.monotonic()
        tuner.run()
        own = time.process_time() - ranked - Simulated.spent
        journal.close()
    results = len(journal.entries)
    print(f"{count} GPUs, {len(saved)} records, {results} results")
    print(f"{time.monotonic() - started:.1f} s, of which the driver's own {own:.2f} s")
    print(f"{own / results * 1e3:.2f} ms a result; ranking before {ranked - begun:.1f} s")


if __name__ == "__main__":
    main()
