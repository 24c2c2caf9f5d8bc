"""GEMM's rules: which operations and schedules are legal, and what `auto` becomes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from warploom.generator import rules
from warploom.generator.architectures import Architecture, architecture
from warploom.generator.elements import ELEMENTS
from warploom.generator.epilogue import (
    BLOCK,
    GROUP,
    Bias,
    GateGradient,
    MeanSquare,
    RmsScale,
    Scale,
    factors,
    gate_of,
    legal,
    quantizes,
    rounds_stochastically,
    scatters,
    sums_squares,
)
from warploom.generator.families._product.layout import chunks
from warploom.generator.families.gemm.layout import gemm_layout
from warploom.generator.families.gemm.scales import blocks_reason
from warploom.generator.families.gemm.schedule import (
    SPARSE_BLOCK,
    GemmOperation,
    GemmSchedule,
)
from warploom.generator.knob import knobs
from warploom.generator.tensor_maps import operand_reason
from warploom.generator.wgmma import WGMMA_M

MOST_PROMOTED = 128  # rows of wgmma of a consumer, which adds up each 64 under MMAs of others
MOST_LOADED = 12  # registers of operands of a fragment, beside sums that wait for a scale

# Blocks along (m, n): a power of two each, and as many in all as every GPU's clusters may have.
CLUSTERS = tuple((m, n) for m in (1, 2, 4, 8) for n in (1, 2, 4, 8) if m * n <= 8)


def operation_reasons(operation: GemmOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    a, b, d = ELEMENTS[operation.a], ELEMENTS[operation.b], ELEMENTS[operation.d]
    plain_int32 = a.is_integer and not operation.epilogue
    gate = gate_of(operation.epilogue)
    return rules.broken(
        [
            None
            if a == b or (a.is_fp8 and b.is_fp8)
            else f"b {b.name}: must be of the type of a, {a.name}; only fp8 types mix",
            legal(operation.epilogue) if operation.epilogue else None,
            None
            if gate is None or operation.layout_b == "col"
            else f"layout_b row with {gate.token}: must be col, as a torch weight [N, K] is after "
            ".t()",
            *(
                rules.one_of(f"d behind {step.token}", d.name, step.results)
                for step in operation.epilogue
                if step.results
            ),
            *(_quantized(operation) if quantizes(operation.epilogue) else ()),
            *(
                f"batched with {step.token}: must be false, as shares of a mean of squares are of "
                "rows of one matrix; give B without batches"
                for step in operation.epilogue
                if operation.batched and isinstance(step, MeanSquare | RmsScale)
            ),
            "epilogue with the gradient of a gate and mean_square: must be without one of them, as "
            "a norm is of what a layer passes on, and no gradient is"
            if sums_squares(operation.epilogue)
            and any(isinstance(step, GateGradient) for step in operation.epilogue)
            else None,
            "batched with stochastic_rounding: must be false, as random numbers are of rows and "
            "columns of one matrix; give B without batches, or round the result by warploom.cast"
            if operation.batched and rounds_stochastically(operation.epilogue)
            else None,
            None
            if operation.accumulation == "fast" or not a.is_integer
            else f"accumulation promoted of {a.name}: must be fast, as sums of int32 are exact",
            None
            if operation.block_scales == "none"
            or (a.is_fp8 and operation.accumulation == "promoted")
            else f"block_scales {operation.block_scales} of {a.name} with accumulation "
            f"{operation.accumulation}: must be of fp8 and promoted, as scales multiply sums over "
            "128 of k",
            None
            if operation.block_scales != "none"
            or (operation.block_scale_a, operation.block_scale_b) == ("fp32", "fp32")
            else f"block_scale_a {operation.block_scale_a}, block_scale_b "
            f"{operation.block_scale_b} without block_scales: must be fp32, where there are none",
            f"block_scales row_row with {gate.token}: must be row_block, as weights of gated "
            "layers have one scale for 128x128"
            if operation.block_scales == "row_row" and gate is not None
            else None,
            *(_sparse_operation(operation) if operation.sparse != "none" else ()),
            *(_grouped_operation(operation) if operation.groups != "none" else ()),
            *(_pieces(operation) if operation.terms > 1 else ()),
            *(_scattered(operation) if scatters(operation.epilogue) else ()),
            None
            if operation.terms in ((2, 3) if operation.whole_b else (1, 3, 6))
            else f"terms {operation.terms} with whole_b {str(operation.whole_b).lower()}: must be "
            + ("2 or 3, the pieces of A" if operation.whole_b else "1, 3 or 6"),
            None
            if operation.spans == "any" or not operation.whole_b
            else f"spans {operation.spans} with whole_b: must be any, as B has no pieces",
            None
            if a.name != "tf32" or (operation.sparse, operation.groups) == ("none", "none")
            else f"a tf32 with sparse {operation.sparse}, groups {operation.groups}: must be none",
            None
            if operation.spans == "any" or operation.terms > 1
            else f"spans {operation.spans}, terms {operation.terms}: must be any, as only "
            "pieces of fp32 values have spans",
            None
            if d.name != "int32" or plain_int32
            else f"d int32 from {a.name} with {len(operation.epilogue)} epilogue steps: "
            "int32 is for int8 operands without epilogue",
        ]
    )


def _sparse_operation(operation: GemmOperation) -> list[rules.Reason]:
    """What an operation on blocks of a sparse matrix cannot have."""
    sparse, steps = f"sparse {operation.sparse}", operation.epilogue
    tokens = ", ".join(step.token for step in steps) or "nothing"
    biased = operation.sparse != "d" and len(steps) == 2 and isinstance(steps[1], Bias)
    return [
        f"batched with {sparse}: must be false, as lists are of one matrix"
        if operation.batched
        else None,
        f"accumulation {operation.accumulation} with {sparse}: must be fast"
        if operation.accumulation != "fast"
        else None,
        f"epilogue of {tokens} with {sparse}: must be a scale by host"
        + (
            ", and leave blocks of zeros as they are"
            if operation.sparse == "d"
            else ", or a bias behind it"
        )
        if steps[:1] != (Scale("host"),) or (len(steps) > 1 and not biased)
        else None,
    ]


def _pieces(operation: GemmOperation) -> list[rules.Reason]:
    """What an operation on pieces of fp32 values cannot have."""
    told, layouts = f"terms {operation.terms}", (operation.layout_a, operation.layout_b)
    return [
        f"a {operation.a} with {told}: must be of 16 bits"
        if ELEMENTS[operation.a].bits != 16
        else None,
        f"layout_a {operation.layout_a}, layout_b {operation.layout_b} with {told}: must be row "
        "and col, as pieces are side by side along k"
        if layouts != ("row", "col")
        else None,
        f"accumulation {operation.accumulation} with {told}: must be promoted"
        if operation.accumulation != "promoted"
        else None,
        f"sparse {operation.sparse} with {told}: must be none"
        if operation.sparse != "none"
        else None,
        f"epilogue of a gate with {told}: must be without one"
        if gate_of(operation.epilogue)
        else None,
    ]


def _sparse_schedule(operation: GemmOperation, schedule: GemmSchedule) -> list[rules.Reason]:
    """What a schedule must be where a tile has the blocks of one list, or is one block."""
    sparse, (m, n, _) = f"sparse {operation.sparse}", schedule.tile
    cluster_m, cluster_n = schedule.cluster
    parts = (schedule.split_k, schedule.cluster_split_k, schedule.stream_k)
    return [
        f"tile m {m} with {sparse}: must be {SPARSE_BLOCK}, the rows of a block"
        if operation.sparse != "b" and m != SPARSE_BLOCK
        else None,
        f"tile n {n} with {sparse}: must be {SPARSE_BLOCK}, the columns of a block"
        if operation.sparse != "a" and n != SPARSE_BLOCK
        else None,
        f"cluster {schedule.cluster} with {sparse}: must be 1 along m, as blocks of a cluster have "
        "one list"
        if operation.sparse != "b" and cluster_m > 1
        else None,
        f"cluster {schedule.cluster} with {sparse}: must be 1 along n, as blocks of a cluster have "
        "one list"
        if operation.sparse == "b" and cluster_n > 1
        else None,
        f"raster {schedule.raster}, swizzle_size {schedule.swizzle_size}, cluster "
        f"{schedule.cluster} with {sparse}: must be along_m, at most 32 and (1, 1) or (1, 2), as "
        "a list is in bands of rows, of which clusters take two blocks"
        if operation.sparse == "d"
        and (schedule.raster != "along_m" or schedule.swizzle_size > 32 or cluster_n > 2)
        else None,
        f"split_k {schedule.split_k}, cluster_split_k {schedule.cluster_split_k}, stream_k "
        f"{schedule.stream_k} with {sparse}: must be 1, 1 and false, as lists differ in length"
        if parts != (1, 1, False)
        else None,
        f"swap_ab with {sparse}: must be false" if schedule.swap_ab else None,
    ]


def _grouped_operation(operation: GemmOperation) -> list[rules.Reason]:
    """What an operation whose groups end at offsets cannot have."""
    groups, layouts = f"groups {operation.groups}", (operation.layout_a, operation.layout_b)
    written = [step.token for step in operation.epilogue if step.auxiliary or step.partial]
    return [
        None if operation.batched else f"batched false with {groups}: must be true",
        f"sparse {operation.sparse} with {groups}: must be none"
        if operation.sparse != "none"
        else None,
        f"terms {operation.terms} with {groups}: must be 1" if operation.terms != 1 else None,
        f"block_scales {operation.block_scales} with {groups}: must be none, or row_block with "
        "groups rows, or row_row with groups k"
        if operation.block_scales not in ("none", "row_block" if operation.by_rows else "row_row")
        else None,
        f"layout_a {operation.layout_a} with {groups}: must be row, as groups begin at any row"
        if operation.by_rows and operation.layout_a != "row"
        else None,
        f"layout_a {layouts[0]}, layout_b {layouts[1]} with groups k: must be col and row, as "
        "groups begin at any row of k; of 8 bits row and col, where they begin at multiples of 128"
        if operation.groups == "k"
        and layouts != (("row", "col") if ELEMENTS[operation.a].bits == 8 else ("col", "row"))
        else None,
        f"epilogue of {', '.join(written)} with {groups}: must be without outputs beside D"
        if written
        else None,
    ]


def _scattered(operation: GemmOperation) -> list[rules.Reason]:
    """What an operation whose rows are scattered cannot have."""
    token = operation.epilogue[-1].token
    return [
        f"batched with {token}: must be false, as indices are of rows of one matrix; flatten the "
        "batches to rows, or use groups rows"
        if operation.batched and operation.groups == "none"
        else None,
        f"groups {operation.groups} with {token}: must be none or rows, whose rows follow each "
        "other in one matrix"
        if operation.groups in ("masked", "k")
        else None,
        f"terms {operation.terms} with {token}: must be 1; write the rows to D[index] afterwards"
        if operation.terms > 1
        else None,
    ]


def _grouped_schedule(operation: GemmOperation, schedule: GemmSchedule) -> list[rules.Reason]:
    """What a schedule must be where only the device knows how many tiles there are."""
    split = (schedule.split_k, schedule.cluster_split_k)
    return [
        f"split_k {split[0]}, cluster_split_k {split[1]} with groups {operation.groups}: must be "
        "1 and 1, as groups differ in size"
        + "; use stream_k, which shares the k tiles of those that have rows"
        * operation.by_rows
        if split != (1, 1)
        else None,
        "stream_k with groups k: must be false, as tiles differ in their k tiles"
        if schedule.stream_k and operation.groups == "k"
        else None,
    ]


def _quantized(operation: GemmOperation) -> list[rules.Reason]:
    """What a D whose blocks of columns have scales cannot be."""
    steps, token = operation.epilogue, operation.epilogue[-1].token
    loaded = sum(
        step.registers(paired=False) * factors(steps, index)
        for index, step in enumerate(steps[:-1])
        if step.reads != "row"
    )
    return [
        f"batched with {token}: must be false, as scales have rows and blocks of columns"
        if operation.batched
        else None,
        f"a int8 with {token}: must be of floats" if operation.a == "int8" else None,
        f"epilogue with {token}, behind a gate or of promoted sums, whose other steps load "
        f"{loaded} registers of a fragment: at most {MOST_LOADED}; use fewer epilogue operands"
        if loaded > MOST_LOADED and (gate_of(steps) or operation.accumulation == "promoted")
        else None,
        f"accumulation promoted with {token} of a gate: must be fast, as sums of 256 columns are "
        "held twice"
        if operation.accumulation == "promoted" and gate_of(operation.epilogue)
        else None,
    ]


def _blocks(operation: GemmOperation, schedule: GemmSchedule) -> list[rules.Reason]:
    """What a schedule must be where a tile has whole blocks of D's columns that share a scale."""
    token = operation.epilogue[-1].token
    columns = BLOCK * factors(operation.epilogue, 0)
    return [
        rules.multiple_of(
            f"tile n with {token}", schedule.tile[1], columns * schedule.cluster_split_k
        ),
        f"swap with {token}: must be false" if schedule.swap_ab else None,
        f"split_k {schedule.split_k} with {token}: must be 1, as the second launch has a few "
        "columns a block"
        if schedule.split_k > 1
        else None,
    ]


