"""Calls of attention that are like an earlier one, and gradients: by what is kept of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from attention_calls import BF16, FP16, random
from launched_plans import launched_plans
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import warploom
from warploom.errors import ProblemError
from warploom.runtime import plan as plans
from warploom.runtime.counters import counters
from warploom.runtime.families.attention_forward import api, gradient
from warploom.runtime.families.attention_forward.call import AttentionCall
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.plan import Plan


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Plan[Any, Any]]:
    return launched_plans(monkeypatch)


Given = tuple[torch.Tensor, ...]
OFFSETS = torch.tensor([0, 4, 13], dtype=torch.int32)
PACKED: dict[str, Any] = {"max_seqlen_q": 9, "max_seqlen_k": 9}


def fixed(seq_k: int = 14, dtype: torch.dtype = BF16) -> Given:
    keys = [random(2, 2, seq_k, 40, dtype=dtype, seed=seed) for seed in (1, 2)]
    return random(2, 4, 14, 40, dtype=dtype), *keys


def turned() -> Given:
    """As a model's projections lie."""
    q, k, v = (random(2, 14, heads, 40, seed=heads) for heads in (4, 2, 2))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def together() -> Given:
    """Three parts of one projection."""
    q, k, v = random(2, 14, 3, 4, 40).unbind(2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def packed() -> Given:
    q, k, v = (random(13, heads, 40, seed=heads) for heads in (4, 2, 2))
    return q, k, v


CASES: dict[str, tuple[Given, dict[str, Any]]] = {
    "plain": (fixed(), {}),
    "causal": (fixed(), {"causal": True}),
    "fp16": (fixed(dtype=FP16), {"causal": "top_left"}),
    "other lengths": (fixed(seq_k=20), {"causal": "bottom_right"}),
    "window": (fixed(), {"window": (3, None)}),
    "softcap and scale": (fixed(), {"softcap": 2.0, "scale": 0.3}),
    "deterministic": (fixed(), {"deterministic": True}),
    "turned": (turned(), {"causal": True}),
    "parts of one tensor": (together(), {"causal": True}),
    "packed": (packed(), {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS, **PACKED}),
    "packed apart": (packed(), {"cu_seqlens_q": OFFSETS, "cu_seqlens_k": OFFSETS + 0, **PACKED}),
}


def attention(given: Given, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v = given
    return warploom.attention(q, k, v, return_lse=True, **keywords)


@pytest.mark.parametrize("with_lse", [False, True], ids=["out", "out and lse"])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_a_call_that_is_made(
    case: str, with_lse: bool, launches: list[Plan[Any, Any]]
) -> None:
    """An address goes to another tensor, or a result lies otherwise than that of a call."""
    tensors, keywords = CASES[case]
    plain = [one.detach() for one in tensors]
    for wanted in ((0, 1, 2), (1,), ()):
        given = tuple(one.detach().requires_grad_(at in wanted) for at, one in enumerate(plain))
        read = [given[at] for at in wanted]
        plans.forget()
        call = AttentionCall(*given, **keywords)
        results = plans.planned(call, AttentionPlan).run_recorded(call)
        arriving = [random(*one.shape, dtype=one.dtype, seed=9) for one in results]
        count = 2 if with_lse else 1
        expected = torch.autograd.grad(results[:count], read, arriving[:count]) if read else ()
        for launched in (0, 1, 1):
            launches.clear()
            found = attention(given, **keywords)
            assert len(launches) == launched
            for one, like in zip(found, results, strict=True):
                assert torch.equal(one, like)
                assert (one.stride(), one.requires_grad) == (like.stride(), bool(read))
            if not read:
                continue
            for one, like in zip(
                torch.autograd.grad(found[:count], read, arriving[:count]), expected, strict=True
            ):
                assert torch.equal(one, like)
                assert one.stride() == like.stride()
            assert len(launches) == launched + 1


# ---- Which calls are alike -----------------------------------------------------------------------


class Other(torch.Tensor):
    """A class of which nothing is known."""


def test_a_call_is_run_again_only_where_nothing_changed() -> None:
    """What was decided for another mode, type, option or class of tensor decides this call too."""
    q, k, v = fixed()
    k.requires_grad_()
    defaults = {one.name: one.default for one in fields(AttentionCall)[3:]}

    def again(
        q: torch.Tensor = q, k: torch.Tensor = k, v: torch.Tensor = v, **changed: Any
    ) -> object:
        options = {**defaults, "causal": True, **changed}
        return api._warm.again((q, k, v, *options.values()))

    attention((q, k, v), causal=True)
    others: dict[str, Callable[[], object]] = {
        "mask": lambda: again(causal="bottom_right"),
        "window": lambda: again(window=(3, 0)),
        "softcap": lambda: again(softcap=1.0),
        "deterministic": lambda: again(deterministic=False),
        "type": lambda: again(q.half(), k.half(), v.half()),
        "shape": lambda: again(q[:1], k[:1], v[:1]),
        "length": lambda: again(q, k[:, :, 1:], v[:, :, 1:]),
        "strides": lambda: again(turned()[0]),
        "q is differentiated": lambda: again(q.detach().requires_grad_()),
        "k is not": lambda: again(q, k.detach()),
        "class": lambda: again(q.as_subclass(Other)),
        "device": lambda: again(q.to("meta"), k.to("meta"), v.to("meta")),
    }
    modes: dict[str, Any] = {
        "no_grad": torch.no_grad(),
        "inference_mode": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=FP16),
        "forward mode": forward_ad.dual_level(),
        "flops": FlopCounterMode(display=False),
        "fake": FakeTensorMode(),
    }
    for what, other in others.items():
        assert other() is None, what
    for what, mode in modes.items():
        with mode:
            assert again() is None, what
    seen: list[object] = []
    torch.func.vmap(lambda one: (one, seen.append(again()))[0])(q)
    assert seen == [None]
    assert again() is not None


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"cu_seqlens_q": OFFSETS}, "packed lengths without"),
        ({"cu_seqlens_k": OFFSETS}, "packed lengths without"),
        ({"max_seqlen_q": 9}, "packed lengths without"),
        ({"deterministic": 0}, "deterministic 0"),
        ({"scale": -1.0}, "scale -1.0"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"window": (3,)}, None),
        ({"window": ([3], 0)}, None),
        ({"causal": [True]}, "causal"),
        ({"return_lse": 1}, "return_lse 1"),
    ],
)
def test_what_is_refused_is_refused_after_a_call_without_it(
    changed: dict[str, Any], told: str | None
) -> None:
    """A call is taken for the one before it, and what else it says goes unread."""
    for _ in range(2):
        attention(fixed())
    q, k, v = fixed()
    with pytest.raises((ProblemError, TypeError, ValueError), match=told):
        warploom.attention(q, k, v, **{"return_lse": True, **changed})


