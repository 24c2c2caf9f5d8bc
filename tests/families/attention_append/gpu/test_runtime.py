"""Streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

from typing import Any

import attention_append_cases as cases
import pytest
import torch
from attention_append_cases import FULL, PAGED, spec, there

import warploom
from warploom.runtime import plan
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.families.attention_append.family import written

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


def arguments(operation: cases.AttentionAppendOperation = PAGED, seed: int = 0) -> dict[str, Any]:
    """Those of a call on the GPU."""
    call = cases.made(spec(operation), (3, 0, 20, 17), (2,), seed=seed).call
    return {name: there(getattr(call, name)) for name in call.__dataclass_fields__}


def bits(given: dict[str, Any]) -> list[torch.Tensor]:
    """Copies of all that a call writes."""
    return [cases.room(one).clone() for one in written(AttentionAppendCall(**given)).values()]


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("operation", [PAGED, FULL], ids=["paged", "full"])
def test_a_captured_call_runs_again_at_other_lengths(
    operation: cases.AttentionAppendOperation,
) -> None:
    given, other = arguments(operation), arguments(operation)
    warploom.append_kv_cache(**given)  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.append_kv_cache(**given)
    warploom.append_kv_cache(**other)
    for lengths in ((0, 0, 0, 0), (45, 46, 47, 48), (5, -1, 9, 13)):
        for one in (given, other):
            one["lengths"].copy_(torch.tensor(lengths))
            one["k"].mul_(1.5)
        graph.replay()
        warploom.append_kv_cache(**other)
        assert_equal(bits(given), bits(other))


def test_a_captured_step_moves_on_by_itself() -> None:
    """Lengths afterwards are the next step's: nothing comes from the host."""
    given, other = arguments(), arguments()
    given["lengths_after"] = torch.empty_like(given["lengths"])
    warploom.append_kv_cache(**given)
    start = given["lengths"].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.append_kv_cache(**given)
        given["lengths"].copy_(given["lengths_after"])
    other["lengths_after"] = torch.empty_like(start)
    for step in range(5):
        graph.replay()
        other["lengths"] = start + 2 * step
        warploom.append_kv_cache(**other)
        assert torch.equal(given["lengths"], start + 2 * (step + 1))
    for name in ("k_cache", "v_cache", "out"):
        assert torch.equal(cases.room(given[name]), cases.room(other[name]))


def test_a_call_runs_on_the_current_stream_behind_what_is_there() -> None:
    given, other = arguments(), arguments()
    late = other["k"].clone()
    other["k"].zero_()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        other["k"].copy_(late)
        warploom.append_kv_cache(**other)
    stream.synchronize()
    warploom.append_kv_cache(**given)
    assert_equal(bits(given), bits(other))


def test_calls_of_layers_follow_each_other() -> None:
    """Launches begin under the one before: each reads what that one wrote."""
    given, other = arguments(), arguments()
    for one in (given, other):
        one["lengths_after"] = torch.empty_like(one["lengths"])
    for _ in range(20):
        warploom.append_kv_cache(**given)
        given["q"], given["out"] = given["out"], given["q"]
        warploom.append_kv_cache(**other)
        torch.cuda.synchronize()
        other["q"], other["out"] = other["out"], other["q"]
    assert torch.equal(given["q"], other["q"]) and torch.equal(given["k_cache"], other["k_cache"])


def test_a_warm_call_plans_and_copies_nothing() -> None:
    given = arguments()
    warploom.append_kv_cache(**given)
    before = warploom.counters.as_dict()
    warploom.append_kv_cache(**given)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 1
    assert after == before


def test_q_is_turned_in_its_place() -> None:
    given = arguments()
    expected = warploom.append_kv_cache(**given)
    given["q"] = given["q"].contiguous()
    given["out"] = given["q"]
    found = warploom.append_kv_cache(**given)
    assert found is given["q"] and torch.equal(found, expected)


@pytest.mark.parametrize("operation", [PAGED, FULL], ids=["paged", "full"])
def test_compiled_code_writes_the_caches_that_it_was_given(
    operation: cases.AttentionAppendOperation,
) -> None:
    given, other = arguments(operation), arguments(operation)
    for one in (given, other):
        one.pop("spec")
        one.pop("out")

    def step(given: dict[str, Any]) -> torch.Tensor:
        q = warploom.append_kv_cache(**given)
        return q * 2 + given["k_cache"].float().sum()

    compiled = torch.compile(step, fullgraph=True)
    torch.testing.assert_close(compiled(given), step(other))
    assert_equal(bits(given), bits(other))


def test_nothing_is_launched_for_no_tokens() -> None:
    given = arguments(FULL)
    empty = {name: given[name][:0] for name in ("k", "v", "q", "out")}
    given["cu_seqlens"].zero_()
    before, held = warploom.counters.launches, bits(given)
    call = AttentionAppendCall(**{**given, **empty, "spec": None})
    plan.run(call)
    assert torch.equal(given["lengths_after"], given["lengths"])
    assert warploom.counters.launches == before
    assert torch.equal(cases.room(given["k_cache"]), held[0])


def test_the_gpu_computes_what_the_reference_does() -> None:
    for seed in range(3):
        cases.made(spec(FULL), seed=seed, new=(3, 1)).verify()
