"""What the parameters of a product are functions of, and what its kernels count to."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import launches as launch
from warploom.generator.elements import Element, element
from warploom.generator.families._product.cut import MOST_BLOCKS, MOST_PARTS, Cut, cut
from warploom.generator.families._product.layout import ProductLayout
from warploom.generator.families._product.problem import (
    Batches,
    ProductProblem,
    parts_of_k,
    row_groups,
    tiles,
)
from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.launches import Workspace
from warploom.generator.tensor_maps import OperandTile, TensorMap
from warploom.generator.wgmma import WARPGROUP

OperationT = TypeVar("OperationT", bound=ProductOperation, covariant=True, default=ProductOperation)
ScheduleT = TypeVar("ScheduleT", bound=ProductSchedule, covariant=True, default=ProductSchedule)
ProblemT = TypeVar("ProblemT", bound=ProductProblem, covariant=True, default=ProductProblem)


class AtLaunch(launch.AtLaunch[OperationT, ScheduleT, ProblemT]):
    """What a product's parameters are functions of: `epilogue.Pitches`, too."""

    @property
    def layout(self) -> ProductLayout:
        """Where everything of one block lies."""
        raise NotImplementedError

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
        return self._a_map(self.tail if single else self.layout.a)

    def a_tail_map(self) -> TensorMap:
        """Of the last tile of A along m."""
        return self._a_map(self.tail)

    def d_map(self) -> TensorMap:
        """Of the staging boxes of D."""
        problem = self.problem
        return self.tensor_map(
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

    def _a_map(self, tile: OperandTile) -> TensorMap:
        problem = self.problem
        return self.operand_map("a", tile, problem.m, problem.pitch_a, problem.batches_a)

    def operand_map(
        self, tensor: str, tile: OperandTile, extent: int, pitch: int, batches: Batches
    ) -> TensorMap:
        """The map of an operand, which has so many rows of k (columns, where those are apart)."""
        k = self.problem.k
        return self.tensor_map(
            tensor,
            tile.element,
            ((k, extent) if tile.k_major else (extent, k), pitch),
            tile.box,
            batches,
            span=tile.span,
            promotion=self.schedule.l2_promotion,
        )

    def tensor_map(
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


def counted(schedule: ProductSchedule, problem: ProductProblem, clusters: int) -> dict[str, int]:
    """The largest numbers that kernels reach in 32 bits: see `limits.refuse_beyond`."""
    m, n, k = schedule.tile
    rows, columns = m * schedule.cluster[0], n * schedule.cluster[1]
    along_m, parts = schedule.raster == "along_m", parts_of_k(schedule, problem)
    count = tiles(schedule, problem)
    what = f"m {problem.m}, n {problem.n}, batches {problem.batches}: {count} tiles of {m}x{n}"
    if parts > 1:
        what += f", k in {parts} parts"
    across = -(-problem.n // columns) if along_m else -(-problem.m // rows)
    turns = schedule.consumers // schedule.sharing
    return {
        f"m {problem.m}": problem.m + rows,
        f"n {problem.n}": problem.n + columns,
        f"k {problem.k}": problem.k + k * schedule.split,
        what: count * parts + turns * clusters,  # the first that is not one any more
        f"group {schedule.group} of {across} tiles": schedule.group * across,
    }


def part_workspaces(
    schedule: ProductSchedule, problem: ProductProblem, sums_bytes: int
) -> list[Workspace]:
    """Where parts of tiles are left: of `split_k`, all; of tiles that are cut, a place for each
    block, and a flag for each of its warps that is 0 between launches.
    """
    if schedule.split_k > 1:
        count = tiles(schedule, problem) * schedule.multicast * parts_of_k(schedule, problem)
        return [Workspace("partial_tiles", count * sums_bytes)]
    if not schedule.stream_k:
        return []
    clusters = MOST_BLOCKS // schedule.cluster_size
    if tiles(schedule, problem) < clusters:
        clusters = min(clusters, MOST_PARTS * tiles(schedule, problem))
    flags = 4 * schedule.cluster_size * schedule.consumers * WARPGROUP // 32
    return [
        Workspace("parts", clusters * sums_bytes * schedule.multicast),
        Workspace("raised", clusters * flags, kept=True),
    ]
