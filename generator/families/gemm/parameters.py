"""The parameter block of a GEMM: what every kernel reads, then the fields of each step."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from warploom.generator import launches
from warploom.generator.elements import Element, element
from warploom.generator.families.gemm.cut import Cut, cut
from warploom.generator.families.gemm.layout import GemmLayout, gemm_layout
from warploom.generator.families.gemm.problem import Batches, GemmProblem, row_groups
from warploom.generator.families.gemm.schedule import GemmOperation, GemmSchedule, GemmSpec
from warploom.generator.parameters import (
    Field,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
    tensor_map,
)
from warploom.generator.tensor_maps import OperandTile, TensorMap


class AtLaunch(launches.AtLaunch[GemmOperation, GemmSchedule, GemmProblem]):
    """What a GEMM's parameters are functions of: `epilogue.Pitches`, too."""

    @cached_property
    def layout(self) -> GemmLayout:
        """Where everything of one block lies."""
        return gemm_layout(self.operation, self.schedule)

    @cached_property
    def tail(self) -> OperandTile:
        """The last tile of A along m, with no more rows than there are, in eights for each slice.

        TMA takes its time to fill the rest with zeros (at m = 1, 22.8 us became 16.3 for a weight
        of 6144 x 4096), and the rows of D that they would make are not stored.
        """
        tile = self.layout.a
        rows = (self.problem.m - 1) % tile.extent + 1
        eights = 8 * tile.slices
        return replace(tile, extent=-(-rows // eights) * eights)

    @cached_property
    def cut(self) -> Cut:
        """How tiles go to clusters."""
        return cut(self.schedule, self.problem, self.device)

    def a_map(self) -> TensorMap:
        """Of the tiles of A, but for the last where that one is trimmed.

        A single row of tiles is all tail; equal maps are encoded once.
        """
        single = self.layout.trims_a and self.problem.m <= self.layout.a.extent
        return self._operand("a", self.tail if single else self.layout.a)

    def a_tail_map(self) -> TensorMap:
        """Of the last tile of A along m."""
        return self._operand("a", self.tail)

    def b_map(self) -> TensorMap:
        """Of the tiles of B."""
        return self._operand("b", self.layout.b)

    def d_map(self) -> TensorMap:
        """Of the staging boxes of D."""
        problem = self.problem
        return self._tensor_map(
            "d",
            element(self.operation.d),
            ((problem.n, problem.m), problem.pitch_d),
            self.layout.store_box,
            Batches(problem.batches, problem.batch_pitch_d),
            span=self.layout.store_span,
        )

    def pitch(self, step: int) -> int:
        """Elements from row to row of the matrix that a step reads."""
        steps = enumerate(self.operation.epilogue)
        pitched = [i for i, one in steps if one.pitched]
        return dict(zip(pitched, self.problem.pitch_c, strict=True))[step]

    def batch_pitch(self, step: int) -> int:
        """Elements from batch to batch of what a step reads."""
        steps = enumerate(self.operation.epilogue)
        batched = [i for i, one in steps if one.batch_field(i)]
        return dict(zip(batched, self.problem.batch_pitch_steps, strict=True))[step]

    def groups(self, step: int) -> int:
        """Partial sums that are added up to one of a step's sums."""
        each = row_groups(self.schedule, self.problem)
        return each * self.problem.batches // self.vectors(step)

    def partial_batch(self) -> int:
        """Elements between the partial sums of batches of D."""
        return row_groups(self.schedule, self.problem) * self.problem.n

    def vectors(self, step: int) -> int:
        """Vectors of sums that a step has: one for each batch of D, or one for all."""
        apart = self.operation.batched and self.batch_pitch(step)
        return self.problem.batches if apart else 1

    def _operand(self, name: str, tile: OperandTile) -> TensorMap:
        problem, of_a = self.problem, name == "a"
        extent, pitch = (problem.m, problem.pitch_a) if of_a else (problem.n, problem.pitch_b)
        return self._tensor_map(
            name,
            tile.element,
            ((problem.k, extent) if tile.k_major else (extent, problem.k), pitch),
            tile.box,
            problem.batches_a if of_a else problem.batches_b,
            span=tile.span,
            promotion=self.schedule.l2_promotion,
        )

    def _tensor_map(
        self,
        tensor: str,
        element: Element,
        matrix: tuple[tuple[int, int], int],
        box: tuple[int, int],
        batches: Batches,
        **options: int,
    ) -> TensorMap:
        """The map of a matrix: its (columns, rows) and pitch, in boxes; of all its batches."""
        extents, pitch = matrix
        single = TensorMap(tensor, element, extents, (pitch * element.bytes,), box, **options)
        if not self.operation.batched:
            return single
        # A single batch may claim any pitch that TMA takes.
        apart = batches.pitch if batches.count > 1 else pitch * extents[1]
        return replace(
            single,
            extents=(*extents, batches.count),
            pitches=(*single.pitches, apart * element.bytes),
            box=(*box, 1),
        )


def parameters(spec: GemmSpec) -> ParameterBlock[AtLaunch]:
    """The kernel's parameter block."""
    operation, schedule = spec.operation, spec.schedule
    fields: list[Field[AtLaunch]] = [
        tensor_map("a_map", "A, in operand boxes", AtLaunch.a_map),
        tensor_map("b_map", "B, in operand boxes", AtLaunch.b_map),
    ]
    trims_a = gemm_layout(operation, schedule).trims_a
    if trims_a:
        fields.insert(1, tensor_map("a_tail_map", "A, in boxes of the tail", AtLaunch.a_tail_map))
    fields += _stored(operation, schedule)
    for index, step in enumerate(operation.epilogue):
        fields += step.fields(index)
        if step.partial:
            fields += _partial(operation, index)
    if trims_a:
        meaning = "of A in the last tile along m, in eights"
        fields.append(int32("a_tail_rows", meaning, lambda at: at.tail.extent))
    fields += [
        int32("m", "rows of D", lambda at: at.problem.m),
        int32("n", "columns of D", lambda at: at.problem.n),
        int32("k", "products summed", lambda at: at.problem.k),
    ]
    if schedule.stream_k:
        fields += _cut(operation)
    return block([*fields, *(_batches(operation) if operation.batched else ())])


def partial_name(operation: GemmOperation, step: int) -> str:
    """What the field of a step's sums is called, and what is called after it."""
    return operation.epilogue[step].fields(step)[0].name


def _partial(operation: GemmOperation, step: int) -> list[Field[AtLaunch]]:
    name = partial_name(operation, step)
    fields: list[Field[AtLaunch]] = [
        pointer(f"{name}_partial", "float", "partial[groups of rows][n]"),
        int64(f"{name}_groups", "partial sums of one sum", lambda at: at.groups(step)),
    ]
    if operation.batched:
        meaning = "elements between the partial sums of batches"
        batch = int64(f"{name}_partial_batch", meaning, AtLaunch.partial_batch)
        fields.append(batch)
    return fields


def _stored(operation: GemmOperation, schedule: GemmSchedule) -> list[Field[AtLaunch]]:
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


def _cut(operation: GemmOperation) -> list[Field[AtLaunch]]:
    return [
        pointer("parts", operation.accumulator.cpp, "sums of parts of tiles, by blocks"),
        pointer("raised", "int", "a flag for each warp of each block that leaves a part"),
        int32("cut", "tiles that are cut: the first", lambda at: at.cut.tiles),
    ]


def _batches(operation: GemmOperation) -> list[Field[AtLaunch]]:
    steps = (step.batch_field(index) for index, step in enumerate(operation.epilogue))
    served = "batches of D in a row that one of"
    return [
        *(field for field in steps if field is not None),
        int32("batches", "of D", lambda at: at.problem.batches),
        int32("a_batches", "of A", lambda at: at.problem.batches_a.count),
        int32("a_repeat", f"{served} A serves", lambda at: at.problem.batches_a.repeat),
        int32("b_batches", "of B", lambda at: at.problem.batches_b.count),
        int32("b_repeat", f"{served} B serves", lambda at: at.problem.batches_b.repeat),
    ]
