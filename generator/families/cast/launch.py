"""Launches of a cast: of scales of a tensor, or of rows and columns, and of values; their times."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.cast.schedule import (
    COLUMNS,
    VALUES,
    CastLayout,
    CastOperation,
    CastProblem,
    CastSchedule,
    CastShape,
    CastSpec,
    most_tiles,
)
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import Work, refuse_beyond

AMAX_VALUES = 64  # that a thread of the launch of the largest magnitude loads at once
_AMAX_CTAS = 8  # of it, at most, on an SM: it is short, and each adds an atomic operation
_FACTOR_BYTES = 4
_PEAK_BYTES = 8  # the largest magnitude, and how many CTAs have raised it


@dataclass(frozen=True)
class AtLaunch(data.AtLaunch[CastOperation, CastSchedule, CastProblem]):
    """What the parameters of a launch are functions of."""

    @property
    def across(self) -> int:
        """The parts of COLUMNS columns, of which the last may be short."""
        return -(-self.problem.n // COLUMNS)

    @property
    def down(self) -> int:
        """The parts of COLUMNS rows, likewise; of groups of rows as many as these may have."""
        return tiles_down(self.operation, self.problem)

    @property
    def pieces(self) -> int:
        """The rows of all parts: each is COLUMNS values."""
        return self.problem.m * self.across

    @property
    def grid(self) -> int:
        """The CTAs of the launch that writes q."""
        schedule, m = self.schedule, self.problem.m
        if self.operation.body == "tile":
            return self.down * self.across
        if self.operation.body == "row":
            return m if schedule.reduce == "cta" else -(-m // (schedule.threads // 32))
        return -(-self.pieces // (schedule.threads * VALUES * schedule.vectors // COLUMNS))

    @property
    def amax_grid(self) -> int:
        """The CTAs of the launch that computes the largest magnitude."""
        loads = self.schedule.threads * AMAX_VALUES // COLUMNS
        if self.operation.gate != "none":
            return min(
                self.grid, CastLayout(self.operation).ctas_per_sm * self.device.multiprocessors
            )
        resident = min(_AMAX_CTAS, 2048 // self.schedule.threads) * self.device.multiprocessors
        return min(-(-self.pieces // loads), resident)


def tiles_down(operation: CastOperation, problem: CastProblem) -> int:
    """The tiles of COLUMNS rows that there may be, the last of all, or of groups, being short."""
    if operation.offsets:
        return most_tiles(problem.m, problem.groups)
    return -(-problem.m // COLUMNS)


def parameters(spec: CastSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block, of both launches: matrices, scales, their pitches and extents."""
    operation = spec.operation
    cpp = "uint8_t" if operation.block == "1x32" else "float"
    fields: list[Field[AtLaunch]] = [
        pointer("x", f"const {element(operation.x).cpp}", "[m][x_pitch]"),
        pointer("q", "uint8_t", "[m][q_pitch]"),
        pointer("scale", f"const {cpp}" if operation.static else cpp, "of blocks of x"),
        int64("x_pitch", "elements between rows of x", lambda at: at.problem.x_pitch),
        int64("q_pitch", "bytes between rows of q", lambda at: at.problem.q_pitch),
        int64("scale_down", "elements to the scale below", lambda at: at.problem.scale[0]),
        int64("scale_across", "elements to the next scale", lambda at: at.problem.scale[1]),
        int32("m", "rows of x", lambda at: at.problem.m),
        int32("n", "columns of x", lambda at: at.problem.n),
        int32("across", "parts of 128 columns", lambda at: at.across),
    ]
    if operation.transpose:
        fields += [
            pointer("q_t", "uint8_t", "[n][q_t_pitch]: q of x.T"),
            int64("q_t_pitch", "bytes between rows of q_t", lambda at: at.problem.q_t_pitch),
        ]
    if operation.transposes_scales:
        fields += [
            pointer("scale_t", f"const {cpp}" if operation.static else cpp, "of blocks of x.T"),
            int64("scale_t_down", "elements to that below", lambda at: at.problem.scale_t[0]),
            int64("scale_t_across", "elements to the next", lambda at: at.problem.scale_t[1]),
        ]
    if operation.gradient:
        fields += [
            pointer("gradient", f"const {element(operation.x).cpp}", "[m][gradient_pitch]"),
            int64("gradient_pitch", "between its rows", lambda at: at.problem.gradient_pitch),
        ]
    if operation.rounding == "stochastic":
        fields.append(pointer("state", "const uint2", "[2]: seeds random numbers"))
    if operation.amax:
        fields.append(pointer("amax", "unsigned", "bits of an fp32 number, raised"))
    if operation.reads_amax:
        fields += [
            pointer("factor", "float", "what x is multiplied by"),
            pointer("peak", "unsigned", "[2]: left as zeros; the largest bits of x, and CTAs done"),
        ]
    if operation.offsets:
        fields += [
            pointer("offsets", "const int", "[groups]: where each ends in x"),
            pointer("ends", "int", "[groups]: where each ends in q_t, a multiple of 128"),
            int32("groups", "of rows", lambda at: at.problem.groups),
        ]
    if operation.reads_factors:
        fields += [
            pointer("factors", "float", "what rows and, behind all, columns are multiplied by"),
            pointer("peaks", "float", "[across][rows], [down][columns]: of parts of them"),
            pointer("done", "unsigned", "[down + across]: left as zeros; CTAs of a part"),
        ]
    return block(fields)


