"""What `warploom bench` measures: Warploom and every peer on every cell, in turns, in one process.

A cell's figure is the fastest peer's time over Warploom's. A peer that is missing, refuses or fails
is a row marked absent, one that answers wrongly a row marked wrong; neither counts as the fastest.
Cells whose times were unsteady are measured once more, and then marked noisy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import torch

import warploom
from benchmarks import (
    attention,
    attention_backward,
    attention_backward_peers,
    attention_peers,
    protocol,
)
from benchmarks.cells import Shape, cells, problem, text
from benchmarks.gemm_peers import PEERS as GEMM_PEERS
from benchmarks.peers import KINDS, Operands, operand_sets, ours
from benchmarks.protocol import MISSING, Cell, Contender, Entry, compete, gemm_floor, summary
from benchmarks.triton_peers import attention_peer
from benchmarks.wording import kind_of
from warploom.runtime.measure import Call, Sampler, graph_sampler

UNSTEADY = 0.05  # spread of a median that clocks which move make
ATTENTION_PEERS = {
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
    "triton": "Triton",
}
ONLY_FORWARD = ("triton",)  # no backward pass is measured of it
PASSES = ("forward", "backward")
PEERS = {"gemm": tuple(GEMM_PEERS), "attention": tuple(ATTENTION_PEERS)}
CELLS = {
    "gemm": ("squares", "llm", "tuned", "all"),
    "attention": ("square", "grouped", "all"),
}
Sampling = Callable[[Sequence[Call]], Sampler]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run is to measure: which cells, types, passes and rows, beside which peers."""

    cells: str
    peers: tuple[str, ...]
    types: tuple[str, ...] = tuple(KINDS)
    passes: tuple[str, ...] = PASSES
    m: tuple[int, ...] = ()
    match: str = ""


# ---- Cells ---------------------------------------------------------------------------------------


def measured(
    what: Literal["gemm", "attention"],
    asked: Asked,
    device: str = "cuda",
    sampler: Sampling = graph_sampler,
) -> Iterator[Cell]:
    """Measure every cell that was asked for, one after the other."""
    if what == "attention":
        for name in asked.passes:
            measure = {"forward": attention_cell, "backward": attention_backward_cell}[name]
            for one in attention.cells(asked.cells):  # type: ignore[arg-type]
                if asked.match in f"{one.name} {name}" and (not asked.m or one.seq in asked.m):
                    yield steadied(partial(measure, one, asked.peers, device, sampler))
        return
    for kind in asked.types:
        for shape in shapes(asked):
            if asked.match in f"{kind} {text(shape)}":
                yield steadied(partial(gemm_cell, kind, shape, asked.peers, device, sampler))


def shapes(asked: Asked) -> list[Shape]:
    """The shapes of products that were asked for."""
    if asked.cells == "tuned":
        from warploom.generator.configurations import cells as listed

        rows = [m for m in listed()["gemm"]["tuned_m"] if not asked.m or m in asked.m]
        return cells("llm", rows)
    found = cells("squares", asked.m) if asked.cells in ("squares", "all") else []
    return found + (cells("llm", asked.m) if asked.cells in ("llm", "all") else [])


def gemm_cell(
    kind_name: str,
    shape: Shape,
    peers: Sequence[str],
    device: str = "cuda",
    sampler: Sampling = graph_sampler,
) -> Cell:
    """One product of one type beside its peers."""
    kind = KINDS[kind_name]
    sets = operand_sets(kind, shape, device)
    mine = ours(kind, sets)
    beside = [GEMM_PEERS[name](kind, sets) for name in peers]
    about = problem(shape, type=kind_name)
    floor = gemm_floor(*shape, *kind.bits)
    cell = compete(f"{kind_name} {text(shape)}", about, [mine, *beside], floor, sampler=sampler)
    return ranked(cell, _gemm_decision(sets[0]))


def attention_cell(
    one: attention_peers.Problem,
    peers: Sequence[str],
    device: str = "cuda",
    sampler: Sampling = graph_sampler,
) -> Cell:
    """One attention's forward pass beside its peers."""
    sets = attention.operand_sets(one, device)
    known = {made.name: made for made in attention_peers.peers(one, sets)}
    known["Triton"] = attention_peer(one, sets)
    beside: list[Contender] = [known[ATTENTION_PEERS[name]] for name in peers]
    about = {**asdict(one), "type": "bf16", "pass": "forward", "flops": one.flops}
    mine = attention_peers.ours(one, sets)
    name = f"{one.name} forward"
    cell = compete(name, about, [mine, *beside], one.floor, sampler=sampler)
    keywords: dict[str, Any] = {**one.keywords, **sets[0].lengths, "out": sets[0].out}
    plan = warploom.plan_attention(sets[0].q, sets[0].k, sets[0].v, **keywords)
    return ranked(cell, warploom.explain(plan).reason)


