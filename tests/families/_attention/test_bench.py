"""Both passes of attention as they are measured, but for the GPU: work, contenders, checks."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from samplers import constant

import warploom
from benchmarks import runner
from benchmarks.families import Asked, Case
from benchmarks.peers import _gradients, attention_backward, attention_forward
from benchmarks.peers._attention import LISTED, operands, packed, zipf
from benchmarks.peers._attention_problem import Attention
from warploom.generator.families._attention.shape import extents_of_cell
from warploom.generator.specification import parse_name
from warploom.runtime.contest import Cell, Floor
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import Band

SMALL = Attention("small", 2, 4, 2, 65, 64, causal=True)
SQUARE = Attention("square", 2, 3, 3, 33, 64, causal=True)
WINDOW = Attention("window", 1, 4, 2, 65, 64, causal=True, window=15)
PACKED = Attention("packed", 3, 4, 2, 40, 64, causal=True, lengths=(40, 7, 30))
LATER = Attention("later", 2, 2, 1, 33, 80, causal=True, seq_k=70, element="fp16")
AROUND = Attention("around", 1, 2, 2, 40, 64, window=9)
APART = Attention(
    "apart", 2, 4, 2, 33, 64, causal=True, lengths=(33, 9), seq_k=50, lengths_k=(50, 9)
)
ALL = pytest.mark.parametrize(
    "problem", [SMALL, WINDOW, PACKED, LATER, AROUND, APART], ids=lambda p: p.name
)
EXTENTS = ("batch", "heads", "kv_heads", "dim", "seq_q", "seq_k", "window")
PEERS = ["FlashAttention-2", "FlashAttention-3", "FlashAttention-4", "cuDNN"]

forward = attention_forward.contenders
backward = partial(attention_backward.contenders, deterministic=False)
deterministic = partial(attention_backward.contenders, deterministic=True)


def measured(problem: Attention, contenders: Callable[..., object], *specs: str) -> Cell:
    asked = Asked(
        peers=("cudnn", "fa2", "fa3", "fa4"), specs=tuple(map(parse_name, specs)), device="cpu"
    )
    gradients = contenders is not forward
    make = partial(contenders, problem)
    case = Case(problem.name, {}, Floor.of(1.0), lambda a: make(asked=a), gradients=gradients)  # type: ignore[arg-type, return-value]
    return runner.measure(case, asked, constant(1e-5))


@pytest.mark.parametrize(
    "problem",
    [SMALL, WINDOW, LATER, AROUND, Attention("full", 3, 2, 1, 65, 32), replace(LATER, window=9)],
    ids=str,
)
def test_flops_are_those_of_the_scores_that_are_shown(problem: Attention) -> None:
    band = Band(right=0, bottom_right=True) if problem.causal else Band()
    if problem.band is not None:
        band = Band(*problem.band, bottom_right=True)
    heads = problem.batch * problem.heads * problem.dim
    exact = heads * reference.flops(problem.seq, problem.columns, band)
    diagonal = 2 * heads * problem.seq if problem.causal and problem.window is None else 0
    assert problem.flops == exact - diagonal  # half a square leaves out half the diagonal
    assert problem.record("backward", 5)["flops"] == problem.flops * 5 // 2


def test_constants_are_fitted_to_the_shape_that_was_measured() -> None:
    """Sweeps of packed sequences, or of more columns than rows, say something of these."""
    shapes = [extents_of_cell(one.record("forward", 2)) for one in (SMALL, LATER, AROUND, APART)]
    assert shapes == [
        dict(zip(EXTENTS, (2, 4, 2, 64, 65, 65, 0), strict=True)),
        dict(zip(EXTENTS, (2, 2, 1, 80, 33, 70, 0), strict=True)),
        dict(zip(EXTENTS, (1, 2, 2, 64, 40, 40, 19), strict=True)),
        dict(zip(EXTENTS, (2, 4, 2, 64, 33, 50, 0), strict=True)) | {"total_q": 42, "total_k": 59},
    ]


def test_packed_lengths_follow_a_law_and_fill_their_total() -> None:
    lengths = zipf(LISTED["packed"]["tokens"], random.Random(0))
    assert sum(lengths) == 32_768
    assert sorted(lengths)[len(lengths) // 2] < 500 < max(lengths) <= 8192
    (problem,) = packed()
    assert problem.lengths == tuple(lengths)
    assert problem.flops == 2 * 64 * 128 * sum(n * n for n in lengths)
    # The results in the repository are of this draw.
    assert (problem.name, problem.seq) == ("d128 causal packed, 30 sequences, 64/8 heads", 6634)


@ALL
@pytest.mark.parametrize("contenders", [forward, backward], ids=["forward", "backward"])
def test_warploom_is_checked_and_a_peer_that_is_missing_is_absent(
    problem: Attention, contenders: Callable[..., object]
) -> None:
    first, *beside = measured(problem, contenders).entries
    assert (first.contender, first.absent) == ("warploom", None)
    assert 0 < (first.error_share or 0) <= 1
    assert sorted(entry.contender for entry in beside) == PEERS
    for entry in beside:
        assert entry.absent or (entry.error_share or 0) <= 1
    assert "not installed" in str({e.contender: e.absent for e in beside}["FlashAttention-3"])
    passed = "forward" if contenders is forward else "backward"
    fields = problem.operation
    kind = f"attention_{passed}_sm90a_{fields['element']}_dim{fields['dim']}_"
    assert str(first.kernel).startswith(kind)


@pytest.mark.parametrize("contenders", [forward, backward], ids=["forward", "backward"])
def test_a_peer_has_only_what_it_computes_alike(contenders: Callable[..., object]) -> None:
    """Torch's causal mask of cuDNN begins at the top left, and its windows are none."""
    absent = {}
    for problem in (LATER, AROUND, APART):
        entries = measured(problem, contenders).entries
        absent[problem.name] = {entry.contender: entry.absent for entry in entries}["cuDNN"]
    top_left = "torch's causal mask of cuDNN begins at the top left"
    assert absent == {
        "later": top_left,
        "apart": top_left,
        "around": "torch has no windows of cuDNN's",
    }