def test_tracers_and_transforms_are_refused_after_a_call_without_them() -> None:
    """torch.jit keeps the result's memory and not the launch; torch.func sees no gradient."""
    q, k, v = fixed()
    for _ in range(2):
        attention((q, k, v))
    with pytest.raises(ProblemError, match=r"under torch\.jit\.trace"):
        torch.jit.trace(lambda one: warploom.attention(one, k, v), q)  # type: ignore[no-untyped-call]
    with pytest.raises(ProblemError, match=r"inside of torch\.func's grad"):
        torch.func.grad(lambda one: warploom.attention(one, k, v).sum())(q)


def test_numbers_are_those_of_each_call() -> None:
    """The scale of the first call is kept with its plan."""
    given = fixed()
    for scale, softcap in ((0.3, 2.0), (0.1, 2.0), (None, 1.0), (0.3, 4)):
        found = attention(given, scale=scale, softcap=softcap)
        call = AttentionCall(*given, scale=scale, softcap=softcap)
        for one, like in zip(found, plans.planned(call, AttentionPlan).run(call), strict=True):
            assert torch.equal(one, like)
    assert torch.equal(attention(given, softcap=0.0)[0], attention(given)[0])


def test_one_tensor_may_be_keys_and_values(launches: list[Plan[Any, Any]]) -> None:
    """Torch's guards take no tensor twice."""
    q, k, _ = fixed()
    for _ in range(3):
        found = attention((q, k, k))
    assert torch.equal(found[0], attention((q, k, k.clone()))[0])


def test_tensors_that_come_to_lie_elsewhere_are_copied_as_before(
    launches: list[Plan[Any, Any]],
) -> None:
    """TMA reads an address that is no multiple of 16 bytes: guards do not see addresses."""
    q, k, v = fixed()
    attention((q, k, v))
    expected = attention((q, k, v))
    shifted = random(q.numel() + 1)[1:].view(q.shape)
    shifted.copy_(q)
    launches.clear()
    for _ in range(2):
        assert torch.equal(attention((shifted, k, v))[0], expected[0])
    assert not launches
    assert torch.equal(attention((q, k, v))[0], expected[0])
    assert [plan.copies for plan in launches] == [()]


def test_memory_that_was_freed_is_refused() -> None:
    """Addresses go to a launch, of which one is 0: FSDP frees tensors between their uses."""
    q, k, v = (one.requires_grad_() for one in fixed())
    for _ in range(2):
        out, _ = attention((q, k, v))
        torch.autograd.grad(out, q, torch.ones_like(out), retain_graph=True)
    k.untyped_storage().resize_(0)
    with pytest.raises(ProblemError, match="must have memory"):
        torch.autograd.grad(out, q, torch.ones_like(out))
    with pytest.raises(ProblemError, match="must have memory"):
        attention((q, k, v))


