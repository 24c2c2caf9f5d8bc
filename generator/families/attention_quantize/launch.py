"""Launches: of the mean of k and the largest magnitude of v, and of the values; their times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.attention_quantize.schedule import (
    CHUNK,
    TILE,
    AttentionQuantizeOperation,
    AttentionQuantizeProblem,
    AttentionQuantizeSchedule,
    AttentionQuantizeShape,
    AttentionQuantizeSpec,
)
from warploom.generator.launches import DeviceLimits, Launch, Workspace
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

_FLOAT = 4  # bytes


class AtLaunch(
    data.AtLaunch[AttentionQuantizeOperation, AttentionQuantizeSchedule, AttentionQuantizeProblem]
):
    """What the parameters of a launch are functions of."""

    @cached_property
    def chunks(self) -> int:
        """Chunks of keys, of one head."""
        return -(-self.problem.seq_k // CHUNK)

    @cached_property
    def key_tiles(self) -> int:
        """CTAs that have keys: of v, and as many of k where it is there."""
        each = 1 if self.operation.scores == "none" else 2
        return each * self.problem.groups * self.problem.tiles_k

    @cached_property
    def grid(self) -> int:
        """The CTAs of the launch that writes values."""
        problem = self.problem
        queries = 0 if self.operation.scores == "none" else problem.heads * problem.tiles_q
        return self.key_tiles + problem.batch * queries


def _pointers(operation: AttentionQuantizeOperation) -> Iterator[tuple[str, str, str]]:
    """Name, C++ type and dimensions of every tensor."""
    kind = element(operation.element).cpp
    yield "v", f"const {kind}", "[batch][kv_heads][seq_k][dim]"
    yield "v_out", "uint8_t", "[batch][kv_heads][dim][tiles_k * 128]: v in e4m3, transposed"
    if operation.lengths == "packed":
        yield "cu_seqlens", "const int", "[sequences + 1]: where sequences begin in v, and the end"
    if operation.quantizes:
        yield "v_descale", "float", "[batch][kv_heads]"
        yield "v_factor", "float", "[batch][kv_heads]: what v is multiplied by"
        yield "partial_peaks", "float", "[batch][kv_heads][chunks]: largest magnitudes of v"
        yield "arrivals", "unsigned", "[batch][kv_heads]: chunks done; left as zeros"
        yield "q", f"const {kind}", "[batch][heads][seq_q][dim]"
        yield "k", f"const {kind}", "[batch][kv_heads][seq_k][dim]"
        yield "q_out", "uint8_t", "[batch][heads][seq_q][dim]: q in 8 bits"
        yield "k_out", "uint8_t", "[batch][kv_heads][seq_k][dim]: k in 8 bits"
        yield "q_descale", "float", "[batch][heads][seq_q]"
        yield "k_descale", "float", "[batch][kv_heads][tiles_k]"
    if operation.smooth:
        yield "partial_sums", "float", "[batch][kv_heads][chunks][dim]: of k"
        yield "k_mean", "float", "[batch][kv_heads][dim]"
        yield "score_shift", "float", "[batch][heads][seq_q]: products of rows of q and the mean"


def parameters(spec: AttentionQuantizeSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block, of both launches: tensors, strides and sizes."""
    operation: AttentionQuantizeOperation = spec.operation
    fields: list[Field[AtLaunch]] = [
        pointer(name, cpp, shape) for name, cpp, shape in _pointers(operation)
    ]
    for name in ("v", *(("q", "k", "q_out", "k_out") if operation.quantizes else ())):
        for index, axis in enumerate(("batch", "head", "row")):
            told = f"elements of {name} from {axis} to {axis}"
            fields.append(int64(f"{name}_{axis}", told, _stride(name, index)))
    fields += [
        int32("kv_heads", "heads of k and v", lambda at: at.problem.kv_heads),
        int32("seq_k", "keys of a batch", lambda at: at.problem.seq_k),
        int32("tiles_k", "tiles of keys, of one head", lambda at: at.problem.tiles_k),
    ]
    if operation.lengths == "packed":
        fields.append(int32("sequences", "at least one", lambda at: at.problem.sequences))
    if operation.quantizes:
        fields += [
            int32("chunks", "of keys, of one head", lambda at: at.chunks),
            int32("key_tiles", "CTAs that have keys", lambda at: at.key_tiles),
            int32("heads", "of q", lambda at: at.problem.heads),
            int32("seq_q", "rows of q of a batch", lambda at: at.problem.seq_q),
            int32("tiles_q", "tiles of rows of q, of one head", lambda at: at.problem.tiles_q),
        ]
    return block(fields)


