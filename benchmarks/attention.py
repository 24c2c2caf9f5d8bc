"""`python -m benchmarks.attention --json FILE`: attention beside its peers, in one loop.

The cells are those of cells.yaml; --window and --packed measure sliding windows and sequences of
varying length instead. The exit code is 3 if a result of Warploom's is wrong, 4 if one is absent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from math import exp, log
from pathlib import Path
from typing import Literal

import click
import torch
import yaml

import warploom
from benchmarks import machine
from benchmarks.attention_peers import Operands, Problem, operands, ours, peers
from benchmarks.protocol import Cell, Entry, Record, compete, exit_code, summary
from warploom.errors import CompilationError
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime.measure import Call, Sampler, graph_sampler
from warploom.runtime.trial import buffer_sets

ROOT = Path(__file__).parents[1]
TOKENS, HIDDEN = 16_384, 2048  # of the cells of one dim, mask and length
WINDOW, WINDOW_LENGTHS = 1024, (8192, 16_384, 32_768)
LONGEST, ZIPF = 8192, 1.2  # packed lengths
Which = Literal["all", "square", "grouped"]


def cells(which: Which = "all") -> list[Problem]:
    """The cells of cells.yaml: squares of 16k tokens, and grouped queries."""
    listed = yaml.safe_load((ROOT / "benchmarks" / "cells.yaml").read_text())["attention"]
    squares = [
        Problem(
            f"d{dim} {'causal' if causal else 'full'} {seq}",
            TOKENS // seq,
            HIDDEN // dim,
            HIDDEN // dim,
            seq,
            dim,
            causal,
        )
        for dim in listed["dim"]
        for causal in listed["causal"]
        for seq in listed["seq"]
    ]
    grouped = [
        Problem(
            f"d{dim} {'causal' if causal else 'full'} {seq} {heads}/{kv_heads} heads x {batch}",
            batch,
            heads,
            kv_heads,
            seq,
            dim,
            causal,
        )
        for batch, heads, kv_heads, seq, dim, causal in listed["grouped"]
    ]
    return {"all": [*squares, *grouped], "square": squares, "grouped": grouped}[which]


def windows() -> list[Problem]:
    """A causal window of 1024 at growing lengths, each beside the same length without one."""
    return [
        Problem(f"d128 {kind} {seq}", 1, 16, 16, seq, 128, causal=True, window=window)
        for seq in WINDOW_LENGTHS
        for kind, window in (("window 1024", WINDOW - 1), ("causal", None))
    ]


def packed() -> list[Problem]:
    """Sequences whose lengths follow Zipf's law up to 8k, 64 query heads over 8: 32k tokens."""
    lengths = zipf(2 * TOKENS, random.Random(0))  # noqa: S311 (lengths, no secret)
    name = f"d128 causal packed, {len(lengths)} sequences, 64/8 heads"
    return [
        Problem(name, len(lengths), 64, 8, max(lengths), 128, causal=True, lengths=tuple(lengths))
    ]


def zipf(total: int, source: random.Random) -> list[int]:
    """Draw lengths of 16 to 8192 with probability 1 / length ** 1.2 until they add up to total."""
    choices = range(16, LONGEST + 1)
    weights = [length**-ZIPF for length in choices]
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, source.choices(choices, weights)[0]))
    return lengths


def compare(
    problem: Problem,
    specs: Sequence[KernelSpec] = (),
    device: str = "cuda",
    sampler: Callable[[Sequence[Call]], Sampler] = graph_sampler,
) -> Cell:
    """Warploom as dispatched, the fastest of its peers second, then the others and `specs`."""
    sets = operand_sets(problem, device)
    beside = peers(problem, sets)
    fitting = [ours(problem, sets, spec, spec.name) for spec in specs if _fits(spec, problem)]
    about = {**asdict(problem), "type": "bf16", "flops": problem.flops}
    contenders = [ours(problem, sets), *beside, *fitting]
    cell = compete(problem.name, about, contenders, problem.floor, sampler=sampler)
    return ranked(cell, len(beside))


