"""What a backward pass plans and launches, which kernel it takes, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention_calls import BF16, Recorder, gradients, leaves, random
from attention_calls import causal as attention

import warploom
from warploom.errors import ProblemError
from warploom.generator.launches import NO_GPU
from warploom.runtime import plan as plans
from warploom.runtime.families.attention_backward import call as backwards
from warploom.runtime.families.attention_backward import call as calls
from warploom.runtime.families.attention_backward.call import BackwardCall
from warploom.runtime.families.attention_forward.call import AttentionCall

# ---- Plans and kernels ---------------------------------------------------------------------------


@pytest.fixture
def torch_deterministic() -> Iterator[Callable[[bool], None]]:
    before = torch.are_deterministic_algorithms_enabled()
    yield torch.use_deterministic_algorithms
    torch.use_deterministic_algorithms(before)


def named(**keywords: Any) -> str:
    """The kernel that gradients get."""
    plan = warploom.plan_attention(*leaves(), causal=True, **keywords)
    told = warploom.explain(plan)
    assert told.backward is not None
    assert f"backward {told.backward}" in str(told)
    return told.backward


def test_explain_names_the_kernel_of_the_gradients() -> None:
    assert named().startswith("attention_backward_sm90a_bf16_dim64_causal_")
    assert "_softcap_" in named(softcap=2.0)
    gemm = warploom.explain(random(8, 16), random(16, 8))
    assert gemm.backward is None
    assert "backward" not in str(gemm)


def test_determinism_is_what_is_asked_for_and_else_what_torch_is_set_to(
    torch_deterministic: Callable[[bool], None],
) -> None:
    assert "_deterministic_" not in named()
    assert "_deterministic_" in named(deterministic=True)
    torch_deterministic(True)
    assert "_deterministic_" in named()
    assert "_deterministic_" not in named(deterministic=False)


def test_determinism_is_decided_when_the_gradients_are_computed(
    torch_deterministic: Callable[[bool], None],
) -> None:
    given = leaves(17)
    out = attention(*given)
    torch_deterministic(True)
    out.sum().backward()
    last = list(plans.known.values())[-1]
    assert "_deterministic_" in last.choice.spec.name


def test_a_backward_pass_is_planned_once_whatever_its_numbers() -> None:
    given = leaves(19)
    gradients(given, softcap=2.0, scale=0.1)
    before = warploom.counters.plans
    gradients(given, softcap=3.0, scale=0.2)
    gradients([tensor.detach().clone().requires_grad_() for tensor in given], softcap=3.0)
    assert warploom.counters.plans == before
    gradients(given)  # without a softcap both passes are other kernels
    assert warploom.counters.plans == before + 2
    out = attention(*given)
    out.backward(random(2, 19, 4, 40).transpose(1, 2))  # a gradient that lies otherwise
    assert warploom.counters.plans == before + 3


def test_a_plan_can_be_differentiated_and_takes_options_that_it_was_not_made_with() -> None:
    given = leaves()
    q, k, v = given
    plan = warploom.plan_attention(q, k, v, causal=True)
    out, _ = plan(q, k, v, causal=True, deterministic=True)
    arriving = random(*out.shape, seed=7)
    found = torch.autograd.grad(out, given, arriving)
    assert all(map(torch.equal, found, gradients(given)))


def test_a_kernel_that_is_named_computes_the_gradients() -> None:
    given = leaves(23)
    name = named(deterministic=True)
    assert all(map(torch.equal, gradients(given, backward_spec=name), gradients(given)))
    names = {plan.choice.spec.name for plan in plans.known.values()}
    assert name in names  # it serves a call that does not ask for determinism, too


def test_a_kernel_of_something_else_is_refused_before_the_forward_pass() -> None:
    given = leaves(29)
    causal = named()
    forward = warploom.explain(warploom.plan_attention(*given, causal=True)).kernel
    launches = warploom.counters.launches
    for keywords in (
        {"backward_spec": forward},
        {"backward_spec": named(softcap=2.0)},
        {"backward_spec": causal, "deterministic": True},
        {"backward_spec": causal, "softcap": 2.0},
    ):
        with pytest.raises(ProblemError, match=r"computes another operation.*leave spec out"):
            attention(*given, **keywords)
    assert warploom.counters.launches == launches
    assert attention(*given, backward_spec=causal).requires_grad


# ---- Launches ------------------------------------------------------------------------------------


def backward_call(*, packed: bool = False, **keywords: Any) -> BackwardCall:
    if not packed:
        q, k, v = (tensor.detach() for tensor in leaves())
        lse = torch.zeros(2, 4, 14)
        call = AttentionCall(q, k, v, causal=True, **keywords)
    else:
        q, k, v = (random(13, heads, 40, seed=i) for i, heads in enumerate((4, 2, 2)))
        offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
        lse = torch.zeros(4, 13)
        call = AttentionCall(q, k, v, True, None, None, None, offsets, offsets, 5, 5, **keywords)
    return BackwardCall(call, random(*q.shape, seed=3), lse, random(*q.shape, seed=4))


def recorded(call: BackwardCall) -> tuple[Recorder, tuple[torch.Tensor, ...]]:
    plan = replace(backwards.plan(call))  # not the one that is remembered
    recorder = Recorder()
    plan.launch = recorder  # type: ignore[assignment]
    return recorder, plan.run(call)


def test_a_launch_is_given_addresses_and_numbers_in_the_order_of_their_names() -> None:
    for scale, softcap, numbers in ((None, None, (40**-0.5,)), (0.3, 2.0, (0.3, 2.0))):
        call = backward_call(scale=scale, softcap=softcap)
        forward = call.forward
        recorder, found = recorded(call)
        read = (forward.q, forward.k, forward.v, call.out, call.dout, call.lse)
        addresses = [tensor.data_ptr() for tensor in read]
        written = [tensor.data_ptr() for tensor in found]
        assert recorder.given == [((*addresses, 0, *written), numbers)]
    assert calls._TENSORS == ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")


def test_a_launch_is_given_rows_without_gaps() -> None:
    call = backward_call()
    call.dlse = torch.ones(()).expand(call.lse.shape)
    call.lse = torch.zeros(2, 14, 4).transpose(1, 2)
    recorder, _ = recorded(call)
    (addresses, _), *_ = recorder.given
    assert addresses[5] != call.lse.data_ptr()
    assert addresses[6] not in (0, call.dlse.data_ptr())
    call.lse, call.dlse = call.lse.contiguous(), call.lse.contiguous()
    recorder, _ = recorded(call)
    (addresses, _), *_ = recorder.given
    assert addresses[5:7] == (call.lse.data_ptr(), call.dlse.data_ptr())


def test_a_launch_reads_a_copy_of_what_tma_cannot_read_and_counts_it() -> None:
    call = backward_call()
    call.dout = torch.ones((), dtype=BF16).expand(call.out.shape)  # as sum() gives it
    before = warploom.counters.copies
    recorder, _ = recorded(call)
    (addresses, _), *_ = recorder.given
    assert warploom.counters.copies == before + 1
    assert addresses[4] != call.dout.data_ptr()
    assert addresses[4] % 16 == 0
    assert addresses[0] == call.forward.q.data_ptr()
    assert backwards.plan(call).copies == ("do",)


def test_a_problem_has_the_strides_of_what_is_read_and_written() -> None:
    call = backward_call()
    forward = call.forward
    forward.q = random(2, 14, 4, 40).transpose(1, 2)
    forward.k = random(2, 2, 14, 41)[..., :40]
    told: Any = call.draft(NO_GPU).problem
    turned, plain = (2240, 40, 160), (2240, 560, 40)
    assert (told.strides_q, told.strides_dq) == (turned, turned)
    assert (told.strides_o, told.strides_do) == (plain, plain)
    assert told.strides_k == told.strides_dk == told.strides_dv == (1120, 560, 40)
    assert (told.batch, told.heads, told.kv_heads, told.seq_q, told.seq_k) == (2, 4, 2, 14, 14)
    assert (told.left, told.right) == (1 << 30, 0)


def test_gradients_go_where_the_call_says() -> None:
    call = backward_call()
    wanted = backwards.attention_backward(call)
    room = torch.full((3, 2, 4, 16, 56), -7.0, dtype=BF16)
    views = [room[i, :, :heads, 1:15, 8:48] for i, heads in enumerate((4, 2, 2))]
    call.into = (views[0], views[1], views[2])
    found = backwards.attention_backward(call)
    assert all(one is view for one, view in zip(found, views, strict=True))
    assert all(map(torch.equal, found, wanted))
    for view in views:
        view.fill_(-7.0)
    assert (room == -7.0).all()
    recorder, _ = recorded(call)
    (addresses, _), *_ = recorder.given
    assert addresses[7:] == tuple(view.data_ptr() for view in views)
    told: Any = call.draft(NO_GPU).problem
    assert told.strides_dq == told.strides_dk == (4 * 16 * 56, 16 * 56, 56)


def test_packed_offsets_come_after_the_tensors() -> None:
    call = backward_call(packed=True)
    recorder, _ = recorded(call)
    (addresses, _), *_ = recorder.given
    assert addresses[10:] == tuple(t.data_ptr() for t in call.forward.offsets)


# ---- Errors --------------------------------------------------------------------------------------


def changed(**tensors: Any) -> BackwardCall:
    return replace(backward_call(), **tensors)


CASES: dict[str, tuple[BackwardCall, str, str]] = {
    "out of another shape": (
        changed(out=random(2, 4, 12, 40)),
        "out [2, 4, 12, 40]",
        "[2, 4, 14, 40]",
    ),
    "a gradient of another type": (
        changed(dout=random(2, 4, 14, 40).float()),
        "dout [2, 4, 14, 40] torch.float32",
        "of torch.bfloat16",
    ),
    "a place that TMA cannot store to": (
        changed(into=(random(2, 4, 14, 41)[..., :40], *[random(2, 2, 14, 40)] * 2)),
        "strides [2296, 574, 41, 1]",
        "multiples of 16 bytes",
    ),
    "a place whose heads overlap": (
        changed(
            into=(
                random(2, 4, 14, 40).as_strided((2, 4, 14, 40), (560, 40, 40, 1)),
                *[random(2, 2, 14, 40)] * 2,
            )
        ),
        "dq [2, 4, 14, 40] with strides [560, 40, 40, 1]",
        "must have no two elements at one address",
    ),
    "lse of another type": (changed(lse=random(2, 4, 14)), "lse [2, 4, 14]", "torch.float32"),
    "lse of another shape": (changed(lse=torch.zeros(2, 14, 4)), "lse [2, 14, 4]", "[2, 4, 14]"),
    "dlse of another type": (
        changed(dlse=torch.zeros(2, 4, 14).double()),
        "dlse [2, 4, 14] torch.float64",
        "of torch.float32 on the device of q",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_not_of_the_forward_pass_is_refused(case: str) -> None:
    call, value, rule = CASES[case]
    for _ in range(2):
        with pytest.raises(ProblemError) as caught:
            backwards.attention_backward(call)
        assert value in caught.value.value
        assert rule in caught.value.rule
        assert caught.value.fix


def test_a_numeric_error_is_raised_for_a_planned_call_too() -> None:
    backwards.attention_backward(backward_call(scale=0.5))
    with pytest.raises(ProblemError, match="scale -1"):
        backwards.attention_backward(backward_call(scale=-1.0))
