"""A call's only launch: blocks of the rows of one token each, where these lie, and its time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

from warploom.generator import launches as data
from warploom.generator.elements import element
from warploom.generator.families.attention_append.schedule import (
    AttentionAppendOperation,
    AttentionAppendProblem,
    AttentionAppendSchedule,
    AttentionAppendShape,
    AttentionAppendSpec,
)
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.model.arithmetic import Value
from warploom.generator.parameters import Field, ParameterBlock, block, int32, int64, pointer
from warploom.generator.shapes import refuse_beyond

WARP = 32  # threads


class AtLaunch(
    data.AtLaunch[AttentionAppendOperation, AttentionAppendSchedule, AttentionAppendProblem]
):
    """What the parameters of a launch are functions of."""

    @cached_property
    def threads(self) -> int:
        """Of a block: whole warps, no more than the rows of a token take."""
        wanted = self.problem.rows * self.operation.lanes
        return min(self.schedule.threads, -(-wanted // WARP) * WARP)

    @property
    def blocks(self) -> int:
        """Of one token."""
        return -(-self.problem.rows // (self.threads // self.operation.lanes))


def _pointers(operation: AttentionAppendOperation) -> Iterator[tuple[str, str, str]]:
    """Name, C++ type and dimensions of every tensor."""
    kind, cached = element(operation.element).cpp, element(operation.cached).cpp
    new = "[tokens][heads][dim]" if operation.packed else "[batch][heads][seq][dim]"
    yield "k_cache", cached, "[pages][kv_heads][page][dim]"
    yield "v_cache", cached, "[pages][kv_heads][page][dim]"
    yield "k", f"const {kind}", new
    yield "v", f"const {kind}", new
    yield (
        "lengths",
        "const int",
        "[batch]: rows of each sequence that are there; below 0: no sequence",
    )
    yield "lengths_after", "int", "[batch]: rows that are there then; null: not asked for"
    if operation.paged:
        yield "page_table", "const int", "[batch][columns]"
    if operation.packed:
        yield "cu_seqlens", "const int", "[batch + 1]: where the new rows of each sequence begin"
    if operation.rotary != "none":
        angle = element(operation.angle).cpp
        yield "cos", f"const {angle}", "[positions][rotary / 2]"
        yield "sin", f"const {angle}", "[positions][rotary / 2]"
    if operation.queries:
        yield "q", f"const {kind}", new
        yield "out", kind, f"{new}: q, turned"
    if operation.scales != "none":
        given = operation.scales == "head"
        for name in ("scale_k", "scale_v"):
            beside = "[kv_heads]" if given else "[pages][kv_heads][page]"
            yield name, "const float" if given else "float", beside


def parameters(spec: AttentionAppendSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: tensors, the steps along each, and extents."""
    operation: AttentionAppendOperation = spec.operation
    fields: list[Field[AtLaunch]] = [
        pointer(name, cpp, shape) for name, cpp, shape in _pointers(operation)
    ]
    new = ("head", "token") if operation.packed else ("sequence", "head", "token")
    for name in ("k", "v", *(("q", "out") if operation.queries else ())):
        fields += _steps(name, new)
    for name in ("k_cache", "v_cache"):
        fields += _steps(name, ("page", "head", "row"))
    if operation.scales == "token":
        for name in ("scale_k", "scale_v"):
            fields += _steps(name, ("page", "head", "row"))
    if operation.rotary != "none":
        fields += [
            int64("cos_step", "elements from row to row of cos", lambda at: at.problem.step_cos),
            int64("sin_step", "elements from row to row of sin", lambda at: at.problem.step_sin),
        ]
    if operation.paged:
        told = "entries of the table from sequence to sequence"
        fields.append(int64("table_step", told, lambda at: at.problem.table_step))
    fields += [
        int32("batch", "sequences", lambda at: at.problem.batch),
        int32("kv_heads", "heads of k and v", lambda at: at.problem.kv_heads),
        int32("blocks", "of one token", lambda at: at.blocks),
        int32("capacity", "rows that a sequence may have", _capacity),
    ]
    if operation.queries:
        fields.append(int32("heads", "of q", lambda at: at.problem.heads))
    if not operation.packed:
        fields += [
            int32("steps", "tokens of a sequence, of k or of q", _most),
            int32("seq", "new rows of a sequence", lambda at: at.problem.seq),
        ]
        if operation.queries:
            fields.append(int32("seq_q", "rows of q of a sequence", lambda at: at.problem.seq_q))
    if operation.paged:
        fields += [
            int32("pages", "of each cache", lambda at: at.problem.pages),
            int32("page", "rows of a page", lambda at: at.problem.page),
        ]
    if operation.rotary != "none":
        fields += [
            int32("positions", "rows of cos and sin", lambda at: at.problem.positions),
            int32("rotary", "numbers of a row that are turned", lambda at: at.problem.rotary),
        ]
    if operation.scales == "head":
        told = "elements from the scale of a head to the next"
        fields.append(int32("head_step", told, lambda at: at.problem.head_step))
    return block(fields)


def _steps(name: str, axes: tuple[str, ...]) -> Iterator[Field[AtLaunch]]:
    """The steps of a tensor along its last dimensions but that of a row's numbers."""
    for index, axis in enumerate(axes, start=3 - len(axes)):
        told = f"elements of {name} from {axis} to {axis}"
        yield int64(f"{name}_{axis}", told, _step(name, index))


def _step(name: str, index: int) -> Callable[[AtLaunch], int]:
    return lambda at: int(getattr(at.problem, f"steps_{name}")[index])


def _capacity(at: AtLaunch) -> int:
    return at.problem.columns * at.problem.page


def _most(at: AtLaunch) -> int:
    return max(at.problem.seq, at.problem.seq_q)


def launches(
    spec: AttentionAppendSpec, problem: AttentionAppendProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch. There must be tokens; ProblemError for more than 32 bits count."""
    at = AtLaunch(spec, problem, device)
    refuse_beyond(
        {
            f"tokens {problem.tokens}, {problem.rows} heads": problem.tokens * at.blocks,
            f"columns {problem.columns} of {problem.page} rows": problem.columns * problem.page,
            f"pages {problem.pages}": problem.pages,
            f"positions {problem.positions}": problem.positions,
            f"batch {problem.batch}": problem.batch + WARP,  # beyond which the last is looked for
        }
    )
    values = parameters(spec).values(at)
    return [Launch(spec.name, problem.tokens * at.blocks, at.threads, 1, 0, values, early=True)]


# ---- How long a call takes -----------------------------------------------------------------------

START = {
    "launch": 2.5e-6,  # seconds
    "bandwidth": 4e12,  # bytes a second of memory
    "block": 3e-8,  # seconds of a multiprocessor for a block
}


def seconds(
    constants: Value,
    operation: AttentionAppendOperation,
    schedule: AttentionAppendSchedule,
    shape: AttentionAppendShape,
    multiprocessors: int,
) -> float:
    """The seconds of one call, by these constants."""
    moved = shape.tokens * operation.token_bytes(shape.kv_heads, shape.heads)
    rows = 2 * shape.kv_heads + shape.heads
    blocks = shape.tokens * max(1, rows * operation.lanes / schedule.threads) / multiprocessors
    return constants["launch"] + max(moved / constants["bandwidth"], blocks * constants["block"])
