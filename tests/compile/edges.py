"""The largest problem that is launched, what is said of a larger one, and programs that count."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from warploom.errors import ProblemError
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import LARGEST
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


def assert_edge(
    spec: KernelSpec,
    problem: DataclassInstance,
    field: str,
    largest: int,
    said: str = "",
) -> None:
    """The largest value of a field that is launched; one more is refused, by its name."""
    described = family(spec.operation.family)
    fields = {field: largest}
    if field in ("seq_q", "seq_k"):
        fields |= {field.replace("seq", "total"): largest}
    assert described.launches(spec, replace(problem, **fields), H200)
    fields = {name: value + 1 for name, value in fields.items()}
    with pytest.raises(ProblemError, match=re.escape(said or f"{field} {largest + 1}: ")) as told:
        described.launches(spec, replace(problem, **fields), H200)
    assert told.value.rule.startswith(f"must be smaller: kernels count to {LARGEST}, ")
