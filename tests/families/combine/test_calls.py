"""Calls on the CPU in both directions: results, gradients, plans, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.combine import CombineOperation, CombineShape
from warploom.generator.launches import NO_GPU
from warploom.runtime import plan
from warploom.runtime.families import family
from warploom.runtime.families.combine.api import permute_tokens
from warploom.runtime.families.combine.call import CombineCall, PermuteCall
from warploom.runtime.families.combine.family import FAMILY as RUNTIME
from warploom.runtime.sampled import share

TOKENS, K, EXPERTS, COLUMNS = 21, 3, 5, 16


def routed(skipping: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """Offsets and the rows of pairs, of ids of which some are no expert's."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(0, EXPERTS + 2 * skipping, (TOKENS, K), generator=random)
    offsets, _, inverse = warploom.route(ids, EXPERTS, first_expert=0)
    return offsets, inverse


def values(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", [None, torch.float32, torch.bfloat16])
def test_a_token_is_the_sum_of_its_rows_and_what_is_skipped_is_not_read(
    dtype: torch.dtype, weights: torch.dtype | None
) -> None:
    offsets, inverse = routed()
    rows = values(TOKENS * K, COLUMNS, dtype=dtype)
    rows[offsets[-1] :] = torch.nan
    factors = None if weights is None else values(TOKENS, K, dtype=weights)
    if factors is not None:  # as a kernel, which does not read it
        factors = factors.masked_fill(inverse < 0, torch.nan)
    found = warploom.combine(rows, inverse, factors)
    expected = torch.zeros(TOKENS, COLUMNS, dtype=torch.float64)
    for token in range(TOKENS):
        for choice in range(K):
            if inverse[token, choice] >= 0:
                weight = 1.0 if factors is None else factors[token, choice].double()
                expected[token] += weight * rows[inverse[token, choice]].double()
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7)
    assert share([found], RUNTIME.expected(CombineCall(rows, inverse, factors))) <= 1


def test_rows_of_no_pair_are_zeros_where_offsets_are_given() -> None:
    offsets, inverse = routed()
    hidden = values(TOKENS, COLUMNS)
    found = warploom.permute(hidden, inverse, offsets=offsets)
    assert found.shape == (TOKENS * K, COLUMNS) and (found[offsets[-1] :] == 0).all()
    for token in range(TOKENS):
        for choice in range(K):
            if inverse[token, choice] >= 0:
                assert torch.equal(found[inverse[token, choice]], hidden[token])


@pytest.mark.parametrize("ends", [(6, 2), (-1, 2), (2, 9)], ids=str)
def test_offsets_that_are_no_ends_are_refused_on_the_cpu(ends: tuple[int, int]) -> None:
    """The kernel sets rows behind the last to zeros, which may be rows of pairs."""
    hidden, offsets = torch.randn(4, 8), torch.tensor(ends, dtype=torch.int32)
    inverse = torch.arange(8, dtype=torch.int32).view(4, 2)
    with pytest.raises(ProblemError, match=r"^offsets .*must not decrease"):
        warploom.permute(hidden, inverse, offsets=offsets)


@pytest.mark.parametrize("place", [-1, -5, 10**6])
def test_a_place_that_is_no_row_counts_as_skipped(place: int) -> None:
    inverse = torch.tensor([[0, place]], dtype=torch.int32)
    rows = torch.ones(1, 8)
    assert (warploom.combine(rows, inverse) == 1).all()
    assert warploom.permute(torch.full((1, 8), 2.0), inverse)[0].tolist() == [2.0] * 8


@pytest.mark.parametrize("skipping", [False, True])
def test_gradients_are_those_of_the_sum(skipping: bool) -> None:
    offsets, inverse = routed(skipping)
    hidden, weights = values(TOKENS, COLUMNS).requires_grad_(), values(TOKENS, K).requires_grad_()

    def layer(hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = warploom.permute(hidden, inverse, offsets=offsets)
        return warploom.combine(rows.sin(), inverse, weights, offsets=offsets)

    there = (inverse >= 0).double()
    expected = (hidden.double().sin()[:, None] * (weights * there)[..., None]).sum(1)
    gradient = values(TOKENS, COLUMNS)
    found = torch.autograd.grad(layer(hidden, weights), (hidden, weights), gradient)
    wanted = torch.autograd.grad(expected, (hidden, weights), gradient.double())
    for one, held in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, held)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    again = torch.autograd.grad(compiled(hidden, weights), (hidden, weights), gradient)
    assert all(torch.equal(one, held) for one, held in zip(again, found, strict=True))


