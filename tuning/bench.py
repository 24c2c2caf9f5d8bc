"""Any shape of an operation, measured beside the same in torch: what `warploom bench` does.

Single launches are timed behind a flush of L2, in turns (runtime/alone.py, contest.py). The kernel
is the one that calls run, held against float64; baselines are held against its result.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from warploom.errors import DeviceError
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import problem_text
from warploom.generator.shapes import Shape
from warploom.generator.specification import Operation
from warploom.printable import first_line
from warploom.runtime.alone import alone
from warploom.runtime.baselines import contender
from warploom.runtime.contest import Cell, Contender, Sampling, compete
from warploom.runtime.dispatch import Choice
from warploom.runtime.families import family

ROUNDS = 15  # that count
WARPLOOM = "warploom"


def chosen(operation: Operation, shape: Shape, target: DeviceLimits) -> Choice:
    """The kernel that calls on dense tensors run; of several ways to call, of the most general."""
    return family(operation.family).choices(operation, shape, target)[-1]


def measured(
    operation: Operation,
    shape: Shape,
    choice: Choice,
    *,
    device: str = "cuda",
    sampler: Sampling = alone,
    rounds: int = ROUNDS,
) -> Cell:
    """Measure a kernel at a shape, and every baseline, on fresh random data.

    Args:
        operation: What is computed.
        shape: On which extents.
        choice: The kernel, as `chosen` returns it.
        device: The torch device; tests name the CPU, where a reference computes.
        sampler: What times calls.
        rounds: How often each contender is timed.

    Returns:
        A cell whose first entry is Warploom's. A baseline that torch has not, or that does not fit
        the GPU's memory, is absent in it, with the reason.

    Raises:
        DeviceError: The problem itself does not fit the GPU's memory.
    """
    try:
        return _measured(operation, shape, choice, device, sampler, rounds)
    except torch.OutOfMemoryError as error:
        raise DeviceError(
            f"{problem_text(operation, shape)}: {first_line(error)}",
            rule="sets of its operands, and a reference in float64, must fit the GPU's memory",
            fix="give a smaller shape, or end what else uses the GPU",
        ) from error


def sound(cell: Cell) -> Cell:
    """Return a cell in which an error that is no number is infinite, so that it counts as wrong.

    NaN is not greater than a bound, and JSON has none: a document would take it for unchecked.
    """
    entries = [
        replace(one, error_share=math.inf) if math.isnan(one.error_share or 0) else one
        for one in cell.entries
    ]
    return replace(cell, entries=tuple(entries))


def ratio(cell: Cell) -> float | None:
    """Return the time of the fastest baseline divided by Warploom's; None unless both are right.

    A kernel that computes nothing is fast, and its time is compared with none.
    """
    return cell.ratio if cell.entries[0].right else None


def as_json(cell: Cell) -> dict[str, Any]:
    """Return a cell as documents have it, in which a wrong result has no ratio."""
    return {**cell.as_json(), "ratio": ratio(cell)}


def _measured(
    operation: Operation,
    shape: Shape,
    choice: Choice,
    device: str,
    sampler: Sampling,
    rounds: int,
) -> Cell:
    known = family(operation.family)
    with torch.no_grad():
        trial = known.trial(operation, shape, device, int.from_bytes(os.urandom(7)))
        ours = Contender(
            WARPLOOM,
            trial.calls(choice.spec),
            partial(trial.error_share, choice.spec),
            lambda: (choice.spec.name, choice.reason),
        )
        others = [contender(one, trial) for one in known.baselines(operation, trial)]
        problem = {"family": operation.family, "shape": str(shape)}
        cell = compete(
            problem_text(operation, shape),
            problem,
            [ours, *others],
            sampler=sampler,
            rounds=rounds + 1,
            discarded=1,
        )
        return sound(cell)
