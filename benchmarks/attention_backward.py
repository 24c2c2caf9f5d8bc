"""`python -m benchmarks.attention_backward --json FILE`: gradients of attention beside its peers.

The cells are those of the forward pass; --window and --packed likewise. --deterministic asks for
gradients that are bit-equal from run to run, --autograd measures both passes through autograd with
the host's time. The exit code is 3 if a result of Warploom's is wrong, 4 if one is absent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import cycle, islice
from pathlib import Path

import click
import torch

import warploom
from benchmarks import machine
from benchmarks.attention import (
    HIDDEN,
    Which,
    cells,
    conclusion,
    operand_sets,
    packed,
    ranked,
    told,
    windows,
)
from benchmarks.attention_backward_peers import ours, passes, peers, trained
from benchmarks.attention_peers import FLOPS_PER_SECOND, Problem
from benchmarks.protocol import Cell, Floor, Record, compete, exit_code
from warploom.errors import CompilationError
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime.measure import Call, Sampler, elapsed, graph_sampler, laps_for

SHORT = (512, 1024, 2048)  # where the host's time can show
_SECONDS = 0.2  # of one sample of steps


def steps() -> list[Problem]:
    """Cells for both passes: the short squares, and one sequence of each length alone."""
    squares = [problem for problem in cells("square") if problem.seq in SHORT]
    alone = [
        Problem(f"d128 causal {seq} x 1", 1, HIDDEN // 128, HIDDEN // 128, seq, 128, causal=True)
        for seq in SHORT
    ]
    return [*squares, *alone]


def compare(
    problem: Problem,
    specs: Sequence[KernelSpec] = (),
    device: str = "cuda",
    sampler: Callable[[Sequence[Call]], Sampler] | None = None,
    *,
    deterministic: bool = False,
) -> Cell:
    """Warploom as dispatched, the fastest of its peers second, then the others and `specs`.

    Five products where the forward pass has two. Where all are deterministic, Warploom as it is
    otherwise comes last, and no CUDA graph is timed: peers' passes cannot be captured.
    """
    sampler = sampler or (enqueued_sampler if deterministic else graph_sampler)
    given = passes(problem, operand_sets(problem, device))
    beside = peers(given, deterministic=deterministic)
    contenders = [ours(given, deterministic=deterministic), *beside]
    contenders += [
        ours(given, spec, spec.name, deterministic=deterministic)
        for spec in specs
        if _fits(spec, problem, deterministic)
    ]
    if deterministic:
        contenders.append(ours(given, name="warploom, in any order"))
    about, floor = work(problem, products=5)
    return ranked(compete(problem.name, about, contenders, floor, sampler=sampler), len(beside))


def compare_steps(
    problem: Problem,
    device: str = "cuda",
    sampler: Callable[[Sequence[Call]], Sampler] | None = None,
) -> Cell:
    """Both passes through autograd, as `compare` has them; times are the host's, GPU included."""
    contenders = trained(passes(problem, operand_sets(problem, device)))
    about, floor = work(problem, products=7)
    cell = compete(problem.name, about, contenders, floor, sampler=sampler or step_sampler)
    return ranked(cell, len(contenders) - 1)


def enqueued_sampler(calls: Sequence[Call]) -> Sampler:
    """Return what times as many calls as fill a sample, on the current stream.

    Each takes the GPU longer than the host, which has all enqueued before they are done.
    """

    def lap() -> None:
        for call in calls:
            call()

    lap()  # compiles, loads and plans
    laps = laps_for(elapsed(lap))

    def all_laps() -> None:
        for _ in range(laps):
            lap()

    def sample() -> float:
        all_laps()  # untimed: keeps the GPU busy until the first timed call is enqueued
        return elapsed(all_laps) / (laps * len(calls))

    return sample


def step_sampler(calls: Sequence[Call]) -> Sampler:
    """Return what times as many calls as fill a sample, from the first to the GPU's last."""

    def run(count: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for call in islice(cycle(calls), count):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / count

    run(3 * len(calls))  # compiles, loads and plans
    count = max(10, round(_SECONDS / run(10)))
    return lambda: run(count)


def work(problem: Problem, products: int) -> tuple[dict[str, object], Floor]:
    """A cell's record and floor: the forward pass has two products."""
    flops = problem.flops * products // 2
    return {**asdict(problem), "type": "bf16", "flops": flops}, Floor(
        flops / FLOPS_PER_SECOND, "flops"
    )


def _fits(spec: KernelSpec, problem: Problem, deterministic: bool) -> bool:
    """Whether a kernel computes exactly the operation that the problem is."""
    mask = "window" if problem.window is not None else "causal" if problem.causal else "none"
    lengths = "packed" if problem.lengths else "fixed"
    wanted = AttentionBackwardOperation(
        "bf16",
        problem.dim,  # type: ignore[arg-type]
        mask,  # type: ignore[arg-type]
        lengths=lengths,  # type: ignore[arg-type]
    )
    return spec.operation == replace(wanted, deterministic=deterministic)


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--cells", "which", type=click.Choice(["all", "square", "grouped"]), default="all")
@click.option("--match", default="", help="Only cells whose name has this text.")
@click.option("--specs", type=_FILE, help="A configuration, whose kernels compete as well.")
@click.option("--window", "mode", flag_value="window", help="Sliding windows of 1024.")
@click.option("--packed", "mode", flag_value="packed", help="Sequences of varying length.")
@click.option("--autograd", "mode", flag_value="autograd", help="Both passes, with host time.")
@click.option("--deterministic", is_flag=True, help="Gradients that are bit-equal run to run.")
@click.option("--json", "path", type=_FILE, required=True, help="Where the result goes.")
def main(
    which: Which, match: str, specs: Path | None, mode: str | None, deterministic: bool, path: Path
) -> None:
    """Measure gradients of attention beside its peers and record the result as JSON."""
    problems = {"window": windows, "packed": packed, "autograd": steps}.get(
        mode or "", lambda: cells(which)
    )()
    name = "attention_autograd" if mode == "autograd" else "attention_backward"
    parts = (name, mode if mode != "autograd" else None, "deterministic" if deterministic else None)
    record = Record(path, "_".join(filter(None, parts)), machine.machine())
    machine.warm()
    record.state(machine.state())
    given = expand_file(specs).specs if specs else []
    if specs:
        with suppress(CompilationError):  # where it competes, it is absent
            warploom.warmup(specs)
    measured = []
    for problem in problems:
        if match not in problem.name:
            continue
        if mode == "autograd":
            cell = compare_steps(problem)
        else:
            cell = compare(problem, given, deterministic=deterministic)
        record.add(cell)
        measured.append(cell)
        click.echo(told(cell))
    record.state(machine.state())
    click.echo(conclusion(measured))
    raise SystemExit(exit_code(measured))


if __name__ == "__main__":
    main()