def test_weights_alone_have_a_gradient() -> None:
    """Rows that were frozen are kept for it."""
    _, inverse = routed()
    rows, weights = values(TOKENS * K, COLUMNS), values(TOKENS, K).bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(warploom.combine(rows, inverse, weights).sum(), weights)
    expected = rows.double().sum(-1)[inverse.clamp_min(0).long()] * (inverse >= 0)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), expected, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [0, TOKENS * K - 4, TOKENS * K + 5])
def test_more_or_fewer_rows_than_pairs_have_their_gradients(rows: int, weighted: bool) -> None:
    """A pair may have any of the rows, also one past as many as there are pairs."""
    random = torch.Generator().manual_seed(2)
    inverse = torch.randperm(TOKENS * K + 5, generator=random)[: TOKENS * K].int().view(TOKENS, K)
    leaves = [values(rows, COLUMNS).requires_grad_()]
    leaves += [values(TOKENS, K).requires_grad_()] if weighted else []
    gradient = values(TOKENS, COLUMNS)
    found = torch.autograd.grad(warploom.combine(leaves[0], inverse, *leaves[1:]), leaves, gradient)
    more = torch.nn.functional.pad(leaves[0], (0, 0, 0, TOKENS * K + 5 - rows))[inverse.long()]
    expected = (more * leaves[1][..., None] if weighted else more).sum(1)
    wanted = torch.autograd.grad(expected, leaves, gradient)
    for one, held in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, held)


def test_fewer_rows_than_were_routed_have_their_gradients() -> None:
    """Offsets end where those of `route` do: of experts with a capacity, behind the rows."""
    offsets, inverse = routed(skipping=False)
    rows = values(TOKENS * K - 4, COLUMNS).requires_grad_()
    combined = warploom.combine(rows, inverse, offsets=offsets)
    (found,) = torch.autograd.grad(combined.sum(), rows)
    assert torch.equal(found, torch.ones_like(rows))


def test_a_kernel_knows_how_many_rows_a_gradient_has() -> None:
    """By the number of pairs it would write past fewer rows, and read past what was combined."""
    hidden, (_, inverse), weights = values(TOKENS, COLUMNS), routed(), values(TOKENS, K)
    given = (hidden, inverse, weights, values(5, COLUMNS))
    problem: Any = PermuteCall(*given, count=5).draft(NO_GPU).problem
    assert problem.rows == 5
    with pytest.raises(ProblemError, match=r"combined \[5, 16\] .* \[63, 16\], with weights"):
        PermuteCall(*given).draft(NO_GPU)


def test_a_second_derivative_is_refused() -> None:
    _, inverse = routed()
    leaf = values(TOKENS * K, COLUMNS).requires_grad_()
    (first,) = torch.autograd.grad(warploom.combine(leaf, inverse).sum(), leaf, create_graph=True)
    assert not first.requires_grad  # it does not depend on the rows
    weights = values(TOKENS, K).requires_grad_()
    out = warploom.combine(leaf, inverse, weights).square().sum()
    with pytest.raises(ProblemError, match="create_graph=True"):
        torch.autograd.grad(out, leaf, create_graph=True)


