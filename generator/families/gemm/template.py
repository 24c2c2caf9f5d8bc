"""What the GEMM template is rendered with: the spec's choices as constants and parts."""

from __future__ import annotations

from typing import Any

from warploom.generator.elements import element
from warploom.generator.families.gemm import partials
from warploom.generator.families.gemm.layout import gemm_layout, held
from warploom.generator.families.gemm.parameters import partial_name
from warploom.generator.families.gemm.problem import rows_of_partial
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule, GemmSpec
from warploom.generator.wgmma import wgmma


def context(spec: GemmSpec) -> dict[str, Any]:
    """What this family's template is rendered with beside what every family's is."""
    operation, schedule = spec.operation, spec.schedule
    layout = gemm_layout(operation, schedule)
    d = element(operation.d)
    row_side, column_side = ("b", "a") if schedule.swap else ("a", "b")
    majors = {"a": layout.a.k_major, "b": layout.b.k_major}
    stage_part = _stage_part(operation, schedule)
    return {
        "accumulator": operation.accumulator,
        "d": d,
        "wgmma": wgmma(
            element(getattr(operation, row_side)),
            element(getattr(operation, column_side)),
            schedule.columns,
            a_k_major=majors[row_side],
            b_k_major=majors[column_side],
        ),
        "steps": [_step(operation, schedule, index) for index in range(len(operation.epilogue))],
        "rows_of_partial": rows_of_partial(schedule),
        "total_columns": partials.COLUMNS,
        "total_parts": partials.THREADS // partials.COLUMNS,
        "total_threads": partials.THREADS,
        "auxiliary": any(step.auxiliary for step in operation.epilogue),
        "parts": _parts(operation, schedule),
        "reallocates_registers": schedule.consumers == 2,
        "stage_part": stage_part,
        "order": _order(operation, schedule),
    }


def _step(operation: GemmOperation, schedule: GemmSchedule, index: int) -> dict[str, Any]:
    """What the template needs of a step: its class, its constructor's arguments, what it holds."""
    step = operation.epilogue[index]
    partial = partial_name(operation, index) if step.partial else ""
    arguments = [f"p.{field.name}" for field in step.fields(index)]
    if partial:
        batch = f" + batch * p.{partial}_partial_batch" if operation.batched else ""
        arguments = [f"p.{partial}_partial{batch}"]
    elif operation.batched and (apart := step.batch_field(index)):
        arguments[0] += f" + batch * p.{apart.name}"
    return {
        "index": index,
        "cpp": step.cpp,
        "held": held(step, schedule),
        "arguments": arguments,
        "auxiliary": step.auxiliary,
        "partial": partial,
    }


def _order(operation: GemmOperation, schedule: GemmSchedule) -> str:
    """The part that keeps the consumers in step."""
    shared = schedule.sharing == 2 and operation.accumulation == "promoted"
    return "staggered" if shared else schedule.roles


def _stage_part(operation: GemmOperation, schedule: GemmSchedule) -> str:
    if schedule.swap:
        return "stage_transposed"
    chunk_columns = gemm_layout(operation, schedule).chunk_columns
    matrix = element(operation.d).bits == 16 and chunk_columns >= 16  # what one stmatrix moves
    return "stage_matrix" if matrix else "stage_pairs"


def _parts(operation: GemmOperation, schedule: GemmSchedule) -> list[str]:
    """The parts of the epilogue in the order of use, each once."""
    d = element(operation.d)
    kind = "integer" if d.is_integer else "packed"
    convert = f"gemm/convert_{kind}.cuh.jinja" if d.bits < 32 else "gemm/convert_none.cuh"
    last = ("gemm/pair.cuh", convert)
    if not operation.epilogue:
        return ["gemm/epilogue_none.cuh", *last]
    pairs = "pairs" if schedule.store == "tma" and not schedule.swap else "single"
    first = [f"gemm/read_{pairs}.cuh"]
    if any(step.auxiliary and step.pitched for step in operation.epilogue):
        first.append(f"gemm/write_{pairs}.cuh")
    steps = (
        part if "/" in part else f"gemm/epilogue/{part}"
        for step in operation.epilogue
        for part in step.parts
    )
    return list(dict.fromkeys((*first, *steps, "gemm/epilogue.cuh.jinja", *last)))
