"""A call's only launch: persistent blocks, what each of its parameters holds, and its time."""

from __future__ import annotations

from functools import lru_cache

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm.schedule import (
    BLOCK,
    STAGE_BYTES,
    SWIZZLE_SIZE,
    WORD_K,
    WORDS,
    SparseGemmLayout,
    SparseGemmOperation,
    SparseGemmProblem,
    SparseGemmSchedule,
    SparseGemmShape,
    SparseGemmSpec,
)
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.model.arithmetic import Value, slowest
from warploom.generator.parameters import (
    Field,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
    tensor_map,
)
from warploom.generator.shapes import Work, refuse_beyond
from warploom.generator.tensor_maps import SPANS, TensorMap


class AtLaunch(data.AtLaunch[SparseGemmOperation, SparseGemmSchedule, SparseGemmProblem]):
    """What the parameters of a launch are functions of."""

    @property
    def tiles(self) -> int:
        """Tiles of y."""
        return tiles(self.schedule, self.problem)

    @property
    def k_tiles(self) -> int:
        """Stages that k fills."""
        return -(-self.problem.k // self.operation.tile_k)

    @property
    def parts(self) -> int:
        """Parts of k, each of a stage at least."""
        return min(self.schedule.split_k, self.k_tiles)

    @property
    def x_map(self) -> TensorMap:
        """x: a row of 128 bytes of each token."""
        problem, kind = self.problem, element(self.operation.element)
        pitch = problem.x_pitch * kind.bytes
        box = (self.operation.tile_k, self.schedule.tokens)
        return TensorMap("x", kind, (problem.k, problem.m), (pitch,), box, STAGE_BYTES)

    @property
    def values_map(self) -> TensorMap:
        """The values of the weight: a row of 64 bytes of each of its rows."""
        problem, kind = self.problem, element(self.operation.element)
        half = problem.k // 2
        box = (self.operation.tile_k // 2, self.schedule.rows)
        pitch = half * kind.bytes
        return TensorMap("values", kind, (half, problem.n), (pitch,), box, STAGE_BYTES // 2)

    @property
    def metadata_map(self) -> TensorMap:
        """The metadata: a box is the words of 64 rows and 64 columns of the weight.

        A bulk copy without a map would do, but compute-sanitizer's racecheck takes it for a store
        of the thread that issues it, and every read of the words for a race.
        """
        problem, box = self.problem, (WORDS, 1, 1)
        extents = (WORDS, -(-problem.k // WORD_K), -(-problem.n // BLOCK))
        pitches = (4 * WORDS, 4 * WORDS * extents[1])
        return TensorMap("metadata", element("int32"), extents, pitches, box, SPANS[-1])


def tiles(schedule: SparseGemmSchedule, problem: SparseGemmProblem) -> int:
    """Tiles of y."""
    return -(-problem.m // schedule.tokens) * -(-problem.n // schedule.rows)


def workspaces(spec: SparseGemmSpec, problem: SparseGemmProblem) -> list[Workspace]:
    """The accumulators of parts of k, and how many parts of each 64 rows are there."""
    schedule = spec.schedule
    if schedule.split_k == 1:
        return []
    count = tiles(schedule, problem)
    sums = 4 * schedule.rows * schedule.tokens
    return [
        Workspace("partial_sums", count * schedule.split_k * sums),
        Workspace("arrived", 4 * count * schedule.consumers, kept=True),
    ]


@lru_cache(maxsize=1024)
def parameters(spec: SparseGemmSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: the tensor maps, bias, y and the extents."""
    cpp = element(spec.operation.of_output).cpp
    fields: list[Field[AtLaunch]] = [
        tensor_map("x_map", "x [m, k]", lambda at: at.x_map),
        tensor_map("values_map", "values of W [n, k / 2]", lambda at: at.values_map),
        tensor_map("metadata_map", "words [n / 64, k / 64, 128]", lambda at: at.metadata_map),
        pointer("y", cpp, "[m][y_pitch]"),
        int64("y_pitch", "elements between rows of y", lambda at: at.problem.y_pitch),
        int32("m", "rows of x", lambda at: at.problem.m),
        int32("n", "rows of W", lambda at: at.problem.n),
        int32("k_tiles", "stages that k fills", lambda at: at.k_tiles),
    ]
    if spec.operation.bias:
        fields.append(pointer("bias", f"const {cpp}", "[n]"))
    if spec.operation.element in ("e4m3", "int8"):
        words = "columns of the weight, in 64, rounded up"
        fields.append(int32("k_words", words, lambda at: -(-at.problem.k // WORD_K)))
    if spec.operation.scaled:
        fields += [
            pointer("scale_x", "const float", "[m] or one"),
            pointer("scale_weight", "const float", "[n] or one"),
            int32("x_step", "1, or 0 for one scale", lambda at: int(at.problem.x_scales > 1)),
            int32("w_step", "1, or 0 for one scale", lambda at: int(at.problem.weight_scales > 1)),
        ]
    if spec.schedule.split_k > 1:
        sums = "int32_t" if element(spec.operation.element).is_integer else "float"
        fields += [
            pointer("partial_sums", sums, "[tiles][parts][rows][tokens], by threads"),
            pointer("arrived", "uint32_t", "[tiles][consumers], zeros between launches"),
            int32("parts", "of k", lambda at: at.parts),
        ]
    return block(fields)


def launches(
    spec: SparseGemmSpec, problem: SparseGemmProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch. No extent may be 0; ProblemError for extents beyond 32 bits."""
    at, schedule = AtLaunch(spec, problem, device), spec.schedule
    refuse_beyond(
        {
            f"m {problem.m}": problem.m + schedule.tokens,
            f"n {problem.n}": problem.n + schedule.rows,
            f"k {problem.k}": problem.k + at.operation.tile_k,
            f"m {problem.m}, n {problem.n}: tiles": (
                at.tiles * max(SWIZZLE_SIZE, schedule.split_k) + device.multiprocessors
            ),
        }
    )
    return [
        Launch(
            entry=spec.name,
            grid=min(at.tiles * at.parts, device.multiprocessors),
            block=schedule.threads,
            cluster=1,
            shared_bytes=SparseGemmLayout(at.operation, schedule).shared_bytes,
            parameters=parameters(spec).values(at),
            early=True,
        )
    ]


# ---- How long a call takes -----------------------------------------------------------------------

START = {  # of an H200: off by 21 % (root of the mean square) for 98 kernels at twelve shapes
    "launch": 1e-6,  # seconds
    "bandwidth": 3.2e12,  # bytes a second of memory
    "clock": 1.65e9,  # cycles a second
    "port": 128.0,  # bytes a cycle of an SM's shared memory
    "l2": 64.0,  # bytes a cycle that an SM gets from L2
    "latency": 1.5e-6,  # seconds from asking for a stage to having it
    "tile": 3.5e-6,  # seconds to fill the stages and to store a tile
    "trip": 6e-7,  # seconds to read sums of another part of k
}


def seconds(
    constants: Value,
    operation: SparseGemmOperation,
    schedule: SparseGemmSchedule,
    shape: SparseGemmShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    blocks = schedule.consumers * schedule.blocks
    # Each instruction reads 64 rows of values and all tokens; TMA writes the stage once.
    values, tokens = schedule.rows * STAGE_BYTES // 2, schedule.tokens * STAGE_BYTES
    loaded = values + tokens + schedule.rows * operation.tile_k // 8
    stage = slowest(
        blocks * schedule.tokens / constants["clock"],  # cycles of the tensor cores
        (loaded + values + blocks * tokens) / constants["port"] / constants["clock"],
        loaded / constants["l2"] / constants["clock"],
        constants["latency"] / schedule.stages,
    )
    tiles = -(-shape.m // schedule.tokens) * -(-shape.n // schedule.rows)
    stages = -(-shape.k // operation.tile_k)
    parts = min(schedule.split_k, stages)
    waves = -(-tiles * parts // multiprocessors)
    # The CTA that comes last reads the sums of all parts; of `parts` CTAs one does.
    trips = constants["trip"] * -(-schedule.blocks * schedule.tokens // 64) if parts > 1 else 0.0
    each = -(-stages // parts) * stage + constants["tile"] + trips
    size = element(operation.element).bytes
    weight = shape.n * shape.k * (4 * size + 1) / 8  # values, and 2 bits for each
    traffic = size * shape.m * shape.k + 2 * shape.m * shape.n + weight
    computed = waves * each + (parts - 1) * trips
    return constants["launch"] + max(computed, traffic / constants["bandwidth"])


# ---- What a problem asks of any kernel -----------------------------------------------------------


def work(operation: SparseGemmOperation, shape: SparseGemmShape) -> Work:
    """Count the multiplications by values that are stored: half of those of a dense weight."""
    m, n, k = shape.m, shape.n, shape.k
    kind = element(operation.element)
    weight = n * k // 2 * kind.bytes + n * k // 8  # values, and two bits of metadata each
    return Work(1.0 * m * n * k, float(weight + (m * k + m * n) * kind.bytes), kind.bits)
