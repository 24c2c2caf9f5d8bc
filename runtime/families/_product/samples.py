"""Random operands of an epilogue, as calls of an operation at a shape have them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from warploom.generator.epilogue import EpilogueStep
from warploom.runtime.families._product.steps import STEPS
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import Draws, Item


def items(steps: tuple[EpilogueStep, ...], draws: Draws, at: Extents) -> Iterator[Item]:
    """An item for each step, in order, where products are `at`."""
    for step in steps:
        yield STEPS[step.step].sample(step, draws, at)
        at = replace(at, n=step.columns(at.n))
