"""The fields of a product's parameter block that do not depend on what B is."""

from __future__ import annotations

from warploom.generator.elements import element
from warploom.generator.families._product.launch import AtLaunch
from warploom.generator.families._product.problem import parts_of_k
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.parameters import Field, int32, int64, pointer, tensor_map


def operand_a(*, trimmed: bool) -> list[Field[AtLaunch]]:
    """The maps of A; `trimmed`: the last tile along m has one of its own."""
    a_map: Field[AtLaunch] = tensor_map("a_map", "A, in operand boxes", AtLaunch.a_map)
    fields = [a_map]
    if trimmed:
        fields.append(tensor_map("a_tail_map", "A, in boxes of the tail", AtLaunch.a_tail_map))
    return fields


def finished(operation: ProductOperation, schedule: ProductSchedule) -> list[Field[AtLaunch]]:
    """Where D lies, and what each step of the epilogue reads and stores."""
    fields = _stored(operation, schedule)
    for index, step in enumerate(operation.epilogue):
        fields += step.fields(index)
        if step.partial:
            fields += _partial(operation, index)
    return fields


def extents(
    operation: ProductOperation, schedule: ProductSchedule, *, trimmed: bool
) -> list[Field[AtLaunch]]:
    """How large D is and how much is summed; where parts of tiles are left, if k is shared."""
    fields: list[Field[AtLaunch]] = []
    if trimmed:
        meaning = "of A in the last tile along m, in eights"
        fields.append(int32("a_tail_rows", meaning, lambda at: at.tail.extent))
    fields += [
        int32("m", "rows of D", lambda at: at.problem.m),
        int32("n", "columns of D", lambda at: at.problem.n),
        int32("k", "products summed", lambda at: at.problem.k),
    ]
    if schedule.split_k > 1:
        return fields + _split_k(operation)
    return fields + (_cut(operation) if schedule.stream_k else [])


def partial_name(operation: ProductOperation, step: int) -> str:
    """What the field of a step's sums is called, and what is called after it."""
    return operation.epilogue[step].fields(step)[0].name


def _partial(operation: ProductOperation, step: int) -> list[Field[AtLaunch]]:
    name = partial_name(operation, step)
    fields: list[Field[AtLaunch]] = [
        pointer(f"{name}_partial", "float", "partial[groups of rows][n]"),
        int64(f"{name}_groups", "partial sums of one sum", lambda at: at.groups(step)),
    ]
    if operation.batched:
        meaning = "elements between the partial sums of batches"
        fields.append(int64(f"{name}_partial_batch", meaning, lambda at: at.partial_batch()))
    return fields


def _stored(operation: ProductOperation, schedule: ProductSchedule) -> list[Field[AtLaunch]]:
    if schedule.store == "tma":
        return [tensor_map("d_map", "D, in staging boxes", AtLaunch.d_map)]
    fields: list[Field[AtLaunch]] = [
        pointer("d", element(operation.d).cpp, "D[m][pitch]"),
        int64("d_pitch", "elements between rows of D", lambda at: at.problem.pitch_d),
    ]
    if operation.batched:
        meaning = "elements between batches of D"
        fields.append(int64("d_batch", meaning, lambda at: at.problem.batch_pitch_d))
    return fields


def _cut(operation: ProductOperation) -> list[Field[AtLaunch]]:
    return [
        pointer("parts", operation.accumulator.cpp, "sums of parts of tiles, by blocks"),
        pointer("raised", "int", "a flag for each warp of each block that leaves a part"),
        int32("cut", "tiles that are cut: the first", lambda at: at.cut.tiles),
    ]


def _split_k(operation: ProductOperation) -> list[Field[AtLaunch]]:
    return [
        pointer("partial_tiles", operation.accumulator.cpp, "sums of each part of k, by tiles"),
        int32("k_parts", "parts of k", lambda at: parts_of_k(at.schedule, at.problem)),
    ]