def ranked(cell: Cell, peers: int) -> Cell:
    """The same cell with its peers, which follow ours, sorted: the fastest right one first."""
    sorted_peers = sorted(cell.entries[1 : peers + 1], key=_rank)
    entries = (cell.entries[0], *sorted_peers, *cell.entries[peers + 1 :])
    return Cell(cell.name, cell.problem, entries, cell.floor)


def operand_sets(problem: Problem, device: str) -> list[Operands]:
    """As many sets of operands as outlast the GPU's L2 cache when used in turn."""
    one = operands(problem, device)
    if device != "cuda":
        return [one]
    used = sum(t.numel() * t.element_size() for t in (one.q, one.k, one.v, one.out))
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    more = buffer_sets(used, l2_bytes) - 1
    return [one, *(operands(problem, device) for _ in range(more))]


def _fits(spec: KernelSpec, problem: Problem) -> bool:
    """Whether a kernel computes exactly the operation that the problem is."""
    mask = "window" if problem.window is not None else "causal" if problem.causal else "none"
    lengths = "packed" if problem.lengths else "fixed"
    wanted = AttentionOperation("bf16", problem.dim, mask, lengths=lengths)  # type: ignore[arg-type]
    return spec.operation == wanted


def _rank(entry: Entry) -> tuple[bool, float]:
    """Peers that are right and there come first, the fastest of them first."""
    wrong = (entry.error_share or 0) > 1
    return wrong or entry.seconds is None, entry.seconds or 0.0


def told(cell: Cell) -> str:
    """One line of the printed table: TFLOP/s of each, the best peer, ratio and verdict."""
    rates = [f"{entry.contender} {_rate(cell, entry)}" for entry in cell.entries]
    ratio = "-" if cell.ratio is None else f"{cell.ratio:.3f}"
    return (
        f"{cell.name:34} {', '.join(rates)}: {cell.verdict} {ratio} ({cell.entries[1].contender})"
    )


def _rate(cell: Cell, entry: Entry) -> str:
    return f"{cell.problem['flops'] / entry.seconds * 1e-12:.0f}" if entry.seconds else "absent"


def conclusion(cells: Sequence[Cell]) -> str:
    """Won, tied and lost, and the geometric mean and least of the ratios."""
    found = summary(cell.as_json() for cell in cells)
    mean = found.pop("geometric_mean")
    ratios = [cell.ratio for cell in cells if cell.ratio]
    short = [cell.ratio for cell in cells if cell.ratio and cell.problem["seq"] <= 1024]
    lines = [", ".join(f"{count} {verdict}" for verdict, count in found.items())]
    if ratios:
        lines.append(f"geometric mean {mean:.3f}, least {min(ratios):.3f}")
    if short:
        mean = exp(sum(map(log, short)) / len(short))
        lines.append(f"sequences to 1024: geometric mean {mean:.3f}, least {min(short):.3f}")
    return "\n".join(lines)


_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command()
@click.option("--cells", "which", type=click.Choice(["all", "square", "grouped"]), default="all")
@click.option("--match", default="", help="Only cells whose name has this text.")
@click.option("--specs", type=_FILE, help="A configuration, whose kernels compete as well.")
@click.option("--window", "mode", flag_value="window", help="Sliding windows of 1024.")
@click.option("--packed", "mode", flag_value="packed", help="Sequences of varying length.")
@click.option("--json", "path", type=_FILE, required=True, help="Where the result goes.")
def main(which: Which, match: str, specs: Path | None, mode: str | None, path: Path) -> None:
    """Measure attention beside its peers and record the result as JSON."""
    problems = {"window": windows, "packed": packed}[mode]() if mode else cells(which)
    record = Record(path, f"attention_{mode or 'forward'}", machine.machine())
    machine.warm()
    record.state(machine.state())
    given = expand_file(specs).specs if specs else []
    if specs:
        with suppress(CompilationError):  # where it competes, it is absent
            warploom.warmup(specs)
    measured = []
    with torch.no_grad():
        for problem in problems:
            if match not in problem.name:
                continue
            cell = compare(problem, given)
            record.add(cell)
            measured.append(cell)
            click.echo(told(cell))
    record.state(machine.state())
    click.echo(conclusion(measured))
    raise SystemExit(exit_code(measured))


if __name__ == "__main__":
    main()