def test_kinds_of_calls_are_kept_beside_each_other(launches: list[Plan[Any, Any]]) -> None:
    """A checkpoint calls without gradients and then with them, in every step."""
    given = tuple(one.requires_grad_() for one in fixed())
    longer = fixed(seq_k=20)
    planned = 0
    for _ in range(3):
        with torch.no_grad():
            attention(given)
        assert attention(given)[0].requires_grad
        attention(longer)
        planned = planned or counters.plans
    assert counters.plans == planned
    assert len(launches) == 6


def test_what_may_have_changed_is_planned_anew(launches: list[Plan[Any, Any]]) -> None:
    """A call runs the kernel that was chosen before a tuner found a better one."""
    given = fixed()
    attention(given)
    attention(given)
    plans.forget()
    attention(given)
    attention(given)
    assert len(launches) == 2 and launches[0] is not launches[1]


# ---- Gradients -----------------------------------------------------------------------------------


def test_gradients_that_arrive_otherwise_have_plans_of_their_own(
    launches: list[Plan[Any, Any]],
) -> None:
    """The plan of one kind of gradient reads another's memory."""
    given = tuple(one.requires_grad_() for one in fixed())
    dense = random(2, 4, 14, 40, seed=9)
    others = {
        "turned": dense.transpose(1, 2).contiguous().transpose(1, 2),
        "narrow": dense.new_empty(2, 4, 14, 80)[..., :40].copy_(dense),
        "shifted": torch.empty(dense.numel() + 1, dtype=BF16)[1:].view(dense.shape).copy_(dense),
    }
    expected = torch.autograd.grad(attention(given)[0], given, dense)
    for arriving in (*others.values(), dense, *others.values(), dense):
        found = torch.autograd.grad(attention(given)[0], given, arriving)
        assert all(map(torch.equal, found, expected))
    summed = torch.autograd.grad(attention(given)[0].sum(), given)
    ones = torch.autograd.grad(attention(given)[0], given, torch.ones_like(dense))
    assert all(map(torch.equal, summed, ones))


def test_determinism_is_that_of_the_backward_pass_when_it_is_kept_too() -> None:
    """A pass that was kept runs sums in any order after torch was told otherwise."""
    given = tuple(one.requires_grad_() for one in fixed())
    before = torch.are_deterministic_algorithms_enabled()
    names = []
    try:
        for setting in (False, True, False, True):
            torch.use_deterministic_algorithms(setting)
            out, _ = attention(given)
            torch.autograd.grad(out, given, torch.ones_like(out))
            kind: Any = gradient._kinds._last
            names.append("_deterministic_" in kind[-1].plan.choice.spec.name)
    finally:
        torch.use_deterministic_algorithms(before)
    assert names == [False, True, False, True]


def test_hooks_may_bring_back_what_was_saved_otherwise() -> None:
    """A plan reads what a hook returned as what was saved lay."""
    given = tuple(one.requires_grad_() for one in turned())
    arriving = random(2, 4, 14, 40, seed=9)
    expected = torch.autograd.grad(attention(given)[0], given, arriving)

    def other(saved: torch.Tensor) -> torch.Tensor:
        return saved.clone(memory_format=torch.contiguous_format)

    for unpack in (torch.clone, other, torch.clone, other):
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.detach(), unpack):
            out, _ = attention(given)
        found = torch.autograd.grad(out, given, arriving)
        assert all(map(torch.equal, found, expected))


def test_gradients_go_into_the_places_that_are_given(launches: list[Plan[Any, Any]]) -> None:
    """A pass that was kept writes tensors of its own, or by the strides of other places."""
    given = fixed()
    out, lse = attention(given)
    arriving = random(*out.shape, seed=9)
    asked = gradient.Asked.of(AttentionCall(*given))

    def differentiate(into: Any = None) -> tuple[torch.Tensor, ...]:  # noqa: ANN401
        saved = (*given, out, lse)
        numbers = (None, None, 0.0)
        return gradient.differentiate(asked, numbers, arriving, None, *saved, into=into)

    expected = differentiate()
    launches.clear()
    for lead in (2, 0):  # [batch, seq, three, heads, dim], or three tensors in a row
        for _ in range(2):
            room = torch.empty(2, 14, 3, 4, 40, dtype=BF16)
            if not lead:
                room = torch.empty(3, 2, 14, 4, 40, dtype=BF16)
            of_q, of_k, of_v = (one.transpose(1, 2) for one in room.unbind(lead))
            into = (of_q, of_k[:, :2], of_v[:, :2])
            found = differentiate(into)
            assert all(one is place for one, place in zip(found, into, strict=True))
            assert all(map(torch.equal, found, expected))
    assert len(launches) == 2
    assert all(map(torch.equal, differentiate(), expected))
