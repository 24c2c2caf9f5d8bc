"""Decode attention as it is measured, but for the GPU: cells, contenders, checks, libraries."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from samplers import constant

from benchmarks import runner
from benchmarks.families import Asked, Case
from benchmarks.peers import _decode_contenders as decoding
from benchmarks.peers._decode_problem import NUMBERS, Decode, Given, Pair, Way, attended
from benchmarks.peers.attention_decode import FAMILY
from benchmarks.peers.libraries import flash_attention
from benchmarks.peers.libraries import flashinfer as flashinfer_kernels
from warploom.runtime.contest import Cell, compete

SMALL = Decode(3, 8, 2, 192)
ROWS = replace(SMALL, rows=4)
EIGHT = replace(SMALL, cache="e4m3")
ALL = pytest.mark.parametrize("problem", [SMALL, ROWS, EIGHT], ids=lambda p: p.name)


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    yield
    NUMBERS.clear()


def listed(**asked: Any) -> list[Case]:
    return list(runner.cases(runner.named(["attention_decode"]), Asked(**asked)))


def measured(problem: Decode, *peers: str) -> Cell:
    found = decoding.contenders(problem, Asked(peers=peers, device="cpu"))
    return compete(problem.name, problem.record(), found, sampler=constant(1e-5))


# ---- Cells ---------------------------------------------------------------------------------------


def test_the_floor_is_what_must_be_read() -> None:
    for cache, size in (("bf16", 2), ("e4m3", 1)):
        (case,) = listed(match=f"{cache} 32/8 heads, batch 64, 8192 keys")
        read_bytes = 2 * 64 * 8192 * 8 * 128 * size + 4 * 64 * 32 * 128
        assert case.floor is not None and case.floor.limit == "bytes"
        assert case.floor.seconds == pytest.approx(read_bytes / 4.35e12, rel=1e-3)


def test_cells_are_told_apart_by_what_is_asked_of_them() -> None:
    divisions = {FAMILY.division(case.problem) for case in listed()}
    assert divisions == {"k and v below 64 MB", "64 MB to 256 MB", "k and v from 256 MB"}


# ---- Contenders ----------------------------------------------------------------------------------


@ALL
def test_warploom_is_checked_in_every_layout_and_missing_peers_are_absent(problem: Decode) -> None:
    first, *others = measured(problem).entries
    assert first.contender == "warploom" and str(first.kernel).startswith("attention_decode")
    ours = [first, *(one for one in others if one.contender.startswith("warploom"))]
    names = ["warploom", "warploom, pages of 16", "warploom, pages of 64"]
    names += ["warploom, batch_invariant", *(["warploom, bf16"] if problem is EIGHT else [])]
    assert [one.contender for one in ours] == names
    for one in ours:
        assert one.absent is None and 0 < (one.error_share or 0) <= 1, one
    absent = {one.contender: one.absent for one in others if one.absent}
    assert {"XQA, pages of 64", "FlashInfer, pages of 16"} <= absent.keys()
    if problem is SMALL:
        assert "flashinfer" in str(absent["XQA, pages of 16"])


@pytest.mark.parametrize("change", ["a key", "a scale", "a page", "a set", "the mask"])
def test_what_is_wrong_shows(change: str) -> None:
    problem = {"a scale": EIGHT, "the mask": ROWS}.get(change, SMALL)
    given, page = Given(problem, "cpu"), 16
    right = given.right(page)
    assert right.share(right.exact.bfloat16()) <= 1
    if change == "a key":
        shortened = replace(problem, keys=problem.keys - 16)
        other = Given(shortened, "cpu")
        other._tables[page] = given.table(page)[:, :-1]
        other.k, other.v = (
            one.view(2, -1)[:, : 2 * shortened.numbers] for one in (given.k, given.v)
        )
        other.caches = given.caches  # type: ignore[method-assign]
        found = other.right(page).exact
    elif change == "a scale":
        found = right.exact * 1.02
    elif change == "a page":
        given._tables[page] = given.table(page).clone()
        given._tables[page][1, 3] = given.table(page)[2, 1]
        given._right.clear()
        found = given.right(page).exact
    elif change == "a set":
        found = right.exact.clone()
        found[problem.batch :] = found[: problem.batch]
    else:
        given.q = given.q.flip(1)
        given._right.clear()
        found = given.right(page).exact.flip(1)
    assert right.share(found.bfloat16()) > 1
    assert right.share(torch.full_like(right.exact, torch.nan)) == math.inf


def test_what_is_right_is_what_torch_computes() -> None:
    for problem in (SMALL, ROWS):
        given = Given(problem, "cpu")
        k, v = (one[0].double() for one in given.caches()[0])
        found, noise = attended(given.q[0].double(), k, v)
        mask = torch.ones(problem.rows, problem.keys).tril(problem.keys - problem.rows).bool()
        wanted = torch.nn.functional.scaled_dot_product_attention(
            *(one[None].transpose(1, 2) for one in (given.q[0].double(), k, v)),
            attn_mask=mask,
            enable_gqa=True,
        )
        torch.testing.assert_close(found, wanted[0].transpose(0, 1))
        assert (noise > 0).all() and noise.shape == found.shape


def test_a_graph_is_captured_at_few_keys_and_replayed_at_all() -> None:
    found = decoding.replayed_contenders(SMALL, 64, Asked(device="cpu"))
    assert [one.name for one in found] == ["warploom", "warploom, captured at 192 keys"]
    seen: list[int] = []

    def capture(calls: Sequence[decoding.Product]) -> Callable[[], float]:
        seen.append(int(calls[0].lengths[0]))
        return lambda: 1e-5 * len([call() for call in calls])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding, "graph_sampler", capture)
        cell = compete("replayed", {}, found, sampler=decoding.replayed)
    assert seen == [64, 192]
    assert all(entry.right and not entry.absent for entry in cell.entries)
    assert cell.ratio == 1


# ---- Libraries that few machines have are called with what they take -----------------------------


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: Sequence[float] = (1.0, 1.0)
) -> torch.Tensor:
    """A sequence's result, of q [rows, heads, dim] and k, v [keys, kv_heads, dim]."""
    return attended(q.double(), k.double() * scales[0], v.double() * scales[1])[0].to(q.dtype)


