"""The largest problem that launches let through, and whether a program counts to its end."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.limits import LARGEST
from warploom.generator.specification import KernelSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

H200 = DeviceLimits(132)


def counts(program: Path, line: str) -> bool:
    """Whether the program comes to its end."""
    done = subprocess.run([str(program)], input=line, text=True, check=False)
    assert done.returncode <= 0, "a place is wrong"
    return done.returncode == 0


def accepted(spec: KernelSpec, problem: object) -> bool:
    try:
        family(spec.operation.family).launches(spec, problem, H200)
    except ProblemError:
        return False
    return True


def largest(spec: KernelSpec, problem: DataclassInstance, *fields: str) -> int:
    """The largest value of some fields that is launched."""
    low, high = 1, LARGEST
    while low < high:
        middle = (low + high + 1) // 2
        fits = accepted(spec, replace(problem, **dict.fromkeys(fields, middle)))
        low, high = (middle, high) if fits else (low, middle - 1)
    return low
