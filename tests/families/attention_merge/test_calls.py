"""Calls on the CPU: what they return, what is copied and planned, what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.attention_merge import AttentionMergeShape
from warploom.runtime import plan
from warploom.runtime.families import family
from warploom.runtime.families.attention_merge.call import AttentionMergeCall
from warploom.runtime.families.attention_merge.family import FAMILY as RUNTIME
from warploom.runtime.measure import largest_share
from warploom.runtime.sampled import share

INF = torch.inf


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and the log-sum-exp, in the precision of q."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def parts(
    *rows: int, dim: int = 32, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(sum(rows))
    a, b = (torch.randn(*rows, dim).to(dtype) for _ in range(2))
    return a, 3 * torch.randn(rows), b, 3 * torch.randn(rows)


# ---- Results -------------------------------------------------------------------------------------


def test_parts_of_the_keys_merge_to_attention_over_all() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, length, 64).double() for length in (5, 50, 50))
    out, lse = attention(q, k, v)
    merged, logs = attention(q, k[:, :, :7], v[:, :, :7])
    merged, logs = merged.float(), logs.float()
    for begin, end in ((7, 20), (20, 21), (21, 50)):
        one, log = attention(q, k[:, :, begin:end], v[:, :, begin:end])
        merged, logs = warploom.merge_state(merged, logs, one.float(), log.float())
    torch.testing.assert_close(merged, out.float(), rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(logs, lse.float(), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_are_within_bounds_that_a_lost_weight_breaks(dtype: torch.dtype) -> None:
    call = AttentionMergeCall(*parts(5, 7, dtype=dtype), out_dtype=torch.float32)  # type: ignore[misc]
    found = plan.run(call)
    expected = RUNTIME.expected(
        AttentionMergeCall(call.out_a, call.lse_a, call.out_b, call.lse_b, *found)
    )
    assert share(found, expected) <= 1
    halves = (call.out_a.float() + call.out_b.float()) / 2
    assert largest_share(halves, *expected[0]) > 100
    assert largest_share(torch.maximum(call.lse_a, call.lse_b), *expected[1]) > 100


def test_what_attended_to_nothing_has_no_weight_whatever_it_holds() -> None:
    a, lse_a, b, lse_b = parts(6)
    lse_a[:4] = torch.tensor([-INF, INF, -INF, INF])
    lse_b[2:5] = torch.tensor([-INF, -INF, -INF])
    a[:4], b[2:5] = torch.nan, torch.nan
    out, lse = warploom.merge_state(a, lse_a, b, lse_b)
    assert torch.equal(out[:2], b[:2]) and torch.equal(lse[:2], lse_b[:2])
    assert (out[2:4] == 0).all() and (lse[2:4] == -INF).all()
    assert torch.equal(out[4], a[4]) and lse[4] == lse_a[4]
    assert out[5].isfinite().all()


def test_logarithms_that_are_far_apart_or_large_do_not_overflow() -> None:
    a, _, b, _ = parts(3)
    lse_a, lse_b = torch.tensor([1e4, -1e4, 3e38]), torch.tensor([-1e4, -1e4, -3e38])
    out, lse = warploom.merge_state(a, lse_a, b, lse_b)
    assert torch.equal(out[0], a[0]) and torch.equal(out[2], a[2])
    torch.testing.assert_close(lse, torch.tensor([1e4, -1e4 + 0.6931, 3e38]))
    torch.testing.assert_close(
        out[1].float(), (a[1].float() + b[1].float()) / 2, rtol=2**-8, atol=0
    )


def test_parts_add_up_in_place() -> None:
    """Out and lse may be operands; what is rounded to 16 bits in between would be far off."""
    given = [parts(4, 9, dim=64) for _ in range(6)]
    for index, one in enumerate(given):
        one[1].add_(index)
    total, logs = given[0][0].float(), given[0][1].clone()
    exact, exact_logs = given[0][0].double(), given[0][1].double()
    for out, lse, *_ in given[1:]:
        found = warploom.merge_state(total, logs, out, lse, out=total, lse=logs)
        assert found[0] is total and found[1] is logs
        both = torch.logaddexp(exact_logs, lse.double())
        weights = (exact_logs - both).exp(), (lse.double() - both).exp()
        exact = weights[0][..., None] * exact + weights[1][..., None] * out.double()
        exact_logs = both
    torch.testing.assert_close(total.double(), exact, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(logs.double(), exact_logs, rtol=1e-6, atol=1e-6)


def test_results_lie_as_a_does() -> None:
    a, lse_a, b, lse_b = parts(2, 3, 5, dim=16)
    a = a.transpose(1, 2)  # [batch, heads, seq, dim] of a model's memory
    b, lse_a, lse_b = (one.transpose(1, 2).contiguous() for one in (b, lse_a, lse_b))
    out, lse = warploom.merge_state(a, lse_a.mT.contiguous().mT, b, lse_b)
    assert out.stride() == a.stride() and lse.stride() == lse_a.mT.contiguous().mT.stride()
    assert torch.equal(out, warploom.merge_state(a.contiguous(), lse_a, b, lse_b)[0])


# ---- Plans ---------------------------------------------------------------------------------------


VIEWS = {
    "dense": (lambda: torch.randn(4, 6, 5, 16), ()),
    "heads before rows": (lambda: torch.randn(4, 5, 6, 16).transpose(1, 2), ()),
    "part of a row": (lambda: torch.randn(4, 6, 5, 40)[..., 8:24], ()),
    "every other row": (lambda: torch.randn(4, 6, 10, 16)[:, :, ::2], ()),
    "one row for all": (lambda: torch.randn(1, 1, 1, 16).expand(4, 6, 5, 16), ()),
    "an address between": (lambda: torch.randn(4, 6, 5, 40)[..., 3:19], ("out_a",)),
    "rows of 4 bytes more": (lambda: torch.randn(4, 6, 5, 17)[..., :16], ("out_a",)),
    "columns before rows": (lambda: torch.randn(4, 6, 16, 5).mT, ("out_a",)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_only_rows_that_16_bytes_do_not_reach_are_copied(name: str) -> None:
    make, copied = VIEWS[name]
    plan.forget()
    a = make()
    _, lse_a, b, lse_b = parts(4, 6, 5, dim=16)
    out, lse = warploom.merge_state(a, lse_a, b, lse_b)
    (planned,) = plan.known.values()
    assert planned.copies == copied
    expected = warploom.merge_state(a.contiguous(), lse_a, b, lse_b)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    problem: Any = AttentionMergeCall(a, lse_a, b, lse_b).draft(plan.targets.at_hand(-1)).problem
    dense = (480, 80, 16)
    steps = {"heads before rows": (480, 16, 96), "part of a row": (1200, 200, 40)}
    steps |= {"every other row": (960, 160, 16 * 2), "one row for all": (0, 0, 0)}
    assert problem.steps_a == steps.get(name, dense) and problem.extents == (4, 6, 5)
    assert problem.steps_lse_a == (30, 5, 1)


def test_packed_results_have_their_logarithms_by_head() -> None:
    a, _, b, _ = parts(40, 3, dim=64)
    lse_a, lse_b = torch.randn(3, 40), torch.randn(3, 40)
    out, lse = warploom.merge_state(a, lse_a.t(), b, lse_b.t())
    assert lse.shape == (40, 3) and lse.t().is_contiguous()
    for head in range(3):
        one, log = warploom.merge_state(a[:, head], lse_a[head], b[:, head], lse_b[head])
        assert torch.equal(out[:, head], one) and torch.equal(lse[:, head], log)


def test_nothing_merges_to_nothing() -> None:
    for rows in ((0,), (3, 0, 2)):
        out, lse = warploom.merge_state(*parts(*rows))
        assert out.shape == (*rows, 32) and lse.shape == rows


def test_a_call_is_explained_for_a_gpu_that_is_not_here() -> None:
    given = (one.to("meta") for one in parts(8, 4, 2, dim=128))
    told = warploom.explain(warploom.merge_state, *given, gpu="h200")
    assert told.kernel.startswith("attention_merge_sm90a_bf16_d128_128x16_")


def test_a_trial_holds_both_results() -> None:
    runtime = family("attention_merge")
    call = AttentionMergeCall(*parts(40))  # type: ignore[misc]
    spec = call.draft(plan.targets.at_hand(-1)).choice.spec
    trial = runtime.trial(spec.operation, AttentionMergeShape(40), "cpu", 1)
    assert trial.error_share(spec) <= 1
    for result in trial.results:
        before = result.clone()
        result.flatten()[5] += 1
        assert trial.held_share() > 1
        result.copy_(before)


# ---- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"out_a": [1.0]}, "must be a torch tensor"),
        ({"lse_b": None}, "must be a torch tensor"),
        ({"out_b": torch.zeros(6, 40)}, r"out_b must be \[6, 32\]: nothing is broadcast"),
        ({"lse_a": torch.zeros(1)}, r"lse_a must be \[6\]: nothing is broadcast"),
        ({"lse_b": torch.zeros(6).half()}, "must be float32"),
        ({"lse": torch.zeros(6).double()}, "must be float32"),
        ({"out": torch.zeros(6, 31)}, r"out must be \[6, 32\]"),
        ({"out_b": torch.zeros(6, 32).double()}, "must be float16, bfloat16 or float32"),
        ({"out_dtype": "half"}, "must be a torch.dtype: one of torch.float16"),
        ({"out": torch.zeros(6, 32), "out_dtype": torch.half}, "must be torch.float16"),
        ({"out": torch.zeros(32, 6).mT}, "contiguous last dimension"),
        ({"out": torch.zeros(6, 33)[:, :32]}, "multiples of 16 bytes"),
        ({"out": torch.zeros(1, 32).expand(6, 32)}, "must have no two elements at one address"),
        ({"lse": torch.zeros(1).expand(6)}, "must have no two elements at one address"),
        ({"out_a": torch.zeros(6, 32).requires_grad_()}, "not differentiable"),
        ({"lse_b": torch.zeros(6).requires_grad_()}, "not differentiable"),
        ({"spec": "gemm_sm90a_bf16_128x256x64_cluster2x1_stages4_c2b9e29c"}, "another operation"),
    ],
)
def test_what_is_wrong_with_a_call_is_told(wrong: dict[str, Any], rule: str) -> None:
    given = dict(zip(("out_a", "lse_a", "out_b", "lse_b"), parts(6), strict=True))
    with pytest.raises(ProblemError, match=rule):
        warploom.merge_state(**{**given, **wrong})  # type: ignore[arg-type]


@pytest.mark.parametrize("rows", [(1, 1, 1, 1), ()])
def test_rows_have_at_most_three_dimensions(rows: tuple[int, ...]) -> None:
    a = torch.zeros(*rows, 32) if rows else torch.zeros(())
    with pytest.raises(ProblemError, match="must be"):
        warploom.merge_state(a, a.sum(-1) if rows else a, a, a.sum(-1) if rows else a)
    with pytest.raises(ProblemError, match="a multiple of 8 elements, at most 512"):
        warploom.merge_state(*parts(3, dim=520))


def test_a_result_that_lies_across_an_operand_is_refused() -> None:
    a, lse_a, b, lse_b = parts(6)
    room, logs = torch.zeros(9, 32).bfloat16(), torch.zeros(9)
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.merge_state(room[:6], lse_a, b, lse_b, out=room[3:])
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.merge_state(a, logs[:6], b, lse_b, lse=logs[1:7])
    with pytest.raises(ProblemError, match="do not overlap"):
        warploom.merge_state(a, lse_a, b, lse_b, out=b.view(torch.float16))


def test_dual_tensors_are_refused() -> None:
    from torch.autograd import forward_ad

    a, lse_a, b, lse_b = parts(4, dtype=torch.float32)
    with forward_ad.dual_level(), pytest.raises(ProblemError, match="no forward-mode derivative"):
        warploom.merge_state(forward_ad.make_dual(a, a), lse_a, b, lse_b)


# ---- The operator --------------------------------------------------------------------------------


def test_torch_finds_no_fault_with_the_operator() -> None:
    operator = torch.ops.warploom.attention_merge.default
    torch.library.opcheck(operator, (*parts(2, 5), torch.float32, None))
    torch.library.opcheck(operator, (*parts(5), None, None))


def test_compiled_code_calls_the_operator_and_adds_up_in_place() -> None:
    def merged(*given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a, lse_a, b, lse_b = given
        total, logs = a.float(), lse_a.clone()
        warploom.merge_state(total, logs, b, lse_b, out=total, lse=logs)
        out, lse = warploom.merge_state(total, logs, a, lse_b + 1)
        return out + 1, lse

    compiled = torch.compile(merged, fullgraph=True, backend="aot_eager")
    for rows in ((6,), (2, 3)):
        given = parts(*rows)
        for found, expected in zip(compiled(*given), merged(*given), strict=True):
            assert torch.equal(found, expected)


def test_fake_tensors_get_what_calls_return() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    real = parts(2, 3, 5, dim=16)
    expected = warploom.merge_state(
        real[0].transpose(0, 1),
        real[1].transpose(0, 1),
        real[2].transpose(0, 1),
        real[3].transpose(0, 1),
    )
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(one).transpose(0, 1) for one in real]
        for found, wanted in zip(warploom.merge_state(*given), expected, strict=True):
            assert (found.shape, found.stride(), found.dtype) == (
                wanted.shape,
                wanted.stride(),
                wanted.dtype,
            )
