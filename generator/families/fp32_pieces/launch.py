"""Launches of pieces: of largest magnitudes of rows read across, and of the pieces; their times."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator import launches as data
from warploom.generator.families.fp32_pieces.schedule import (
    LEAST_PART,
    MOST_PARTS,
    TILE,
    Fp32PiecesOperation,
    Fp32PiecesProblem,
    Fp32PiecesSchedule,
    Fp32PiecesShape,
    Fp32PiecesSpec,
)
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

THREADS = 2048  # that an SM holds
PEAK_ROWS = 32  # rows of x that a CTA finds the largest magnitudes of: those of a warp's threads


@dataclass(frozen=True)
class AtLaunch(data.AtLaunch[Fp32PiecesOperation, Fp32PiecesSchedule, Fp32PiecesProblem]):
    """What the parameters of a launch are functions of."""

    @property
    def across(self) -> int:
        """Tiles along k."""
        return -(-self.problem.place // TILE)

    @property
    def units(self) -> int:
        """What a CTA does at a time: a row, or a tile."""
        m = self.problem.m
        return m if self.operation.layout == "row" else -(-m // TILE) * self.across

    @property
    def grid(self) -> int:
        """The CTAs: one for each unit; of a launch that mostly leaves at once, as fill the GPU."""
        if self.operation.spans == "any":
            return self.units
        return min(self.units, self.device.multiprocessors * (THREADS // self.schedule.threads))


def part(problem: Fp32PiecesProblem) -> int:
    """Columns along k of a part of which each row's largest magnitude is kept."""
    return max(LEAST_PART, -(-problem.k // MOST_PARTS))


def parameters(spec: Fp32PiecesSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block, of both launches."""
    operation = spec.operation
    fields: list[Field[AtLaunch]] = [
        pointer("x", "const float", "[m][x_pitch], or [k][x_pitch] of layout col"),
        pointer("q", "uint16_t", "[m][count][place]: pieces"),
        int64("x_pitch", "elements between rows of x", lambda at: at.problem.x_pitch),
        int32("m", "rows", lambda at: at.problem.m),
        int32("k", "columns", lambda at: at.problem.k),
        int32("piece_pitch", "elements between pieces of a row", lambda at: at.problem.place),
    ]
    if operation.layout == "col":
        fields.append(int32("across", "tiles along k", lambda at: at.across))
    if operation.spans == "wide":
        fields += [
            pointer("scale", "const float", "[3][m] of the fp16 pieces, whose third is inverted"),
            pointer("span_a", "const uint32_t", "[4]: what the rows of A span"),
            pointer("span_b", "const uint32_t", "[4]: what those of B span"),
        ]
    if operation.scaled:
        fields.append(
            pointer(
                "scale",
                "float",
                "[3][m]: x is the sum of its pieces times the first two, or the third",
            )
        )
        fields += [
            pointer("span", "uint32_t", "[4]: most small or lost values of a row, most lost, k"),
            pointer("maxima", "uint32_t", "[3]: of span so far, and the CTAs that raised them"),
        ]
        if operation.layout == "col":
            fields += [
                pointer("sums", "uint64_t", "[m / 64]: small and lost values, tiles above bit 34"),
                pointer("peaks", "float", "[parts][m]: largest magnitudes of parts of rows"),
                int32("part", "columns along k of a part", lambda at: part(at.problem)),
                int32("parts", "of k", lambda at: -(-at.problem.k // part(at.problem))),
            ]
    return block(fields)


def launches(
    spec: Fp32PiecesSpec, problem: Fp32PiecesProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch, behind one of largest magnitudes where scaled rows are read across.

    No dimension may be 0. Tensors are named x, q, scale, span, span_a and span_b. Raises
    ProblemError for dimensions beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    operation, threads = spec.operation, spec.schedule.threads
    refuse_beyond(
        {
            f"m {problem.m}": problem.m + TILE,
            f"k {problem.k}": operation.count * (problem.place + 8 * threads),
            f"m {problem.m}, k {problem.k}": at.units,
        }
    )
    values = parameters(spec).values(at)
    found = [Launch(spec.name, at.grid, threads, 1, 0, values, early=True)]
    if operation.scaled and operation.layout == "col":
        grid = -(-problem.m // PEAK_ROWS) * -(-problem.k // part(problem))
        found.insert(0, Launch(f"{spec.name}_peaks", grid, threads, 1, 0, values, early=True))
    return found


def workspaces(spec: Fp32PiecesSpec, problem: Fp32PiecesProblem) -> list[Workspace]:
    """Maxima of what rows span; the largest magnitudes of parts of rows, where a launch of its own
    finds them.
    """
    if not spec.operation.scaled:
        return []
    maxima = Workspace("maxima", 12, kept=True)
    if spec.operation.layout == "row":
        return [maxima]
    return [
        maxima,
        Workspace("sums", 8 * -(-problem.m // TILE), kept=True),
        Workspace("peaks", 4 * problem.m * -(-problem.k // part(problem))),
    ]


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2e-6,  # seconds
    "peaks_launch": 2e-6,  # seconds of the launch before, next to its traffic
    "bandwidth": 3.5e12,  # bytes a second of memory
    "row": 1.5e-6,  # seconds until what a CTA of a row has loaded is there
}


def seconds(
    constants: Value,
    operation: Fp32PiecesOperation,
    schedule: Fp32PiecesSchedule,
    shape: Fp32PiecesShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = shape.m * shape.k * operation.value_bytes / constants["bandwidth"]
    if operation.layout == "col":
        before = constants["peaks_launch"] if operation.scaled else 0.0
        return constants["launch"] + before + traffic
    waves = max(1.0, shape.m * schedule.threads / (2048 * multiprocessors))
    turns = waves * -(-shape.k // (4 * schedule.threads)) * constants["row"]
    return constants["launch"] + max(traffic, turns)
