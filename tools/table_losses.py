"""How much slower kernels of untuned calls are than the best that was measured, from journals.

    warploom tune mixed_gemm --shapes $(python tools/table_losses.py shapes --seed 7) \
        --exhaustive --journal drawn.journal
    python tools/table_losses.py losses drawn.journal

A default table, or a cost model, is judged on shapes that it was not fitted to: `shapes` samples
some. No tuned config has a say here, so that one journal tells what a changed table would choose.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

from warploom.generator.families import family  # noqa: E402
from warploom.generator.launches import DeviceLimits  # noqa: E402
from warploom.generator.records import restore_operation, restore_shape  # noqa: E402
from warploom.generator.specification import KernelSpec  # noqa: E402
from warploom.runtime.dispatch import untuned  # noqa: E402

SHOWN = 1.03  # times the best from which a shape is listed
LAYERS = (1024, 28672), (1024, 16384)  # n and k, whose logarithms are uniform
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
    draw = random.Random(seed)  # noqa: S311 (a sample, not a secret)

    def one(least: int, most: int, step: int) -> int:
        exact = math.exp(draw.uniform(math.log(least), math.log(most)))
        return max(step, round(exact / step) * step)

    found = [(one(*rows, 1), *(one(*each, 128) for each in LAYERS)) for _ in range(count)]
    first = [] if groups is None else [groups]
    click.echo(",".join("x".join(map(str, [*first, *shape])) for shape in found))


@main.command()
@click.argument(
    "journals", metavar="JOURNAL...", nargs=-1, required=True, type=click.Path(path_type=Path)
)
@click.option("--gpu", default="NVIDIA H200", show_default=True, help="Name of the GPU kind.")
@click.option("--sms", default=132, show_default=True)
def losses(journals: tuple[Path, ...], gpu: str, sms: int) -> None:
    """Print, for each journal, the times of untuned choices over the best measured ones."""
    device = DeviceLimits(sms, gpu, "")
    for path in journals:
        known: list[float] = []
        other = 0
        for operation, shape, times in measured(path):
            required = family(operation.family).table.required(operation, shape)
            chosen = untuned(operation, shape, device, required).spec
            loss = times.get(written(asdict(chosen.schedule)), math.nan) / min(times.values())
            if math.isnan(loss):
                other += 1
                continue
            known.append(loss)
            if loss > SHOWN:
                best = restored_schedule(operation, min(times, key=lambda one: times[one]))
                click.echo(f"{loss:.3f} {shape} {chosen.name}, best {best.name}")
        if known:
            mean = math.exp(sum(map(math.log, known)) / len(known))
            click.echo(
                f"{path.name}: {len(known)} shapes, mean {mean:.4f}, largest {max(known):.3f}"
            )
        click.echo(f"{path.name}: {other} shapes whose choice was not measured")


def measured(path: Path) -> Iterator[tuple[Any, Any, Mapping[str, float]]]:
    """The operation and shape of each problem, and the seconds of its right schedules."""
    found: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for line in path.read_text().splitlines():
        entry = json.loads(line)
        if entry.get("outcome") == "correct":
            key = written(entry["operation"]), written(entry["shape"])
            found[key][written(entry["schedule"])] = entry["seconds"]
    for (operation, shape), times in found.items():
        restored = restore_operation(json.loads(operation))
        yield restored, restore_shape(restored.family, json.loads(shape)), times


def restored_schedule(operation: Any, schedule: str) -> KernelSpec:  # noqa: ANN401
    """The kernel of a schedule, as `written` has it."""
    fields = {name: freeze(value) for name, value in json.loads(schedule).items()}
    return KernelSpec("sm_90a", operation, family(operation.family).schedule(**fields))


def freeze(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """A value of a field: lists are tuples there."""
    return tuple(value) if isinstance(value, list) else value


def written(fields: Any) -> str:  # noqa: ANN401 (JSON)
    """The one text of equal values."""
    return json.dumps(fields, sort_keys=True)


if __name__ == "__main__":
    main()
