"""Calls of FlashAttention's functions that are like an earlier one: guards, a plan, a launch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from launched_plans import launched_plans

import warploom
from warploom.errors import ProblemError
from warploom.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from warploom.runtime.plan import Plan


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Plan[Any, Any]]:
    return launched_plans(monkeypatch)


ROOT = Path(warploom.__file__).resolve().parents[2]
OFFSETS = torch.tensor([0, 4, 13], dtype=torch.int32)
OTHERS = OFFSETS + 0
LENGTHS = torch.tensor([9, 14], dtype=torch.int32)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def operands(*, grad: bool = False) -> tuple[torch.Tensor, ...]:
    made = random(2, 14, 4, 40), random(2, 14, 2, 40), random(2, 14, 2, 40)
    return tuple(one.requires_grad_(grad) for one in made)


def rows(*, grad: bool = False) -> tuple[torch.Tensor, ...]:
    made = random(13, 4, 40), random(13, 2, 40), random(13, 2, 40)
    return tuple(one.requires_grad_(grad) for one in made)


SLOPES = torch.rand(4)
FIXED: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (3, -1)},
    "softcap and scale": {"softcap": 2.0, "softmax_scale": 0.3},
    "slopes": {"alibi_slopes": SLOPES},
    "deterministic": {"deterministic": True},
}
SHARED, APART = (OFFSETS, OFFSETS, 9, 9), (OFFSETS, OTHERS, 9, 9)


def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> Any:  # noqa: ANN401
    """By `warploom.attention`."""
    keywords = {
        "causal": "bottom_right" if options.get("causal") else False,
        "window": (3, None) if "window_size" in options else None,
        "softcap": options.get("softcap"),
        "scale": options.get("softmax_scale"),
        "alibi_slopes": options.get("alibi_slopes"),
        "deterministic": options.get("deterministic"),
    }
    turned = (one.transpose(1, 2) for one in (q, k, v))
    out, lse = warploom.attention(*turned, return_lse=True, **keywords)
    return out.transpose(1, 2), lse


@pytest.mark.parametrize("case", FIXED)
@pytest.mark.parametrize("grad", [False, True], ids=["results", "gradients"])
def test_a_call_like_the_last_is_launched_on_addresses(
    case: str, grad: bool, launches: list[Plan[Any, Any]]
) -> None:
    given, options = operands(grad=grad), FIXED[case]
    wanted = expected(*given, **options)
    arriving = random(*wanted[0].shape), torch.randn(wanted[1].shape)
    gradients = torch.autograd.grad(wanted, given, arriving) if grad else ()
    for launched in (0, 1, 1):
        launches.clear()
        out, lse, _ = flash_attn_func(*given, **options, return_attn_probs=True)
        assert len(launches) == launched
        for one, like in zip((out, lse), wanted, strict=True):
            assert torch.equal(one, like)
            assert (one.stride(), one.requires_grad) == (like.stride(), grad)
        found = torch.autograd.grad((out, lse), given, arriving) if grad else ()
        for one, like in zip(found, gradients, strict=True):
            assert torch.equal(one, like)
            assert one.stride() == like.stride()


@pytest.mark.parametrize("grad", [False, True], ids=["results", "gradients"])
def test_packed_sequences_with_one_list_and_two_are_kept_beside_each_other(
    grad: bool, launches: list[Plan[Any, Any]]
) -> None:
    """What decides that is which arguments are one tensor: no type or value of an option does."""
    given = rows(grad=grad)
    wanted = flash_attn_varlen_func(*given, *SHARED, causal=True)
    arriving = random(*wanted.shape)
    gradients = torch.autograd.grad(wanted, given, arriving) if grad else ()
    flash_attn_varlen_func(*given, *APART, causal=True)
    for lengths in (SHARED, APART, SHARED, APART):
        launches.clear()
        out = flash_attn_varlen_func(*given, *lengths, causal=True)
        assert len(launches) == 1
        assert torch.equal(out, wanted)
        if grad:
            found = torch.autograd.grad(out, given, arriving)
            assert all(map(torch.equal, found, gradients))


def step(**changed: Any) -> torch.Tensor:
    torch.manual_seed(0)
    given = {"q": random(2, 3, 4, 64), "k_cache": random(2, 14, 2, 64), "cache_seqlens": LENGTHS}
    given |= {"v_cache": random(2, 14, 2, 64), "causal": True, **changed}
    out: torch.Tensor = flash_attn_with_kvcache(**given)
    return out


def test_a_step_like_the_last_is_launched_on_addresses(launches: list[Plan[Any, Any]]) -> None:
    wanted = step()
    for _ in range(2):
        launches.clear()
        found = step()
        assert len(launches) == 1
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()
    later = step(cache_seqlens=LENGTHS - 2)
    assert not torch.equal(later, wanted)
    assert torch.equal(step(cache_seqlens=LENGTHS.clone()), wanted)


def test_a_step_reads_the_lists_that_are_made_for_it() -> None:
    """Lengths that are a number, pages of an index, and larger pages are tensors of each call."""
    assert torch.equal(step(cache_seqlens=14), step(cache_seqlens=None))
    assert not torch.equal(step(cache_seqlens=3), step(cache_seqlens=14))
    pages = random(4, 64, 2, 64)
    table = torch.tensor([[0, 1], [2, 3]], dtype=torch.int32)
    for order in (table, table.flip(0), table):
        for _ in range(2):
            found = step(k_cache=pages, v_cache=pages, block_table=order)
            smaller = pages.view(16, 16, 2, 64)
            split = (order[..., None] * 4 + torch.arange(4)).flatten(1).int()
            other = step(k_cache=smaller, v_cache=smaller, block_table=split)
            assert torch.equal(found, other)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"softcap": None}, "softcap None"),
        ({"softcap": float("nan")}, "softcap nan"),
        ({"softcap": float("inf")}, "softcap inf"),
        ({"softmax_scale": -1.0}, "softmax_scale -1.0"),
        ({"softmax_scale": True}, "softmax_scale True"),
        ({"causal": 1}, "causal 1"),
        ({"deterministic": 0}, "deterministic 0"),
        ({"window_size": (3,)}, "window_size"),
        ({"return_attn_probs": 1}, "return_attn_probs 1"),
        ({"alibi_slopes": torch.rand(4).double()}, "alibi_slopes"),
        ({"dropout_p": 1.5}, "dropout_p 1.5"),
    ],
)
@pytest.mark.parametrize("before", [{}, {"softcap": 2.0, "softmax_scale": 0.3}])
def test_what_is_refused_is_refused_after_a_call_without_it(
    before: dict[str, Any], changed: dict[str, Any], told: str
) -> None:
    """A call is taken for the one before it, and what else it says goes unread."""
    given = operands()
    for _ in range(2):
        flash_attn_func(*given, **before)
    with pytest.raises(ProblemError, match=told):
        flash_attn_func(*given, **{**before, **changed})


def test_options_and_numbers_are_those_of_each_call() -> None:
    given = operands()
    for _ in range(2):
        for options in ({}, {"softcap": 0}, {"softcap": 2.0}, {"softcap": -3.0}, {"softcap": 1.0}):
            capped = {name: one for name, one in options.items() if one > 0}
            wanted = expected(*given, **capped)[0]
            assert torch.equal(flash_attn_func(*given, **options), wanted)
        for options in FIXED.values():
            found = flash_attn_func(*given, **options)
            assert torch.equal(found, expected(*given, **options)[0])


def test_dropout_draws_anew_in_each_call() -> None:
    given = operands()
    first, second = (flash_attn_func(*given, dropout_p=0.5) for _ in range(2))
    assert not torch.equal(first, second)


def test_heads_that_are_padded_are_padded_in_each_call() -> None:
    """What is launched on are the copies."""
    q, k, v = (random(2, 14, 2, 36) for _ in range(3))
    first = flash_attn_func(q, k, v)
    flash_attn_func(q, k, v)
    q.zero_()
    assert not torch.equal(flash_attn_func(q, k, v), first)


def test_autocast_converts_what_torch_converts() -> None:
    q, k, v = (one.float() for one in operands())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert flash_attn_func(q, k, v).dtype is torch.bfloat16
    with pytest.raises(ProblemError, match=r"torch\.float32"):
        flash_attn_func(q, k, v)


Q, K, V = operands()
ROWS = rows()
CALLS: dict[str, Callable[[], object]] = {
    "attention": lambda: warploom.attention(K, V, V),
    "flash_attn_func": lambda: flash_attn_func(Q, K, V, causal=True),
    "flash_attn_varlen_func": lambda: flash_attn_varlen_func(*ROWS, *SHARED),
    "flash_attn_with_kvcache": step,
}
MOST = 5  # the function, what finds its form and kind, and guards; then a plan runs


@pytest.mark.parametrize("name", CALLS)
def test_a_warm_call_is_guards_a_plan_and_a_launch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything that a call does beside is done once, when it is new."""
    monkeypatch.setattr(Plan, "run_at", lambda self, *given: None)
    call, functions = CALLS[name], set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        path = Path(code.co_filename)
        ours = ROOT in path.resolve().parents and "site-packages" not in path.parts
        if event == "call" and ours and not code.co_name.startswith("<"):
            functions.add(f"{path.name}:{code.co_qualname}")

    for _ in range(3):
        call()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    assert len({one for one in functions if not one.startswith("test_")}) <= MOST, functions
