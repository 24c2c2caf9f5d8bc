"""Calls on the CPU: what they return, how they are planned, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.route import RouteShape
from warploom.runtime import plan
from warploom.runtime.families import family
from warploom.runtime.families.route.call import RouteCall


def drawn(tokens: int, k: int, experts: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randint(0, experts, (tokens, k), generator=random)


def by_hand(ids: torch.Tensor, experts: int, first: int = 0) -> tuple[list[int], ...]:
    """The same by lists: an expert's rows are its pairs in order, skipped pairs come last."""
    local = [one - first for one in ids.reshape(-1).tolist()]
    order = [pair for expert in range(experts) for pair, one in enumerate(local) if one == expert]
    offsets = [sum(0 <= one <= expert for one in local) for expert in range(experts)]
    inverse = [order.index(pair) if pair in order else -1 for pair in range(len(local))]
    order += [pair for pair, one in enumerate(local) if not 0 <= one < experts]
    return offsets, order, inverse


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize(("tokens", "k", "experts"), [(1, 1, 1), (7, 3, 4), (40, 8, 9), (3, 2, 60)])
def test_pairs_are_sorted_by_expert_and_stay_in_order(
    tokens: int, k: int, experts: int, dtype: torch.dtype
) -> None:
    ids = drawn(tokens, k, experts).to(dtype)
    offsets, order, inverse = warploom.route(ids, experts)
    assert (offsets.dtype, order.dtype, inverse.dtype) == (torch.int32,) * 3
    assert inverse.shape == (tokens, k)
    found = offsets.tolist(), order.tolist(), inverse.reshape(-1).tolist()
    assert found == by_hand(ids, experts)


@pytest.mark.parametrize("first", [0, 5, -3])
def test_ids_of_other_ranks_are_skipped_and_come_last(first: int) -> None:
    ids = drawn(30, 4, 16) - 4
    ids[0, 0], ids[0, 1] = torch.iinfo(torch.int64).max, torch.iinfo(torch.int64).min
    offsets, order, inverse = warploom.route(ids, 6, first_expert=first)
    assert (offsets.tolist(), order.tolist(), inverse.reshape(-1).tolist()) == by_hand(
        ids, 6, first
    )
    assert sorted(order.tolist()) == list(range(120)) and (inverse == -1).any()


def test_any_strides_are_read_in_place() -> None:
    ids = drawn(20, 4, 8)
    expected = warploom.route(ids, 8)
    views = ids.t().contiguous().t(), torch.stack([ids, ids * 0], -1)[..., 0], ids.clone()
    for view in views:
        plan.forget()
        for one, held in zip(warploom.route(view, 8), expected, strict=True):
            assert torch.equal(one, held)
        (planned,) = plan.known.values()
        assert planned.copies == ()
    problem: Any = RouteCall(views[1], 8).draft(plan.targets.at_hand(-1)).problem
    assert problem.steps == (8, 2)


def test_no_token_and_no_choice_have_no_rows() -> None:
    for shape in ((0, 4), (5, 0)):
        offsets, order, inverse = warploom.route(torch.zeros(shape, dtype=torch.int64), 3)
        assert offsets.tolist() == [0, 0, 0] and not order.numel() and inverse.shape == shape


def test_a_trial_finds_one_wrong_number() -> None:
    runtime = family("route")
    spec = RouteCall(drawn(40, 2, 8), 8).draft(plan.targets.at_hand(-1)).choice.spec
    trial = runtime.trial(spec.operation, RouteShape(40, 2, 8), "cpu", 1)
    assert trial.error_share(spec) == 0
    for result in trial.results:
        result.view(-1)[3] += 1
        assert trial.held_share() > 1
        result.view(-1)[3] -= 1
    assert trial.held_share() == 0


def test_a_call_is_explained_for_a_gpu_that_is_not_here() -> None:
    ids = torch.zeros(64, 8, dtype=torch.int64, device="meta")
    told = warploom.explain(warploom.route, ids, experts=128, gpu="h200")
    assert told.kernel.startswith("route_sm90a_int64_")


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"ids": [[0]]}, "must be a torch tensor"),
        ({"ids": torch.zeros(2, 2)}, "must be int64 or int32"),
        ({"ids": torch.zeros(4, dtype=torch.int64)}, r"must be \[tokens, k\]"),
        ({"experts": 0}, "must be an int, 1 to 1024"),
        ({"experts": 1025}, "must be an int, 1 to 1024"),
        ({"experts": 8.0}, "must be an int, 1 to 1024"),
        ({"first_expert": True}, "must be an int"),
        ({"ids": torch.tensor([[0, 9]])}, "ids with 9: must be from 0 to 3, or -1.*first_expert"),
        ({"ids": torch.tensor([[0, -2]])}, "ids with -2: must be from 0 to 3"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str) -> None:
    given = {"ids": torch.zeros(2, 2, dtype=torch.int64), "experts": 4}
    with pytest.raises(ProblemError, match=rule):
        warploom.route(**{**given, **wrong})  # type: ignore[arg-type]


def test_torch_finds_no_fault_with_the_operator() -> None:
    warploom.route(drawn(5, 2, 4), 4)
    torch.library.opcheck(torch.ops.warploom.route.default, (drawn(5, 2, 4), 4, 1, None))


def test_compiled_code_calls_the_operator() -> None:
    def routed(ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        offsets, order, inverse = warploom.route(ids, 8, first_expert=1)
        return offsets + 1, order, inverse

    compiled = torch.compile(routed, fullgraph=True, backend="aot_eager")
    for tokens in (6, 9, 12):
        ids = drawn(tokens, 3, 8)
        for found, expected in zip(compiled(ids), routed(ids), strict=True):
            assert torch.equal(found, expected)