def schedule_reasons(
    arch: Architecture, operation: GemmOperation, schedule: GemmSchedule
) -> list[str]:
    """Why the schedule does not fit the operation on `arch`; empty when it does.

    That each field holds a value that it is declared with is seen to before, by `rules.fields`.
    """
    _, _, k = schedule.tile
    rows, columns = ("n", "m") if schedule.swap_ab else ("m", "n")
    a, d_bits = ELEMENTS[operation.a], ELEMENTS[operation.d].bits
    gate = gate_of(operation.epilogue)
    wgmma_rows, wgmma_columns = schedule.rows, schedule.columns
    first = rules.broken(
        [
            rules.one_of(f"tile {rows}", wgmma_rows, (64, 128, 256)),
            rules.wgmma_n(f"tile {columns}", wgmma_columns, integer=a.is_integer),
            rules.one_of("tile k", k, (1024 // a.bits,)),
            rules.one_of("cluster", schedule.cluster, CLUSTERS),
            None
            if schedule.kernel_schedule == "cooperative" or schedule.consumers == 2
            else f"kernel_schedule pingpong with {schedule.consumers} consumer: takes two",
            None
            if schedule.producer_registers == 40
            or (schedule.consumers == 2 and schedule.cluster_size == 1)
            else f"producer_registers {schedule.producer_registers} with cluster "
            f"{schedule.cluster}, {schedule.consumers} consumers: must be 40, unless there are two "
            "consumers and no cluster, whose multicast takes more",
            None
            if schedule.producer_registers == 40
            or not schedule.stream_k
            or (gate is None and not any(step.loads for step in operation.epilogue))
            else f"producer_registers {schedule.producer_registers} with stream_k and a gate: must "
            "be 40, as the producer counts the parts of tiles",
            None
            if schedule.producer_registers == 40 or not schedule.stream_k or not operation.by_rows
            else f"producer_registers {schedule.producer_registers} with stream_k, groups "
            f"{operation.groups}: must be 40, as the producer divides the tiles of groups",
            None
            if gate is None
            or not operation.batched
            or schedule.consumers == 1
            or schedule.cluster_size == 1
            else f"cluster {schedule.cluster} with batched, {gate.token}, {schedule.consumers} "
            f"consumers: must be (1, 1), as {schedule.producer_registers} registers do not hold "
            "five coordinates beside a multicast; or use 1 consumer",
            None
            if operation.block_scales != "row_row"
            or not operation.batched
            or (schedule.split_k == 1 and not schedule.stream_k and schedule.multicast == 1)
            else f"batched with block_scales row_row, split_k {schedule.split_k}, stream_k "
            f"{schedule.stream_k}, cluster {schedule.cluster}: must be 1, false and (1, 1), as "
            "warps of the producer have too few registers to find their scales otherwise",
            None
            if schedule.producer_registers == 40 or operation.block_scales == "none"
            else f"producer_registers {schedule.producer_registers} with block_scales "
            f"{operation.block_scales}: must be 40, for the warps that compute addresses of scales",
            None
            if schedule.cluster_split_k == 1
            or (schedule.cluster == (1, 1) and schedule.kernel_schedule == "cooperative")
            else f"cluster_split_k {schedule.cluster_split_k} with cluster {schedule.cluster}, "
            f"kernel_schedule {schedule.kernel_schedule}: takes a cluster of its own, (1, 1), and "
            "consumers that share a tile, cooperative",
            None
            if schedule.cluster_split_k == 1 or operation.terms == 1
            else f"cluster_split_k {schedule.cluster_split_k}, terms {operation.terms}: must be "
            "1, as past the end of k there are other pieces; use split_k",
            None
            if schedule.cluster_split_k == 1
            else rules.multiple_of(f"tile {columns}", wgmma_columns, 8 * schedule.cluster_split_k),
            None
            if gate is None or schedule.swap_ab
            else rules.multiple_of(
                f"tile {columns} with {gate.token}", wgmma_columns, 16 * schedule.cluster_split_k
            ),
            *(_blocks(operation, schedule) if quantizes(operation.epilogue) else ()),
            *(_sparse_schedule(operation, schedule) if operation.sparse != "none" else ()),
            *(_grouped_schedule(operation, schedule) if operation.groups != "none" else ()),
            None
            if schedule.swap_ab or not sums_squares(operation.epilogue)
            else rules.multiple_of(
                f"tile {columns} with {operation.epilogue[-1].token}",
                wgmma_columns,
                GROUP * schedule.cluster_split_k,
            ),
            None
            if schedule.split_k == 1
            or (
                schedule.cluster_split_k == 1
                and not schedule.stream_k
                and schedule.kernel_schedule == "cooperative"
            )
            else f"split_k {schedule.split_k} with cluster_split_k {schedule.cluster_split_k}, "
            f"stream_k {schedule.stream_k}, kernel_schedule {schedule.kernel_schedule}: must be "
            "1, unless k is shared in no other way (cluster_split_k 1, stream_k false) and "
            "consumers share a tile (cooperative)",
            None
            if not schedule.stream_k or schedule.kernel_schedule == "cooperative"
            else f"stream_k with kernel_schedule {schedule.kernel_schedule}: must be cooperative, "
            "as a part of a tile is of all consumers",
        ]
    )
    if first:  # what follows would divide by them
        return first
    layout = gemm_layout(operation, schedule)
    blocks = rules.multiple_of(f"tile {rows}", wgmma_rows, WGMMA_M * schedule.sharing)
    return rules.broken(
        [
            None
            if schedule.store == "direct" or not schedule.swap_ab or d_bits == 16
            else f"store tma with swap_ab, d {operation.d}: takes 16-bit types; use store direct",
            None
            if chunks(operation, schedule)
            else f"store tma, tile {columns} {schedule.finished}: rows of staging are 16 bytes or "
            "more, and 16 of them when swapped; use a multiple of 16 for each block that shares "
            "the tile, or store direct",
            None
            if schedule.cluster_split_k == 1
            or layout.sums_bytes <= layout.stages * layout.stage_bytes
            else f"cluster_split_k {schedule.cluster_split_k}, stages {schedule.stages}: the "
            f"{layout.sums_bytes} bytes of a tile's sums lie where stages were, which have "
            f"{layout.stage_bytes} each; use more stages",
            blocks and f"{blocks} for {schedule.sharing} consumers sharing it",
            None
            if operation.accumulation == "fast" or wgmma_rows <= MOST_PROMOTED * schedule.sharing
            else f"accumulation promoted, tile {rows} {wgmma_rows} for {schedule.sharing} "
            f"consumers sharing it: must be at most {MOST_PROMOTED} each, as MMAs of more are "
            "serialised",
            None if operation.block_scales == "none" else blocks_reason(operation, schedule),
            operand_reason("a", layout.a),
            operand_reason("b", layout.b),
            rules.fits_registers(layout.registers, layout.register_budget),
            rules.fits_shared(layout.shared_bytes, arch),
        ]
    )


def complete(arch: str, operation: GemmOperation, fields: Mapping[str, Any]) -> GemmSchedule:
    """Make a schedule of `fields`; `stages: auto` becomes as many as fill shared memory."""
    if fields.get("stages", "auto") != "auto":
        return GemmSchedule(**fields)
    schedule = GemmSchedule(**{**fields, "stages": 2})
    layout = gemm_layout(operation, schedule)
    room = architecture(arch).shared_bytes // 1024 * 1024
    room -= layout.fixed_bytes - layout.operand_bytes + layout.group_bytes
    stages = room // max(1, layout.stage_bytes + layout.scale_bytes + 2 * 8)
    return replace(schedule, stages=knobs(GemmSchedule)["stages"].nearest(stages))