def launches(spec: CastSpec, problem: CastProblem, device: DeviceLimits) -> list[Launch]:
    """One launch, behind one of the largest magnitude, or of rows' and columns' factors.

    No extent may be 0. Tensors are named x, gradient, q, scale, q_t, scale_t, state, amax,
    offsets and ends.
    Raises ProblemError for extents beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    m, n, threads = problem.m, problem.n, spec.schedule.threads
    # How far past the end a thread counts.
    spare = threads * AMAX_VALUES // COLUMNS * (at.amax_grid + 1)
    refuse_beyond(
        {
            f"m {m}": (at.down + 1) * COLUMNS,
            f"n {n}": n + threads * VALUES * spec.schedule.vectors,
            f"m {m}, n {n}": at.pieces + spare,
        }
    )
    values = parameters(spec).values(at)

    def launch(suffix: str, grid: int, shared_bytes: int) -> Launch:
        return Launch(spec.name + suffix, grid, threads, 1, shared_bytes, values, early=True)

    shared_bytes = CastLayout(spec.operation).shared_bytes
    own = launch("", at.grid, shared_bytes)
    if spec.operation.reads_factors:
        return [launch("_factors", at.grid, shared_bytes), own]
    return [launch("_amax", at.amax_grid, 0), own] if spec.operation.reads_amax else [own]


def workspaces(spec: CastSpec, problem: CastProblem) -> list[Workspace]:
    """Factors of a tensor or of rows and columns, and what CTAs of the first launch have of them.

    Rows and columns are padded to whole parts.
    """
    if spec.operation.reads_factors:
        down, across = tiles_down(spec.operation, problem), -(-problem.n // COLUMNS)
        part = COLUMNS * _FACTOR_BYTES
        return [
            Workspace("factors", (down + across) * part),
            Workspace("peaks", 2 * down * across * part),
            Workspace("done", (down + across) * 4, kept=True),
        ]
    if not spec.operation.reads_amax:
        return []
    return [Workspace("factor", _FACTOR_BYTES), Workspace("peak", _PEAK_BYTES, kept=True)]


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2e-6,  # seconds
    "amax_launch": 2e-6,  # seconds of the launch before, next to its traffic
    "bandwidth": 4e12,  # bytes a second of memory
    "row": 1.5e-6,  # seconds until what a thread of a row has loaded is there
}


def seconds(
    constants: Value,
    operation: CastOperation,
    schedule: CastSchedule,
    shape: CastShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    traffic = shape.m * shape.n * operation.value_bytes / constants["bandwidth"]
    turns = 0.0
    if operation.body == "row":
        threads = 32 if schedule.reduce == "warp" else schedule.threads
        resident = 2048 * multiprocessors // threads
        waves = max(1.0, shape.m / resident)
        turns = 2 * waves * -(-shape.n // (threads * VALUES * schedule.vectors)) * constants["row"]
    before = constants["amax_launch"] if operation.reads_amax or operation.reads_factors else 0.0
    return constants["launch"] + before + max(traffic, turns)


# ---- What a problem asks of any kernel -----------------------------------------------------------


def work(operation: CastOperation, shape: CastShape) -> Work:
    """Count the bytes of a call; the tensor core has nothing to do."""
    return Work(0.0, float(shape.m * shape.n * operation.value_bytes))
