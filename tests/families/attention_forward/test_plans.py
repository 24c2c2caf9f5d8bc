"""Attention's results lie where they should, and its plans run what they were made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import BF16, Recorder, assert_right, operands, random

import warploom
from warploom.errors import ProblemError


def test_the_result_lies_in_memory_as_q_does() -> None:
    k = v = random(2, 4, 9, 40)
    plain, turned = random(2, 4, 7, 40), random(2, 7, 4, 40).transpose(1, 2)
    sliced = random(2, 7, 3, 4, 40)[:, :, 1].transpose(1, 2)
    assert warploom.attention(plain, k, v).is_contiguous()
    for q in (turned, sliced):
        out = warploom.attention(q, k, v)
        assert out.shape == q.shape
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(out, warploom.attention(q.contiguous(), k, v))


def test_out_is_filled_and_nothing_beside_it() -> None:
    q, k, v = operands(7, 9)
    room = torch.full((2, 8, 6, 56), -7.0, dtype=BF16)
    out = room[:, :7, 1:5, 8:48].transpose(1, 2)
    assert warploom.attention(q, k, v, out=out) is out
    assert torch.equal(out, warploom.attention(q, k, v))
    out.fill_(-7.0)
    assert (room == -7.0).all()


def test_explain_names_what_is_copied_because_tma_cannot_read_it() -> None:
    q, k, v = operands(7, 9)
    odd = random(2, 2, 9, 41)[..., :40]
    every_other = random(2, 4, 7, 80)[..., ::2]
    broadcast = random(2, 1, 9, 40).expand(2, 2, 9, 40)
    for arguments, copies in (
        ((q, k, v), ()),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), ()),
        ((q, odd, v), ("k",)),
        ((every_other, k, broadcast), ("q", "v")),
    ):
        plan = warploom.plan_attention(*arguments)
        told = warploom.explain(plan)
        assert told.copies == copies
        assert told.kernel.startswith("attention_forward_sm90a_bf16_dim64_")
        assert told.kernel in str(told)
        assert_right(*arguments)


def test_a_call_is_planned_once_whatever_its_scale() -> None:
    q, k, v = operands(13, 17)
    before = warploom.counters.plans
    for scale, cap in ((0.5, 1.0), (0.25, 3.0)):
        warploom.attention(q * 2, k, v, scale=scale, softcap=cap)
    assert warploom.counters.plans == before + 1
    warploom.attention(q, k, v, scale=0.5)  # without a softcap it is another kernel
    assert warploom.counters.plans == before + 2


def test_a_plan_runs_what_it_was_made_for_and_nothing_else() -> None:
    q, k, v = operands(13, 13)
    plan = warploom.plan_attention(q, k, v, causal=True)
    out, lse = plan(q * 2, k, v, causal=True, scale=0.1)
    both = warploom.attention(q * 2, k, v, causal=True, scale=0.1, return_lse=True)
    assert torch.equal(out, both[0])
    assert torch.equal(lse, both[1])
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ((q[:1], k[:1], v[:1]), {"causal": True}),
        ((q.half(), k.half(), v.half()), {"causal": True}),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {"causal": True}),
        ((q, k, v), {}),
        ((q, k, v), {"causal": True, "softcap": 1.0}),
        ((q, k, v), {"causal": True, "out": torch.empty_like(q)}),
    ]
    for arguments, keywords in wrong:
        with pytest.raises(ProblemError, match="that the plan was made for"):
            plan(*arguments, **keywords)


def test_a_launch_is_given_addresses_and_numbers_in_the_order_of_their_names() -> None:
    q, k, v = operands(13, 13)
    out = torch.empty_like(q)
    plan = warploom.plan_attention(q, k, v, causal=True, out=out)
    recorder = plan.launch = Recorder()  # type: ignore[assignment]
    for scale, expected in ((None, 40**-0.5), (0.3, 0.3)):
        found, lse = plan(q, k, v, causal=True, out=out, scale=scale)
        assert found is out
        addresses = tuple(t.data_ptr() for t in (q, k, v, out, lse))
        assert recorder.given[-1] == (addresses, (expected,))


def test_a_launch_reads_a_copy_of_what_tma_cannot_read_and_counts_it() -> None:
    q, _, v = operands(13, 13)
    odd = random(2, 2, 13, 41)[..., :40]
    plan = warploom.plan_attention(q, odd, v)
    recorder = plan.launch = Recorder()  # type: ignore[assignment]
    before = warploom.counters.copies
    plan(q, odd, v)
    (addresses, _), *_ = recorder.given
    assert warploom.counters.copies - before == 1
    assert (addresses[0], addresses[2]) == (q.data_ptr(), v.data_ptr())
    assert addresses[1] != odd.data_ptr()
    assert addresses[1] % 16 == 0


def test_a_kernel_that_is_named_is_the_one_that_is_planned() -> None:
    q, k, v = operands(13, 13)
    name = warploom.explain(warploom.plan_attention(q, k, v, causal=True)).kernel
    plan = warploom.plan_attention(q, k, v, causal=True, spec=name)
    assert plan.choice.spec.name == name
    assert torch.equal(
        warploom.attention(q, k, v, causal=True, spec=name),
        warploom.attention(q, k, v, causal=True),
    )


def test_operands_are_left_as_they_were() -> None:
    given = operands(7, 9)
    before = [tensor.clone() for tensor in given]
    warploom.attention(*given, window=(2, 2))
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
