"""What every product's template is rendered with: the steps of the epilogue, and their parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from warploom.generator.elements import element
from warploom.generator.epilogue import (
    GROUP,
    Amax,
    gate_of,
    quantizes,
    rounds_stochastically,
    scatters,
    sums_squares,
)
from warploom.generator.families._product import launch
from warploom.generator.families._product.groups import MOST_GROUPS
from warploom.generator.families._product.launch import rows_of_partial
from warploom.generator.families._product.layout import (
    STORE_BUFFERS,
    ProductLayout,
    halved,
    held,
    in_pairs,
    preparing,
)
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.families._product.steps import StepText
from warploom.generator.header import Memory, counted
from warploom.generator.wgmma import WARPGROUP, TemplateText


def context(
    operation: ProductOperation,
    schedule: ProductSchedule,
    layout: ProductLayout,
    *,
    groups: str = "none",
    exchanged: bool = False,
    ahead: bool = True,
) -> dict[str, Any]:
    """What the shared parts are rendered with, in addition to what every family's are.

    `groups`: of what the groups of an operation are; `exchanged`: whether a gate and up take turns
    in the rows of wgmma; `ahead`: whether consumers load operands of fragments a chunk ahead.
    """
    steps = [StepText(operation, schedule, index) for index in range(len(operation.epilogue))]
    # The store has the indices of rows, of which `Epilogue` knows nothing.
    scatter = steps.pop() if scatters(operation.epilogue) else None
    whole = quantizes, rounds_stochastically, sums_squares
    # All but a last step that takes a chunk at a time, which has the values of all others.
    applied = steps[:-1] if any(last(operation.epilogue) for last in whole) else steps
    # For how long threads hold what steps read: a `block` of 64 rows of wgmma, or a `fragment`.
    loads = {held(step, schedule) for step in operation.epilogue} & {"block", "fragment"}
    auxiliary, of_value = any(step.auxiliary for step in applied), halved(operation, schedule)[1]
    placed = bool(loads) or auxiliary  # whether steps need the place in D
    gate = gate_of(operation.epilogue)
    # Gate and up of a step before the gate, where it reads or stores columns of its own.
    kept = {"fragment", "place", *["block"] * schedule.swap_ab}
    applies = {
        "gate_in_columns": of_value == 2,
        "single_values": of_value == 1,
        "gate_exchanged": exchanged,
        "gate_beside_up": gate is not None and not exchanged,
        "gate_in_rows": gate is not None and schedule.swap_ab,
        "groups_of_rows": groups == "rows",
        "batched": operation.batched and groups != "rows",
        "operands_of_block": "block" in loads,
        "operands_of_fragment": "fragment" in loads,
        "operands_ahead": ahead and "fragment" in loads,
        "step_places": auxiliary,
    }
    return {
        "accumulator": operation.accumulator,
        "paired": False,  # whether clusters take tiles of a list, that share A where it lets them
        "d": element(operation.d),
        "steps": steps,
        "applied": applied,
        "members": _members(steps, placed=placed, m_end="p.m" if groups != "rows" else "m_end"),
        "parameters_of_steps": [
            *["const Block& block"] * ("block" in loads),
            *["const Operands& operands"] * ("fragment" in loads),
            *["const Coordinates& at"] * auxiliary,
        ],
        "rows_of_partial": rows_of_partial(schedule),
        "total_columns": launch.PARTIAL_COLUMNS,
        "total_parts": launch.PARTIAL_THREADS // launch.PARTIAL_COLUMNS,
        "total_threads": launch.PARTIAL_THREADS,
        "loads": loads,
        "finishing": [i for i, step in enumerate(operation.epilogue) if isinstance(step, Amax)],
        "auxiliary": auxiliary,
        "placed": placed,
        "scatter": scatter,
        "store_part": "scattered" if scatter and schedule.store == "tma" else schedule.store,
        "quantized": len(steps) - 1 if quantizes(operation.epilogue) else None,
        "calls_of_chunk": lambda chunk: [call for step in steps for call in step.of_chunk(chunk)],
        "prepared": next(
            (index for index, step in enumerate(operation.epilogue) if step.prepared), None
        ),
        "factor_sets": schedule.consumers // preparing(schedule),
        "group_columns": GROUP,
        "gate": gate,
        "columns_before_gate": any(step.place == "before" and step.held in kept for step in steps),
        # Whether a thread has to know where in D its accumulators are.
        "located": placed
        or len(applied) < len(steps)
        or schedule.store == "direct"
        or schedule.split_k > 1,
        "factors": of_value,
        "accumulators_of_fragment": 4 * of_value,
        "mma_fragments": "kFragments * 2" if of_value == 2 else "kFragments",
        # The sides of D that wgmma's rows and columns are of, and where in a fragment of D the i-th
        # of its accumulators is.
        "row_side": "n" if schedule.swap_ab else "m",
        "column_side": "m" if schedule.swap_ab else "n",
        "i_of_fragment": "[i % 2][i / 2]" if schedule.swap_ab else "[i / 2][i % 2]",
        "columns_of_d": "p.n / 2" if gate else "p.n",
        "parts": [f"_product/{name}.cuh.jinja" for name, has in applies.items() if has],
        "epilogue_parts": _epilogue_parts(operation, schedule),
        "reallocates_registers": schedule.consumers == 2,
        "stage_part": _stage_part(operation, schedule, layout),
        "split_k": schedule.split_k > 1,
        "listed": False,
        "varied": False,
        "groups": groups,
        "most_parts": launch.MOST_PARTS,
        "exchange": 0,  # k tiles that a cut of groups must save; 0: it is made wherever it can be
        "reduction_threads": WARPGROUP,
        **_fragment(operation),
        "parts_at_once": launch.parts_at_once(layout),
    }


def _fragment(operation: ProductOperation) -> dict[str, str]:
    """The PTX type of an accumulator, and the operands of an asm that loads four of them.

    `kept`: where the asm may load nothing, and leaves what is there.
    """
    kind, letter = ("b32", "r") if operation.accumulator.is_integer else ("f32", "f")
    operands = ", ".join(f'"={letter}"(found.value[{i}])' for i in range(4))
    return {
        "fragment_type": kind,
        "fragment_outputs": TemplateText(operands),
        "fragment_kept": TemplateText(operands.replace("=", "+")),
    }


def _members(steps: list[StepText], *, placed: bool, m_end: str) -> list[str]:
    """The members that the constructor of `Epilogue` sets, with what they are set to."""
    return [*(f"m({m_end})", "n(p.n)") * placed, *(step.member for step in steps)]


def _stage_part(
    operation: ProductOperation, schedule: ProductSchedule, layout: ProductLayout
) -> str:
    if schedule.swap_ab:
        return "stage_transposed"
    # What one stmatrix moves.
    columns = layout.chunk_columns // halved(operation, schedule)[1]
    matrix = element(operation.d).bits == 16 and columns >= 16
    return "stage_matrix" if matrix else "stage_pairs"


def _epilogue_parts(operation: ProductOperation, schedule: ProductSchedule) -> list[str]:
    """The parts of the epilogue in the order of use, each once."""
    d = element(operation.d)
    kind = "integer" if d.is_integer else "packed"
    convert = f"_product/convert_{kind}.cuh.jinja" if d.bits < 32 else "_product/convert_none.cuh"
    if d.name == "bf16" and rounds_stochastically(operation.epilogue):
        convert = "_product/convert_truncated.cuh"
    last = ["_product/pair.cuh", convert]
    if scatters(operation.epilogue):
        last.append("_product/epilogue/scatter.cuh")
    epilogue = operation.epilogue[: -1 if scatters(operation.epilogue) else None]
    if not epilogue:
        return last
    pairs = "pairs" if in_pairs(operation, schedule) else "single"
    reading = [step for step in epilogue if not step.auxiliary or step.loads]
    columns = any(step.reads in ("column", "fragment") for step in reading)
    first = [f"_product/read_{pairs}.cuh"] * columns
    if any(step.auxiliary and step.reads == "fragment" for step in epilogue):
        first.append(f"_product/write_{pairs}.cuh")
    steps = (
        part if "/" in part else f"_product/epilogue/{part}"
        for step in epilogue
        for part in step.parts
    )
    return list(dict.fromkeys((*first, *steps, "_product/epilogue.cuh.jinja", *last)))


# ---- What the heads of GEMMs' sources say of shared memory ---------------------------------------

PAIR_BYTES = 16  # a full and an empty barrier of a stage


def staging(layout: ProductLayout) -> Iterator[Memory]:
    """Yield the buffers that D is staged in, if it is."""
    if layout.store_bytes:
        each = layout.staging_bytes // STORE_BUFFERS
        consumers = counted(layout.consumers, "consumer")
        factors = f"{consumers} * {STORE_BUFFERS} buffers * {each}"
        yield Memory("staging", factors, layout.store_bytes)


def tables(layout: ProductLayout, group_bytes: int) -> Iterator[Memory]:
    """Yield the factors of rows and the table of groups, where a kernel has them."""
    factors = layout.kept_factor_bytes
    if factors:
        yield Memory("factors", f"{factors // 4} rows * 4", factors)
    if group_bytes:
        integers = group_bytes // (4 * (MOST_GROUPS + 1)) * (MOST_GROUPS + 1)
        yield Memory("groups", f"{integers} integers * 4", 4 * integers)


def pipeline(stages: int) -> Memory:
    """Return the shared memory of the barriers of a ring of stages."""
    return Memory("full, empty", f"{stages} stages * 2 * 8", stages * PAIR_BYTES)


def schedule_line(schedule: ProductSchedule, by: str, shares: str = "") -> str:
    """Return how D is divided into tiles, and these among CTAs; `by`: what computes a tile."""
    split = schedule.cluster_split_k
    words = (
        f"tile {'x'.join(map(str, schedule.tile))}{by}",
        counted(schedule.consumers, "consumer"),
        shares,
        f"k split over {split} CTAs" * (split > 1),
        f"{schedule.stages} stages",
        schedule.raster,
        f"swizzle {schedule.swizzle_size}",
        f"store {schedule.store}",
    )
    return f"  {', '.join(filter(None, words))}"
