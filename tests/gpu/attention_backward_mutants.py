"""Runs a backward kernel without one of its barriers: `attention_backward_mutant.py NAME`.

Exit status 0: a gradient was wrong, as it must be. 1: every gradient was right, so that the tests
would not notice if the barrier were forgotten.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import attention_backward_arena as arena
import torch
from attention_backward_cases import SIMPLE
from attention_cases import Shape
from mutant import TRIES, install

from warploom.errors import DeviceError
from warploom.generator.specification import KernelSpec

SHAPE = Shape(2, 6, 2, 1031, 1031)


@dataclass(frozen=True)
class Mutant:
    """A kernel, and what is taken out of its text."""

    kernel: KernelSpec
    without: str  # a pattern


MUTANTS = {
    "dq is multiplied before the other warpgroup has written its part of ds": Mutant(
        SIMPLE["long"], r"c\.shared\.ds_full\.wait\([^;]*\);"
    ),
    "consumers do not wait for do": Mutant(
        SIMPLE["long"], r"c\.shared\.do_full\[[^]]*\]\.wait\([^;]*\);"
    ),
    "kernels do not wait for the one before": Mutant(SIMPLE["causal"], r"griddepcontrol\.wait;\\n"),
}


def verify(mutant: Mutant, seed: int) -> None:
    """Verify one pass of the kernel, be it whole or not."""
    arena.verify(arena.make(mutant.kernel, SHAPE, seed=seed, causal=True))


def caught(mutant: Mutant) -> str | None:
    """Run the mutant on fresh data until a check fails; return how, or None."""
    for seed in range(TRIES):
        try:
            verify(mutant, seed)
            torch.cuda.synchronize()
        except AssertionError:
            return f"caught in run {seed + 1}"
        except (DeviceError, RuntimeError):
            return f"failed in run {seed + 1}"
    return None


if __name__ == "__main__":
    chosen = MUTANTS[sys.argv[1]]
    install(chosen)
    outcome = caught(chosen)
    print(outcome or "survived")
    sys.exit(0 if outcome else 1)
