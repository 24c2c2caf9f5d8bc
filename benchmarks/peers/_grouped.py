"""Grouped GEMMs, whose groups end at offsets on the device, beside torch's and DeepGEMM's.

Rows are those that experts of language models get, drawn evenly or by Zipf's law; groups of k are
the gradients of the same weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch

from benchmarks.families import Asked, Case
from benchmarks.peers.libraries import imported
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.samples import GemmData, Operands, grouped_call
from warploom.runtime.measure import largest_share
from warploom.runtime.plan import run
from warploom.runtime.trial import wrong

Routed = Literal["even", "zipf"]
BY_ROWS = GemmOperation("bf16", "bf16", "bf16", batched=True, groups="rows")
BY_K = replace(BY_ROWS, layout_a="col", layout_b="row", groups="k")
PADDED = 128  # rows that DeepGEMM's contiguous groups begin at multiples of


def grouped(_asked: Asked) -> Iterator[Case]:
    """The listed experts, of rows drawn evenly and by Zipf's law; then gradients of weights."""
    listed = cells()["gemm"]["grouped_gemm"]
    for operation, name in ((BY_ROWS, "rows"), (BY_K, "k")):
        for groups, n, k, rows in listed[name]:
            for routed in ("even", "zipf"):
                yield _case(operation, (groups, n, k, rows), routed)


def _case(operation: GemmOperation, shape: tuple[int, int, int, int], routed: Routed) -> Case:
    """So many rows in all of A [rows, k], and weights [n, k]; of gradients k is their rows."""
    groups, n, k, rows = shape
    by_rows = operation.groups == "rows"
    moved = 2 * (rows * (n + k) + groups * n * k)
    problem = {
        "m": rows if by_rows else n,
        "n": n if by_rows else k,
        "k": k if by_rows else rows,
        "type": "bf16",
        "epilogue": f"{groups} groups of {operation.groups}, {routed}",
    }
    name = f"{groups} groups of {operation.groups} {routed}, {rows} rows, {n}x{k}"
    floor = Floor.of(2 * rows * n * k, moved, 16)
    return Case(name, problem, floor, partial(_contenders, operation, shape, routed))


def _contenders(
    operation: GemmOperation, shape: tuple[int, int, int, int], routed: Routed, asked: Asked
) -> list[Contender]:
    groups, n, k, rows = shape
    by_rows = operation.groups == "rows"
    extents = (rows // groups, n, k) if by_rows else (n, k, rows // groups)
    data = GemmData(operation, GemmShape(*extents, groups), asked.device, 0)
    draws = torch.Generator(asked.device).manual_seed(1)
    total = rows // groups * groups

    def drawn() -> Operands:
        return replace(data.operands(), offs=_ends(total, groups, routed, draws))

    given = rotated(drawn, 2 * (rows * (n + k) + groups * n * k), asked.device)
    found = [
        _contender("warploom", given, partial(_ours, operation), peer=False),
        _contender("torch._grouped_mm", given, _torch, peer=True),
    ]
    if by_rows and "deep_gemm" in (asked.peers or ("deep_gemm",)):
        found.append(_deep_gemm(given))
    return found


def _ends(total: int, groups: int, routed: Routed, draws: torch.Generator) -> torch.Tensor:
    """Where groups end whose rows are drawn one by one."""
    weights = torch.ones(groups, device=draws.device)
    if routed == "zipf":
        weights /= torch.randperm(groups, generator=draws, device=draws.device) + 1
    chosen = torch.multinomial(weights, total, replacement=True, generator=draws)
    return torch.bincount(chosen, minlength=groups).cumsum(0).to(torch.int32)


def _contender(
    name: str,
    given: Sequence[Operands],
    call: Callable[[Operands], torch.Tensor],
    *,
    peer: bool,
) -> Contender:
    outs = [replace(one, out=wrong(torch.empty_like(one.out))) for one in given]
    operation = BY_ROWS if given[0].b.dim() == 3 else BY_K

    def share() -> float:
        return largest_share(call(outs[0]), *grouped_call(operation, outs[0]).bound())

    return Contender(name, [partial(call, one) for one in outs], share, peer=peer)


def _ours(operation: GemmOperation, one: Operands) -> torch.Tensor:
    return run(grouped_call(operation, one))[0]


def _torch(one: Operands) -> torch.Tensor:
    return torch._grouped_mm(one.a, one.b, offs=one.offs)


def _deep_gemm(given: Sequence[Operands]) -> Contender:
    """DeepGEMM's contiguous groups, whose rows are padded before: that is not timed."""
    ready: dict[int, tuple[Any, ...]] = {}
    places: dict[int, torch.Tensor] = {}

    def prepare(one: Operands) -> tuple[Any, ...]:
        library = imported("deep_gemm", "deep_gemm")
        assert one.offs is not None  # noqa: S101 (for type checkers)
        ends = one.offs.long()
        counts = ends.diff(prepend=ends.new_zeros(1))
        padded = (counts + PADDED - 1) // PADDED * PADDED
        starts = padded.cumsum(0) - padded
        row = torch.arange(one.a.shape[0], device=one.a.device)
        group = torch.searchsorted(ends, row, right=True)
        place = starts[group] + row - (ends - counts)[group]
        a = one.a.new_zeros(int(padded.sum()), one.a.shape[1])
        a[place] = one.a
        indices = torch.repeat_interleave(
            torch.arange(len(counts), device=a.device, dtype=torch.int32), padded
        )
        d = a.new_empty(a.shape[0], one.b.shape[2])
        places[id(one)] = place
        multiply = library.m_grouped_bf16_gemm_nt_contiguous
        return multiply, a, one.b.mT, d, indices

    def call(one: Operands) -> torch.Tensor:
        if id(one) not in ready:
            ready[id(one)] = prepare(one)
        multiply, a, b, d, indices = ready[id(one)]
        multiply(a, b, d, indices)
        found: torch.Tensor = d
        return found

    def share() -> float:
        d = call(given[0])[places[id(given[0])]]
        return largest_share(d, *grouped_call(BY_ROWS, given[0]).bound())

    calls = [partial(call, one) for one in given]
    return Contender("deep_gemm, rows padded before", calls, share, peer=True)
