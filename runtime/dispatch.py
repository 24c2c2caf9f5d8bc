"""Which kernel a problem gets: the spec that was given, else the first class that fits in a table.

The tables are measured and lie in configs/; no shape is decided by a branch in code.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import yaml

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.elements import element
from warploom.generator.families.gemm import GemmOperation, GemmSchedule, complete
from warploom.generator.families.gemm_launch import GemmProblem
from warploom.generator.specification import KernelSpec

ARCH = "sm_90a"


@dataclass(frozen=True, slots=True)
class Choice:
    """The kernel of a problem, and why it is this one."""

    spec: KernelSpec
    reason: str


@cache
def _table() -> list[dict[str, Any]]:
    text = resources.files("warploom.configs").joinpath("gemm_schedules.yaml").read_text()
    classes: list[dict[str, Any]] = yaml.safe_load(text)["classes"]
    return classes


def choose(
    operation: GemmOperation, problem: GemmProblem, store: str, spec: KernelSpec | None
) -> Choice:
    """Return the kernel for a problem whose D can be stored as `store` (tma or direct).

    A given `spec` must compute this operation and be able to store D.
    """
    if spec is not None:
        return Choice(_checked(spec, operation, store), "the spec that was given")
    for index, row in enumerate(_table()):
        if not _fits(row, operation, problem):
            continue
        fields = {key: tuple(v) if isinstance(v, list) else v for key, v in row["schedule"].items()}
        fields["store"] = store
        try:
            schedule = complete(ARCH, operation, fields)
            return Choice(KernelSpec(ARCH, operation, schedule), f"class {index} of the table")
        except SpecificationError:
            continue  # the class's tile does not fit this operation: the next one may
    # Every table ends in a class that fits whatever the operation's own rules allow; a legal
    # operation gets here only where they refuse it.
    KernelSpec(ARCH, operation, GemmSchedule(tile=(128, 64, 64), stages=2))
    raise ProblemError(f"operation {operation}", rule="has no class in the table", fix="pass spec")


def _fits(row: dict[str, Any], operation: GemmOperation, problem: GemmProblem) -> bool:
    limits = row.get("when", {})
    if element(operation.a).bits not in limits.get("bits", (8, 16)):
        return False
    for extent in ("m", "n", "k"):
        low, high = limits.get(extent, (0, 2**31))
        if not low <= getattr(problem, extent) <= high:
            return False
    low, high = limits.get("tiles", (0, 2**31))
    tile_m, tile_n, _ = row["schedule"]["tile"]
    tiles = -(-problem.m // tile_m) * -(-problem.n // tile_n)
    return bool(low <= tiles <= high)


def _checked(spec: KernelSpec, operation: GemmOperation, store: str) -> KernelSpec:
    if not isinstance(spec.operation, GemmOperation) or spec.operation != operation:
        raise ProblemError(
            f"spec {spec.name}",
            rule=f"computes another operation; this call needs {'_'.join(operation.tokens)}",
            fix="leave spec out, or pass one of this operation",
        )
    assert isinstance(spec.schedule, GemmSchedule)
    if spec.schedule.store == "tma" and store == "direct":
        raise ProblemError(
            f"spec {spec.name}",
            rule="stores by TMA: D's address, rows and pitch are multiples of 16 bytes, and "
            "epilogue operands start at pairs",
            fix="use a spec with store: direct, or leave spec out",
        )
    return spec