def test_deterministic_kernels_compete_with_peers_that_are_and_with_our_own() -> None:
    entries = measured(SMALL, deterministic).entries
    assert entries[-1].contender == "warploom, in any order"
    assert "_deterministic_" in str(entries[0].kernel)
    assert "_deterministic_" not in str(entries[-1].kernel)
    absent = {entry.contender: entry.absent for entry in entries}
    assert absent["cuDNN"] == "torch has no deterministic one"


def test_both_passes_of_warploom_and_of_torch_are_checked() -> None:
    first, *beside = measured(SQUARE, attention_backward.trained).entries
    assert (first.contender, first.absent) == ("warploom", None)
    assert 0 < (first.error_share or 0) <= 1
    assert sorted(entry.contender for entry in beside) == PEERS


@pytest.mark.parametrize("contenders", [forward, backward], ids=["forward", "backward"])
def test_a_spec_competes_where_it_computes_the_cell(contenders: Callable[..., object]) -> None:
    one = operands(SMALL, "cpu")
    told = warploom.explain(warploom.plan_attention(one.q, one.k, one.v, causal=True))
    name = told.kernel if contenders is forward else str(told.backward)
    assert measured(SMALL, contenders, name).entries[-1].contender == name
    for problem, other in ((WINDOW, contenders), (SMALL, deterministic)):
        names = [entry.contender for entry in measured(problem, other, name).entries]
        assert name not in names


@ALL
def test_a_wrong_row_or_an_output_that_nothing_wrote_is_wrong(problem: Attention) -> None:
    one = operands(problem, "cpu")
    wanted = attention_forward.expected(problem, one)
    share = partial(attention_forward.error_share, problem, one.out, wanted)
    assert share() == float("inf")
    for call in attention_forward.ours(problem, [one], lambda: wanted).calls:
        call()
    assert share() <= 1
    last = one.out[: problem.seq] if problem.lengths else one.out[-1].transpose(0, 1)
    last[-1] += 0.25
    assert share() > 1


@ALL
def test_a_wrong_gradient_or_one_that_nothing_wrote_is_wrong(problem: Attention) -> None:
    (one,) = _gradients.steps(problem, "cpu")
    assert _gradients.error_share(one, one.into) == float("inf")
    for call in attention_backward.ours([one]).calls:
        call()
    assert _gradients.error_share(one, one.into) <= 1
    for gradient, rows in zip(one.into, (problem.seq, *(problem.columns,) * 2), strict=True):
        checked = gradient[:rows] if problem.lengths else gradient[-1].transpose(0, 1)
        before = checked[-1].clone()
        checked[-1] += 0.25
        assert _gradients.error_share(one, one.into) > 1
        checked[-1] = before


def test_the_forward_pass_is_run_once_and_before_anything_is_timed() -> None:
    given = _gradients.steps(SMALL, "cpu")
    (call,) = attention_backward.ours(given).calls
    call()
    plans = warploom.counters.plans
    for gradient in given[0].into:
        gradient.fill_(torch.nan)
    call()
    assert warploom.counters.plans == plans
    assert _gradients.error_share(given[0], given[0].into) <= 1


def test_operands_lie_as_a_model_has_them() -> None:
    one = operands(SMALL, "cpu")
    assert one.q.shape == (2, 4, 65, 64) and one.q.dtype == torch.bfloat16
    assert one.q.transpose(1, 2).is_contiguous()
    assert one.out.isnan().all()
    assert operands(PACKED, "cpu").lengths["cu_seqlens_q"].tolist() == [0, 40, 47, 77]
