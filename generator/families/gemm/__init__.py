"""GEMM: D[m, n] = epilogue(A[m, k] B[k, n]), on Hopper's TMA and wgmma."""

from __future__ import annotations

from warploom.generator.families.family import Family
from warploom.generator.families.gemm.launch import (
    Batches,
    GemmProblem,
    launches,
    parameters,
    tiles,
    workspaces,
)
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.names import parse_name
from warploom.generator.families.gemm.rules import complete, operation_reasons, schedule_reasons
from warploom.generator.families.gemm.schedule import (
    Accumulation,
    GemmOperation,
    GemmSchedule,
    Layout,
)
from warploom.generator.families.gemm.template import context

__all__ = [
    "FAMILY",
    "Accumulation",
    "Batches",
    "GemmLayout",
    "GemmOperation",
    "GemmProblem",
    "GemmSchedule",
    "Layout",
    "complete",
    "gemm_layout",
    "tiles",
]

FAMILY = Family(
    name="gemm",
    template="gemm.cu.jinja",
    operation=GemmOperation,
    schedule=GemmSchedule,
    automatic=("stages",),
    operation_reasons=operation_reasons,
    schedule_reasons=schedule_reasons,
    complete=complete,
    parse_name=parse_name,
    parameters=parameters,
    context=context,
    launches=launches,
    workspaces=workspaces,
)