def attention_backward_cell(
    one: attention_peers.Problem,
    peers: Sequence[str],
    device: str = "cuda",
    sampler: Sampling = graph_sampler,
) -> Cell:
    """One attention's backward pass beside those peers of the forward pass that have one here."""
    with torch.enable_grad():  # most peers' are asked for through autograd
        given = attention_backward_peers.passes(one, attention.operand_sets(one, device))
        known = {made.name: made for made in attention_backward_peers.peers(given)}
        beside = [known[ATTENTION_PEERS[name]] for name in peers if name not in ONLY_FORWARD]
        work, floor = attention_backward.work(one, products=5)
        about, name = {**work, "pass": "backward"}, f"{one.name} backward"
        mine = attention_backward_peers.ours(given)
        cell = compete(name, about, [mine, *beside], floor, sampler=sampler)
    first = given[0]
    operands = (first.given.q, first.given.k, first.given.v)
    told = warploom.explain(warploom.plan_attention(*operands, **first.arguments)).gradients
    return ranked(cell, told.reason if told else "")


def _gemm_decision(one: Operands) -> str:
    out_dtype = torch.bfloat16 if one.listed else None
    return warploom.explain(one.a, one.b, epilogue=one.listed, out_dtype=out_dtype).reason


def ranked(cell: Cell, decision: str) -> Cell:
    """The cell with its fastest right peer second, and with what decided on the kernel."""
    first, *others = cell.entries
    others.sort(key=_rank)
    return replace(cell, entries=(first, *others), problem={**cell.problem, "decision": decision})


def _rank(entry: Entry) -> tuple[bool, float]:
    return not right(entry), entry.seconds or 0.0


def right(entry: Entry) -> bool:
    """True of a contender that is there and answers rightly."""
    return entry.seconds is not None and (entry.error_share or 0) <= 1


def steadied(measure: Callable[[], Cell]) -> Cell:
    """Measure a cell; where its times are unsteady once more, and mark it where they are again."""
    cell = measure()
    if unsteady(cell):
        cell = measure()
    if unsteady(cell):
        cell = replace(cell, problem={**cell.problem, "noisy": True})
    return cell


def unsteady(cell: Cell) -> bool:
    """True when the spread of Warploom's or its fastest peer's times is more than noise."""
    return any((entry.spread or 0) > UNSTEADY for entry in cell.entries[:2] if right(entry))


# ---- What is said of them ------------------------------------------------------------------------


def row(cell: Cell, contenders: Sequence[str]) -> list[object]:
    """A row of the printed table: `columns` says what is in it."""
    found = {entry.contender: entry for entry in cell.entries}
    floor = cell.floor
    return [
        cell.name,
        floor and floor.seconds * 1e6,
        floor and floor.limit,
        *(_told(found.get(name)) for name in contenders),
        cell.ratio and round(cell.ratio, 3),
        verdict(cell),
        "noisy" if cell.problem.get("noisy") else "",
    ]


def columns(contenders: Sequence[str]) -> list[str]:
    """The columns of the printed table: times in microseconds, the ratio to the fastest peer."""
    lead = ["cell", "floor us", "limit"]
    return [*lead, *contenders, "peer / warploom", "verdict", "clocks"]


def verdict(cell: Cell) -> str:
    """Won, tied or lost; wrong of Warploom; absent where no peer was there and right."""
    if len(cell.entries) > 1 and not right(cell.entries[1]) and cell.verdict != "wrong":
        return "absent"
    return cell.verdict


def _told(entry: Entry | None) -> object:
    if entry is None or entry.seconds is None:
        return "absent"
    return round(entry.seconds * 1e6, 1) if right(entry) else "wrong"


def conclusion(found: Sequence[Cell]) -> dict[str, object]:
    """Verdicts counted, and the geometric mean of the ratios."""
    fair = [replace(cell, entries=cell.entries[:1]) if _alone(cell) else cell for cell in found]
    return summary(cell.as_json() for cell in fair)


def conclusions(found: Sequence[Cell]) -> dict[str, dict[str, object]]:
    """The conclusion of each type and, of attention, of each pass."""
    groups: dict[str, list[Cell]] = {}
    for cell in found:
        groups.setdefault(kind_of(cell.as_json()), []).append(cell)
    return {kind: conclusion(own) for kind, own in groups.items()}


def _alone(cell: Cell) -> bool:
    return len(cell.entries) > 1 and not right(cell.entries[1])


def missing(found: Sequence[Cell]) -> dict[str, str]:
    """Each peer that was absent or wrong somewhere, and why it first was."""
    told: dict[str, str] = {}
    for cell in found:
        for entry in cell.entries[1:]:
            if not right(entry):
                why = entry.absent or f"wrong: {entry.error_share:.3g} times its bound"
                told.setdefault(entry.contender, f"{cell.name}: {why}")
    return told


def exit_code(found: Sequence[Cell], *, allow_missing: bool) -> int:
    """3 where a result of Warploom's is wrong, 4 where it or (unless allowed) a peer is missing."""
    lacking = MISSING if missing(found) and not allow_missing else 0
    return protocol.exit_code(found) or lacking
