"""What the GEMM template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any, cast

from warploom.generator.elements import element
from warploom.generator.families.gemm.launch import parameters
from warploom.generator.families.gemm.layout import PRODUCER_REGISTERS, gemm_layout
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec
from warploom.generator.wgmma import wgmma


def context(spec: KernelSpec) -> dict[str, Any]:
    """What the template is rendered with, beside the spec itself."""
    operation, schedule = cast("GemmOperation", spec.operation), cast("GemmSchedule", spec.schedule)
    layout = gemm_layout(operation, schedule)
    a, d = element(operation.a), element(operation.d)
    stages_matrix = d.bits == 16 and layout.chunk_columns >= 16  # what one stmatrix moves
    return {
        "operation": operation,
        "schedule": schedule,
        "layout": layout,
        "parameters": parameters(spec),
        "accumulator": operation.accumulator,
        "a": a,
        "b": element(operation.b),
        "d": d,
        "wgmma": wgmma(
            a,
            element(operation.b),
            schedule.tile[1],
            a_k_major=layout.a.k_major,
            b_k_major=layout.b.k_major,
        ),
        "chunk_columns": layout.chunk_columns,
        "steps": [
            {"index": i, "cpp": step.cpp, "reads": step.reads, "fields": step.fields(i)}
            for i, step in enumerate(operation.epilogue)
        ],
        "parts": _parts(operation, schedule, pairs=schedule.store == "tma" and not stages_matrix),
        "reallocates_registers": schedule.consumers == 2,
        "producer_registers": PRODUCER_REGISTERS,
        "consumer_registers": layout.register_budget,
        "stage_part": "stage_matrix" if stages_matrix else "stage_pairs",
    }


def _parts(operation: GemmOperation, schedule: GemmSchedule, *, pairs: bool) -> list[str]:
    """The parts of the epilogue in the order of use, each once."""
    staging = ["pairs.cuh"] if pairs else []
    if not operation.epilogue:
        return [*staging, "epilogue_none.cuh"]
    read = "read_pairs.cuh" if schedule.store == "tma" else "read_single.cuh"
    steps = (f"epilogue/{part}" for step in operation.epilogue for part in step.parts)
    return list(dict.fromkeys((*staging, read, *steps, "epilogue.cuh.jinja")))
