"""How much slower kernels of untuned calls are than the best that was measured, from journals.

    warploom tune mixed_gemm --shapes $(python tools/table_losses.py shapes --seed 7) \
        --exhaustive --journal sampled.journal
    python tools/table_losses.py losses sampled.journal

A default table, or a cost model, is judged on shapes that it was not fitted to: `shapes` samples
some. No tuned config has a say here, so that one journal tells what a changed table would choose.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import click

ROOT = Path(__file__).parents[1]
sys.path += [str(ROOT / "src"), str(ROOT)]

from benchmarks.problems import Draw  # noqa: E402
from warploom.generator.families import family  # noqa: E402
from warploom.generator.launches import DeviceLimits  # noqa: E402
from warploom.generator.specification import KernelSpec  # noqa: E402
from warploom.runtime.dispatch import untuned  # noqa: E402
from warploom.tuning import journal  # noqa: E402

SHOWN = 1.03  # times the best from which a shape is listed
STEP = 128  # N and K are multiples of it
LARGEST = {"n": 28672 // STEP, "k": 16384 // STEP}  # steps
SMALLEST = 1024 // STEP
ROWS = (1, 4096)


@click.group()
def main() -> None:
    """Judge default tables and cost models."""


@main.command()
@click.option("--seed", type=int, required=True, help="Of the sample.")
@click.option("--count", type=click.IntRange(1), default=24, show_default=True)
@click.option("--rows", type=int, nargs=2, default=ROWS, show_default=True, help="Least and most.")
@click.option("--groups", type=int, help="Of grouped GEMMs, whose rows are those of a group.")
def shapes(seed: int, count: int, rows: tuple[int, int], groups: int | None) -> None:
    """Print shapes MxNxK for `warploom tune --shapes`: N and K are multiples of 128."""
    draw = Draw("shapes of a table", seed)
    first = [] if groups is None else [groups]
    sample = []
    for _ in range(count):
        weight = (STEP * draw.size(SMALLEST, most) for most in LARGEST.values())
        sample.append("x".join(map(str, [*first, draw.size(*rows), *weight])))
    click.echo(",".join(sample))


@main.command()
@click.argument(
    "journals", metavar="JOURNAL...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
def losses(journals: tuple[Path, ...]) -> None:
    """Print, for each journal, the times of untuned choices over the best measured ones."""
    for path in journals:
        known: list[float] = []
        other = 0
        for shape, chosen, times in problems(path):
            if chosen not in times:
                other += 1
                continue
            best = min(times, key=lambda spec: times[spec])
            known.append(times[chosen] / times[best])
            if known[-1] > SHOWN:
                click.echo(f"{known[-1]:.3f} {shape} {chosen.name}, best {best.name}")
        if known:
            mean = math.exp(sum(map(math.log, known)) / len(known))
            click.echo(
                f"{path.name}: {len(known)} shapes, mean {mean:.4f}, largest {max(known):.3f}"
            )
        click.echo(f"{path.name}: {other} shapes whose choice was not measured")


def problems(path: Path) -> Iterator[tuple[object, KernelSpec, dict[KernelSpec, float]]]:
    """Each shape, the kernel that an untuned call of it runs, and the seconds of right kernels."""
    measured: dict[tuple[object, ...], dict[KernelSpec, float]] = defaultdict(dict)
    for entry in journal.read(path):
        here, result = entry.environment, entry.result
        if result.seconds is not None:
            device = DeviceLimits(here.multiprocessors, here.gpu, here.nvrtc)
            spec = KernelSpec(device.arch, entry.operation, result.schedule)
            measured[entry.operation, entry.shape, device][spec] = result.seconds
    for (operation, shape, device), times in measured.items():
        required = family(operation.family).table.required(operation, shape)
        yield shape, untuned(operation, shape, device, required).spec, times


if __name__ == "__main__":
    main()
