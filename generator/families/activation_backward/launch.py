"""A call's launches: of the matrices, and of what is left of the sums; and what these read.

Blocks have a strip of columns of a part of the rows. The sums of each part are written to memory,
and added in the order of parts by a second launch, so that they are the same in every run. Where
there is one part, its sums are those of all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.activation_backward.schedule import (
    ActivationBackwardOperation,
    ActivationBackwardProblem,
    ActivationBackwardSchedule,
    ActivationBackwardShape,
    ActivationBackwardSpec,
)
from warploom.generator.launches import Address, DeviceLimits, Launch, Workspace
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import (
    Field,
    Kind,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
)
from warploom.generator.shapes import refuse_beyond

LEAST_TILES = 4  # of a part of the rows: sums of fewer take longer to add than to make
SUM_THREADS, SUM_COLUMNS = 1024, 32  # of a block that adds parts


@dataclass(frozen=True)
class AtLaunch(
    data.AtLaunch[
        ActivationBackwardOperation, ActivationBackwardSchedule, ActivationBackwardProblem
    ]
):
    """What the parameters of a launch are functions of."""

    @property
    def strips(self) -> int:
        """The parts that columns are cut into."""
        return -(-self.problem.n // self.schedule.columns)

    @cached_property
    def rows(self) -> int:
        """Rows of one part: whole tiles, and as many that all blocks run at a time."""
        tile = self.schedule.tile[0]
        resident = self.device.multiprocessors * self.schedule.ctas_per_sm
        wanted = max(1, resident // self.strips)
        tiles = -(-self.problem.m // tile)
        return tile * max(LEAST_TILES, -(-tiles // wanted))

    @property
    def parts(self) -> int:
        """The parts that rows are cut into."""
        return -(-self.problem.m // self.rows)


def _most_parts(spec: ActivationBackwardSpec, problem: ActivationBackwardProblem) -> int:
    """The most parts that rows are cut into, on any GPU."""
    return -(-problem.m // (LEAST_TILES * spec.schedule.tile[0]))


def parameters(spec: ActivationBackwardSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block, of both launches: matrices, their pitches and extents, and sums."""
    operation = spec.operation
    fields: list[Field[AtLaunch]] = []
    for name in operation.tensors:
        cpp = element(getattr(operation, name)).cpp
        fields.append(pointer(name, cpp if name == "dz" else f"const {cpp}", "[m][pitch]"))
        fields.append(int64(f"{name}_pitch", f"elements between rows of {name}", _pitch(name)))
    fields += [
        int32("m", "rows", lambda at: at.problem.m),
        int32("n", "columns", lambda at: at.problem.n),
        int32("strips", "parts of the columns", lambda at: at.strips),
        int32("rows", "of a part of the rows", lambda at: at.rows),
    ]
    if operation.sums:
        fields += [
            Field("parts_sums", Kind.POINTER, "float", "[parts][n]", _parts_sums),
            pointer("sums", "float", "[n]: parts_sums itself where there is one part"),
            int32("parts", "of the rows", lambda at: at.parts),
        ]
    return block(fields)


def _pitch(name: str) -> Callable[[AtLaunch], int]:
    return lambda at: int(getattr(at.problem, f"pitch_{name}"))


def _parts_sums(at: AtLaunch) -> Address:
    return Address("parts_sums" if at.parts > 1 else "sums")


def launches(
    spec: ActivationBackwardSpec, problem: ActivationBackwardProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch, and one that adds the sums of several parts. No extent may be 0.

    Tensors are named dy, z and dz, as the operation has them, and sums. Raises ProblemError for
    extents beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    m, n = problem.m, problem.n
    refuse_beyond(
        {
            f"m {m}": at.parts * at.rows + at.rows,  # the row that ends a part's last tile
            f"n {n}": at.strips * spec.schedule.columns,
            f"m {m}, n {n}": at.parts * at.strips,
        }
    )
    values = parameters(spec).values(at)

    def launch(suffix: str, grid: int, threads: int) -> Launch:
        return Launch(spec.name + suffix, grid, threads, 1, 0, values, early=True)

    found = [launch("", at.parts * at.strips, spec.schedule.threads)]
    if spec.operation.sums and at.parts > 1:
        found.append(launch("_sums", -(-n // SUM_COLUMNS), SUM_THREADS))
    return found


def workspaces(spec: ActivationBackwardSpec, problem: ActivationBackwardProblem) -> list[Workspace]:
    """The sums of parts, where there may be several."""
    parts = _most_parts(spec, problem)
    if not spec.operation.sums or parts == 1:
        return []
    return [Workspace("parts_sums", 4 * parts * problem.n)]


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2e-6,  # seconds
    "sums_launch": 1.5e-6,  # seconds of adding parts
    "bandwidth": 4e12,  # bytes a second of memory
    "tile": 1e-6,  # seconds until what a tile reads is there
}


def seconds(
    constants: Value,
    operation: ActivationBackwardOperation,
    schedule: ActivationBackwardSchedule,
    shape: ActivationBackwardShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    rows, columns = schedule.tile
    strips, tiles = -(-shape.n // columns), -(-shape.m // rows)
    # Blocks that share a strip's tiles, and how many of these each has.
    parts = max(1, min(tiles / LEAST_TILES, multiprocessors * schedule.ctas_per_sm / strips))
    turns = tiles / parts * max(1, strips / (multiprocessors * schedule.ctas_per_sm))
    traffic = shape.m * shape.n * operation.row_bytes / constants["bandwidth"]
    adding = constants["sums_launch"] if operation.sums and parts > 1 else 0.0
    return constants["launch"] + max(traffic, turns * constants["tile"]) + adding