def paged(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    return cache[pages.long()].flatten(0, 1)


def entries(problem: Decode, peer: str) -> dict[str, Any]:
    cell = measured(problem, peer)
    return {one.contender: one for one in cell.entries if not one.contender.startswith("warploom")}


def test_flashattention_3_is_planned_and_called_with_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[tuple[Any, ...]] = []

    def forward(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **told: Any
    ) -> tuple[torch.Tensor]:
        table = told.get("page_table")
        assert told["seqused_k"].tolist() == [SMALL.keys] * SMALL.batch
        assert told["is_causal"] is (q.shape[1] > 1) and told["scheduler_metadata"] == "planned"
        assert told["softmax_scale"] == SMALL.dim**-0.5
        found = []
        for i in range(len(q)):
            one = [paged(t, table[i]) if table is not None else t[i] for t in (k, v)]
            found.append(plain(q[i], *one))
        return (torch.stack(found),)

    def plan(*sizes: Any, **told: Any) -> str:
        plans.append((*sizes[:7], told["page_size"]))
        return "planned"

    monkeypatch.setattr(flash_attention, "flash3_operators", lambda: (forward, None))
    operators = SimpleNamespace(get_scheduler_metadata=plan)
    monkeypatch.setattr(torch.ops, "flash_attn_3", operators, raising=False)
    for problem in (SMALL, ROWS):
        found = entries(problem, "fa3")
        assert list(found) == ["FlashAttention-3", "FlashAttention-3, pages of 64"]
        assert all(one.right and not one.absent for one in found.values()), found
        assert plans[-2:] == [(3, problem.rows, 192, 8, 2, 128, 128, page) for page in (None, 64)]


class Wrapper:
    """FlashInfer's wrappers of decode and prefill kernels."""

    def __init__(self, room: torch.Tensor, layout: str, **told: Any) -> None:
        assert layout == "NHD" and room.dtype == torch.uint8 and told["use_cuda_graph"]
        self.prefill = "qo_indptr_buf" in told

    def plan(self, *given: Any, **told: Any) -> None:
        if self.prefill:
            rows, *given = given
            self.rows = int(rows[1])
            assert rows.dtype == torch.int32 and told["causal"]
        else:
            self.rows = 1
        first, self.indices, last, heads, kv_heads, dim, page = given
        assert (heads, kv_heads, dim) == (8, 2, 128) and last.tolist() == [page] * SMALL.batch
        self.first = first.tolist()

    def run(
        self, q: torch.Tensor, caches: Pair, k_scale: float = 1, v_scale: float = 1
    ) -> torch.Tensor:
        found = []
        for i, (begin, end) in enumerate(zip(self.first, self.first[1:], strict=False)):
            own = [paged(cache, self.indices[begin:end]) for cache in caches]
            rows = q[i * self.rows : (i + 1) * self.rows]
            found.append(plain(rows, *own, (k_scale, v_scale)))
        return torch.cat(found)


def attend_xqa(
    q: torch.Tensor,
    caches: Pair,
    room: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    most: int,
    **told: Any,
) -> None:
    assert (room == 0).all() and lengths.dtype == torch.uint32 and most == SMALL.keys
    rows = told["q_len_per_req"]
    if rows > 1:
        assert told["mask"][0].view(torch.int16).tolist() == [[1, 0], [3, 0], [7, 0], [15, 0]]
    scales = told["bmm1_scale"] * SMALL.dim**0.5, told["bmm2_scale"]
    for i, own in enumerate(q.view(SMALL.batch, rows, 8, 128)):
        one = plain(own, *(paged(cache, table[i]) for cache in caches), scales)
        told["out"].view(SMALL.batch, rows, 8, 128)[i] = one


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_kernels, "_WORKSPACE", 1 << 10)
    for kept in (flashinfer_kernels._workspace, flashinfer_kernels._zeros):
        kept.cache_clear()
    for name in ("flashinfer", "flashinfer.decode"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    module: Any = sys.modules["flashinfer"]
    module.BatchDecodeWithPagedKVCacheWrapper = Wrapper
    module.BatchPrefillWithPagedKVCacheWrapper = Wrapper
    decode: Any = sys.modules["flashinfer.decode"]
    decode.xqa_batch_decode_with_kv_cache = attend_xqa


@pytest.mark.parametrize(
    ("problem", "peer", "names"),
    [
        (SMALL, "flashinfer", ["", ", tensor cores 16", ", tensor cores 64"]),
        (ROWS, "flashinfer", [", tensor cores 16", ", tensor cores 64"]),
        (EIGHT, "flashinfer", [""]),
        (SMALL, "xqa", ["16", "64"]),
        (ROWS, "xqa", ["64"]),
        (EIGHT, "xqa", ["64"]),
    ],
)
def test_flashinfer_is_called_with_what_it_takes(
    flashinfer: None, problem: Decode, peer: str, names: list[str]
) -> None:
    found = entries(problem, peer)
    there = [name for name, one in found.items() if not one.absent]
    assert len(there) == len(names), found
    assert all(found[name].right for name in there)
    told = [one.absent for one in found.values() if one.absent]
    assert all("causal mask" in words or "64 only" in words for words in told)


def test_flashinfers_workspace_is_as_large_as_its_plan_asks_for() -> None:
    """With 512 MiB it refused batch 256 with 4 rows: its plan asked for 1,337,982,976 bytes."""
    values = 1_337_982_976
    asked = values + values // 128  # and the log-sum-exp of each row of them
    assert asked <= flashinfer_kernels.workspace_bytes(Decode(256, 64, 8, 8192, rows=4))
    assert flashinfer_kernels.workspace_bytes(SMALL) >= 128 << 20


def test_flashinfer_is_given_the_workspace_of_each_problem(
    flashinfer: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: set[int] = set()

    def workspace(size: int, device: str) -> torch.Tensor:
        given.add(size)
        return torch.empty(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(flashinfer_kernels, "_workspace", workspace)
    for problem in (SMALL, ROWS):
        entries(problem, "flashinfer")
    assert given == {flashinfer_kernels.workspace_bytes(problem) for problem in (SMALL, ROWS)}
    assert len(given) == 2


def test_a_peer_that_refuses_says_why_in_one_line() -> None:
    def refuse(_given: Given, _page: int) -> Callable[[int], torch.Tensor]:
        raise TypeError("not these\nand more")

    found = decoding.contender(Given(SMALL, "cpu"), Way("peer", refuse), peer=True)
    cell = compete("refused", {}, [found], sampler=constant(1e-5))
    assert cell.entries[0].absent == "TypeError: not these"