def _stride(name: str, index: int) -> Callable[[AtLaunch], int]:
    return lambda at: int(getattr(at.problem, f"strides_{name}")[index])


def launches(
    spec: AttentionQuantizeSpec, problem: AttentionQuantizeProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch, behind one of the mean and the largest magnitude where v is quantized.

    There must be keys, of at least one head. Raises ProblemError for sizes beyond 32 bits.
    """
    at = AtLaunch(spec, problem, device)
    refuse_beyond(
        {
            f"seq_q {problem.seq_q}": problem.seq_q + TILE,
            f"seq_k {problem.seq_k}": problem.tiles_k * TILE + CHUNK,
            f"batch {problem.batch}, heads {problem.heads}, kv_heads {problem.kv_heads}, seq_q "
            f"{problem.seq_q}, seq_k {problem.seq_k}": at.grid,
        }
    )
    values = parameters(spec).values(at)

    def launch(suffix: str, grid: int) -> Launch:
        name = spec.name + suffix
        return Launch(name, grid, spec.schedule.threads, 1, 0, values, early=True)

    own = launch("", at.grid)
    if not spec.operation.quantizes:
        return [own]
    return [launch("_statistics", problem.groups * at.chunks), own]


def workspaces(spec: AttentionQuantizeSpec, problem: AttentionQuantizeProblem) -> list[Workspace]:
    """What the CTAs of the first launch tell each other, and the next launch."""
    operation: AttentionQuantizeOperation = spec.operation
    if not operation.quantizes:
        return []
    groups, chunks = problem.groups, -(-problem.seq_k // CHUNK)
    spaces = [
        Workspace("v_factor", groups * _FLOAT),
        Workspace("partial_peaks", groups * chunks * _FLOAT),
        Workspace("arrivals", groups * _FLOAT, kept=True),
    ]
    if operation.smooth:
        spaces.append(Workspace("partial_sums", groups * chunks * operation.dim * _FLOAT))
    return spaces


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2.5e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "vectors": 2e-7,  # seconds of an SM for the rows of a tile that a thread has one by one
}


def traffic(operation: AttentionQuantizeOperation, shape: AttentionQuantizeShape) -> int:
    """Bytes of memory that are moved, where every launch reads what it needs from there."""
    keys = shape.batch * shape.kv_heads * shape.seq_k
    rows = shape.batch * shape.heads * shape.seq_q
    if not operation.quantizes:
        return keys * operation.row_bytes()
    again = keys * (1 + operation.smooth) * operation.dim * element(operation.element).bytes
    return (2 * keys + rows) * operation.row_bytes() + again


def seconds(
    constants: Value,
    operation: AttentionQuantizeOperation,
    schedule: AttentionQuantizeSchedule,
    shape: AttentionQuantizeShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    launches = 1 + operation.quantizes  # and of what keys have, v, or k and v
    tiles = shape.batch * (
        launches * shape.kv_heads * -(-shape.seq_k // TILE) + shape.heads * -(-shape.seq_q // TILE)
    )
    resident = multiprocessors * max(1, 2048 // schedule.threads // 2)
    vectors = TILE * operation.lanes / schedule.threads
    turns = max(1.0, tiles / resident) * vectors * constants["vectors"]
    moved = traffic(operation, shape) / constants["bandwidth"]
    return launches * constants["launch"] + max(moved, turns)