VIEWS = {
    "dense": (lambda: values(TOKENS * K, COLUMNS), ()),
    "part of a row": (lambda: values(TOKENS * K, 40)[:, 8:24], ()),
    "every other row": (lambda: values(2 * TOKENS * K, COLUMNS)[::2], ()),
    "an address between": (lambda: values(TOKENS * K, 40)[:, 3:19], ("rows",)),
    "columns before rows": (lambda: values(COLUMNS, TOKENS * K).t(), ("rows",)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_only_rows_that_16_bytes_do_not_reach_are_copied(name: str) -> None:
    make, copied = VIEWS[name]
    rows, (_, inverse) = make(), routed()
    weights = values(K, TOKENS).t()
    plan.forget()
    found = warploom.combine(rows, inverse, weights)
    (planned,) = plan.known.values()
    assert planned.copies == copied
    assert torch.equal(found, warploom.combine(rows.contiguous(), inverse, weights.contiguous()))
    problem: Any = CombineCall(rows, inverse, weights).draft(NO_GPU).problem
    assert problem.weights == (1, TOKENS)
    assert problem.rows_pitch == (COLUMNS if copied else rows.stride(0))


def test_nothing_is_summed_to_zeros() -> None:
    empty = torch.zeros(4, 0, dtype=torch.int32)
    assert torch.equal(warploom.combine(torch.zeros(0, 8), empty), torch.zeros(4, 8))
    assert warploom.permute(torch.zeros(4, 8), empty).shape == (0, 8)
    none = torch.zeros(0, 3, dtype=torch.int32)
    assert warploom.combine(torch.zeros(0, 8), none).shape == (0, 8)


OPERATIONS = [
    CombineOperation("bf16", weights="fp32"),
    CombineOperation("bf16", "permute"),
    CombineOperation("fp16", "permute", "fp32", dot=True),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=str)
def test_a_trial_holds_every_result(operation: CombineOperation) -> None:
    runtime, shape = family("combine"), CombineShape(12, 2, 64)
    call = RUNTIME.draw(operation, shape, "cpu", torch.Generator().manual_seed(0))
    spec = call.draft(NO_GPU).choice.spec
    trial = runtime.trial(operation, shape, "cpu", 1)
    assert trial.error_share(spec) <= 1 and len(trial.results) == 1 + operation.dot
    for result in trial.results:
        before = result.clone()
        result.view(-1)[5] += 1
        assert trial.held_share() > 1
        result.copy_(before)


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"rows": [1.0]}, "must be a torch tensor"),
        ({"rows": torch.zeros(4, 12)}, "a multiple of 8"),
        ({"rows": torch.zeros(4, 16).double()}, "must be float16, bfloat16 or float32"),
        ({"rows": torch.zeros(16)}, "two dimensions"),
        ({"inverse": torch.zeros(2, 2)}, r"must be int32 \[tokens, k\]"),
        ({"inverse": torch.zeros(4, dtype=torch.int32)}, r"must be int32 \[tokens, k\]"),
        ({"weights": torch.zeros(2, 1)}, "nothing is broadcast"),
        ({"weights": torch.zeros(2, 2).int()}, "must be float16, bfloat16 or float32"),
        ({"weights": [1]}, r"weights \[1\] of type list"),
        ({"inverse": [[0, 1]]}, "inverse .* of type list"),
        ({"offsets": [4]}, r"offsets \[4\] of type list"),
        ({"offsets": torch.ones(4, dtype=torch.int32).to_sparse()}, "offsets, a sparse tensor"),
        ({"offsets": torch.zeros(4)}, r"must be int32 \[experts\]"),
        ({"offsets": torch.zeros(2, dtype=torch.int32, device="meta")}, "offsets on meta"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
@pytest.mark.parametrize("graded", [False, True])
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str, graded: bool) -> None:
    """By the call itself, where only a gradient reads it, too."""
    rows = torch.zeros(4, 16, requires_grad=graded)
    given = {"rows": rows, "inverse": torch.zeros(2, 2, dtype=torch.int32)}
    with pytest.raises(ProblemError, match=rule):
        warploom.combine(**{**given, **wrong})


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"hidden": torch.zeros(3, 16)}, "inverse must have 3 tokens"),
        ({"inverse": [[0, 1]]}, "inverse .* of type list"),
        ({"offsets": [4]}, "offsets .* of type list"),
        ({"offsets": torch.zeros(4)}, r"must be int32 \[experts\]"),
        ({"offsets": torch.zeros(0, dtype=torch.int32)}, r"must be int32 \[experts\]"),
    ],
)
@pytest.mark.parametrize("graded", [False, True])
def test_what_is_wrong_with_tokens_is_told(wrong: dict[str, Any], rule: str, graded: bool) -> None:
    hidden = torch.zeros(2, 16, requires_grad=graded)
    given = {"hidden": hidden, "inverse": torch.zeros(2, 2, dtype=torch.int32)}
    with pytest.raises(ProblemError, match=rule):
        warploom.permute(**{**given, **wrong})


def test_torch_finds_no_fault_with_the_operators() -> None:
    _, inverse = routed()
    offsets, _ = routed()
    rows, weights = values(TOKENS * K, COLUMNS), values(TOKENS, K)
    warploom.combine(rows, inverse)
    torch.library.opcheck(torch.ops.warploom.combine.default, (rows, inverse, weights, None))
    given = (rows[:TOKENS], inverse, weights, rows, offsets, None, None)
    torch.library.opcheck(torch.ops.warploom.permute.default, given)
    gradient = permute_tokens(*given)[1]
    held = RUNTIME.expected(PermuteCall(rows[:TOKENS], inverse, weights, rows))
    assert gradient is not None and share([gradient], held[1:]) <= 1


def test_a_call_is_explained_for_a_gpu_that_is_not_here() -> None:
    rows = torch.zeros(64, 128, dtype=torch.bfloat16, device="meta")
    inverse = torch.zeros(8, 8, dtype=torch.int32, device="meta")
    told = warploom.explain(warploom.combine, rows, inverse, inverse.float(), gpu="h200")
    assert told.kernel.startswith("combine_sm90a_bf16_weights_fp32_")
