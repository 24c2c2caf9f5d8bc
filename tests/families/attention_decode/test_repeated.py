"""Calls of decoding that are like an earlier one: by what is kept of these."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_calls import E4M3, FP16, Case, ends, fixed, ints, paged, random
from launched_plans import launched_plans
from torch.utils.flop_counter import FlopCounterMode

import warploom
from warploom.errors import ProblemError
from warploom.runtime import plan as plans
from warploom.runtime.counters import counters
from warploom.runtime.plan import Plan


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Plan[Any, Any]]:
    return launched_plans(monkeypatch)


SCALES: dict[str, Any] = {"scale_k": torch.rand(2), "scale_v": torch.rand(2)}
CASES: dict[str, Case] = {
    "fixed": fixed((17, 0, 40)),
    "paged": paged((17, 0, 40), rows=2),
    "without causal": paged((17, 3), rows=2).given(causal=False),
    "window, softcap, scale": fixed((17, 40)).given(window=(3, None), softcap=2.0, scale=0.3),
    "starts": fixed((17, 40)).given(cache_leftpad=ints(3, 20)),
    "sinks": fixed((17, 40)).given(sinks=torch.randn(4)),
    "e4m3": paged((17, 40), cache=E4M3).given(**SCALES),
    "batch_invariant": paged((17, 40)).given(batch_invariant=True, max_seqlen_k=40),
    "fp16": fixed((17, 40), dtype=FP16),
    "packed": Case(
        random(3, 4, 64),
        *(random(23, 2, 64, seed=seed) for seed in (1, 2)),
        {"cu_seqlens_q": ends(2, 1), "max_seqlen_q": 2, "cu_seqlens_k": ends(17, 6)},
    ),
}


@pytest.mark.parametrize("into", [False, True], ids=["", "out"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_those_of_a_call_that_is_made(
    case: str, into: bool, launches: list[Plan[Any, Any]]
) -> None:
    """An address goes to another tensor, or a result lies otherwise than that of a call."""
    one = CASES[case]
    if into:
        one = one.given(out=torch.zeros_like(one.q))
    results = []
    for launched in (0, 1, 1):
        launches.clear()
        results.append([tensor.clone() for tensor in one.run()])
        assert len(launches) == launched
    for again in results[1:]:
        for found, wanted in zip(again, results[0], strict=True):
            assert torch.equal(found, wanted)


def test_other_lengths_and_pages_of_the_same_kind_are_read(
    launches: list[Plan[Any, Any]],
) -> None:
    """One plan serves all contents."""
    first, second = paged((17, 40)), paged((3, 16))
    first.assert_right()
    planned = counters.as_dict()["plans"]
    launches.clear()
    second.assert_right()
    assert len(launches) == 1
    assert counters.as_dict()["plans"] == planned


def test_a_plan_serves_every_scale() -> None:
    """A plan for calls without a scale and another for those with one would be tuned apart."""
    case = fixed((17, 40))
    case.run()
    planned = counters.as_dict()["plans"]
    out, _ = case.given(scale=0.3).run()
    assert counters.as_dict()["plans"] == planned
    assert not torch.equal(out, case.run()[0])


def test_a_call_is_run_again_only_where_nothing_changed(launches: list[Plan[Any, Any]]) -> None:
    """What was decided for another option, type or shape would decide this call too."""
    one = paged((17, 40), rows=2).given(sinks=torch.randn(4))
    changed = [
        one.given(causal=False),
        one.given(window=(3, None)),
        one.given(softcap=2.0),
        one.given(sinks=None),
        one.given(sinks=one.keywords["sinks"].bfloat16()),
        one.given(cache_seqlens=None),
        one.given(cache_leftpad=ints(1, 2)),
        one.given(cache_seqlens=None, cache_leftpad=ints(1, 2)),
        one.given(max_seqlen_k=40),
        one.given(batch_invariant=True),
        one.given(page_table=one.keywords["page_table"][:, :3].clone().t().contiguous().t()),
        paged((17, 40), rows=2, page=32).given(sinks=one.keywords["sinks"]),
        paged((17, 40), rows=2, layout="NHD").given(sinks=one.keywords["sinks"]),
        paged((17, 40), rows=2, dtype=FP16).given(sinks=one.keywords["sinks"]),
    ]
    one.run()
    for other in changed:
        plans.known.pop(None, None)
        launches.clear()
        try:
            other.run()
        except ProblemError:
            continue  # a table that lies the other way
        assert launches == [], other.keywords


def test_a_softcap_of_0_is_none_in_warm_calls_too(launches: list[Plan[Any, Any]]) -> None:
    """No kernel reads it: on a GPU, calls that differ in its value alone would pass for it."""
    one = fixed((17, 40))
    plain = one.run()[0].clone()
    for turn, cap in enumerate((0.0, 0.0, 0.25, 0.25, 0.0, 0.0, 0.25)):
        launches.clear()
        found = one.given(softcap=cap).run()[0]
        assert torch.equal(found, plain) == (cap == 0)
        kernels = [plan.choice.spec.operation.softcap for plan in launches]
        assert kernels == [cap > 0] * (turn not in (0, 2, 4))


def test_a_scale_tensor_for_both_is_taken() -> None:
    """Guards take no tensor twice: such calls are made, each time."""
    scale = torch.rand(())
    one = paged((17, 40), cache=E4M3).given(scale_k=scale, scale_v=scale)
    other = one.given(scale_v=scale.clone())
    for _ in range(3):
        assert torch.equal(one.run()[0], other.run()[0])


def test_bad_contents_are_refused_each_time() -> None:
    one = paged((17, 40))
    one.run()
    one.keywords["cache_seqlens"].copy_(ints(17, 400))
    for _ in range(2):
        with pytest.raises(ProblemError, match="cache_seqlens"):
            one.run()


def test_modes_that_look_at_operators_see_one(launches: list[Plan[Any, Any]]) -> None:
    one = fixed((17, 40))
    one.run()
    one.run()
    launches.clear()
    with FlopCounterMode(display=False):
        one.run()
    assert launches == []


def test_a_gradient_is_refused_of_a_kind_that_ran() -> None:
    one = fixed((17, 40))
    one.run()
    one.run()
    with pytest.raises(ProblemError, match="has no gradient"):
        warploom.attention_decode(one.q.clone().requires_grad_(), one.k, one.v, **one.keywords)
