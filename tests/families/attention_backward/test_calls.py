"""On CPU tensors gradients of attention are exact: masks, heads, packed lengths, no extent."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import warploom

BF16, FP16 = torch.bfloat16, torch.float16
Tensors = tuple[torch.Tensor, ...]


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def operands(
    seq_q: int, seq_k: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 40, batch: int = 2
) -> Tensors:
    shape = (batch, kv_heads, seq_k, dim)
    return random(batch, heads, seq_q, dim), random(*shape, seed=1), random(*shape, seed=2)


def shown(seq_q: int, seq_k: int, keywords: dict[str, Any]) -> torch.Tensor:
    """Which columns rows attend to, straight from the words of the documentation."""
    causal = keywords.get("causal", False)
    left, right = keywords.get("window") or (None, None)
    row, column = torch.arange(seq_q)[:, None], torch.arange(seq_k)
    diagonal = row if causal == "top_left" else row + seq_k - seq_q
    visible = torch.ones(seq_q, seq_k, dtype=torch.bool)
    if causal:
        visible &= column <= diagonal
    if left is not None:
        visible &= column >= diagonal - left
    if right is not None:
        visible &= column <= diagonal + right
    return visible


def expected(given: Tensors, arriving: Tensors, keywords: dict[str, Any]) -> Tensors:
    """The gradients by autograd in float64; `arriving` are those of out and perhaps of lse."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in given)
    sharing = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(sharing, 1).mT * keywords.get("scale", q.shape[-1] ** -0.5)
    if cap := keywords.get("softcap"):
        s = cap * torch.tanh(s / cap)
    visible = shown(q.shape[2], k.shape[2], keywords)
    some = visible.any(-1, keepdim=True)  # rows without any are not differentiated at all
    p = torch.softmax(s.masked_fill(~visible & some, -torch.inf), -1) * some
    out = p @ v.repeat_interleave(sharing, 1)
    lse = s.masked_fill(~visible & some, -torch.inf).logsumexp(-1) * some[:, 0]
    results = (out, lse)[: len(arriving)]
    return torch.autograd.grad(results, (q, k, v), [one.double() for one in arriving])


def leaves(given: Tensors) -> Tensors:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in given)


def assert_near(found: Tensors, wanted: Tensors) -> None:
    """fp32 sums of what out, rounded to 16 bits, leaves of the rows' sums; rounded once more."""
    for one, exact in zip(found, wanted, strict=True):
        unit = torch.finfo(one.dtype).eps / 2
        assert one.shape == exact.shape
        assert ((one.double() - exact).abs() <= 2 * unit * exact.abs() + 4 * unit).all()


def assert_right(*given: torch.Tensor, lse: bool = True, **keywords: Any) -> Tensors:
    q, k, v = leaves(given)
    results = warploom.attention(q, k, v, return_lse=True, **keywords)
    results = results if lse else results[:1]  # type: ignore[assignment]
    arriving = tuple(random(*one.shape, dtype=one.dtype, seed=7) for one in results)
    found = torch.autograd.grad(results, (q, k, v), arriving)
    assert [one.dtype for one in found] == [q.dtype] * 3
    assert_near(found, expected(given, arriving, keywords))
    return found


MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "top left": {"causal": "top_left"},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "left only": {"window": (2, None)},
    "diagonal only": {"window": (0, 0)},
    "window, bottom right": {"window": (3, None), "causal": "bottom_right"},
    "softcap": {"softcap": 0.7},
    "all": {"softcap": 2.0, "causal": "bottom_right", "window": (5, 1), "scale": 0.3},
}


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_gradients_are_those_of_the_mask(name: str, lengths: tuple[int, int]) -> None:
    for lse in (False, True):
        assert_right(*operands(*lengths), lse=lse, **MASKS[name])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_keys_have_the_gradients_of_all_query_heads_that_share_them(
    heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    assert_right(*(t.to(dtype) for t in operands(6, 11, heads=heads, kv_heads=kv_heads)))


@pytest.mark.parametrize("dim", [8, 32, 72, 136, 256])
def test_any_multiple_of_8_is_a_head_dimension(dim: int) -> None:
    assert_right(*operands(5, 6, dim=dim), causal="bottom_right")


def test_it_is_the_gradient_that_torch_has() -> None:
    given, arriving = operands(33, 33), random(2, 4, 33, 40, seed=7)
    q, k, v = (tensor.double().requires_grad_() for tensor in given)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    wanted = torch.autograd.grad(theirs, (q, k, v), arriving.double())
    q, k, v = leaves(given)
    found = torch.autograd.grad(warploom.attention(q, k, v, causal=True), (q, k, v), arriving)
    assert_near(found, wanted)


@pytest.mark.parametrize("lengths", [(9, 5), (9, 1)], ids=str)
def test_rows_that_attend_to_nothing_have_a_gradient_of_0_and_give_none(
    lengths: tuple[int, int],
) -> None:
    seq_q, seq_k = lengths
    given = operands(seq_q, seq_k)
    dq, *_ = assert_right(*given, causal="bottom_right")
    assert (dq[:, :, : seq_q - seq_k] == 0).all()
    q, k, v = leaves(given)
    out = warploom.attention(q, k, v, causal="bottom_right")
    arriving = random(*out.shape, seed=7)
    arriving[:, :, : seq_q - seq_k] = 1e4
    again = torch.autograd.grad(out, (q, k, v), arriving)
    without_lse = assert_right(*given, lse=False, causal="bottom_right")
    for one, wanted in zip(again, without_lse, strict=True):
        assert torch.equal(one, wanted)


@pytest.mark.parametrize(
    ("batch", "heads", "seq_q", "seq_k"), [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)]
)
def test_an_extent_of_0_gives_gradients_of_0(
    batch: int, heads: int, seq_q: int, seq_k: int
) -> None:
    given = leaves(operands(seq_q, seq_k, batch=batch, heads=heads, kv_heads=heads))
    out = warploom.attention(*given, causal="bottom_right")  # type: ignore[call-overload]
    found = torch.autograd.grad(out, given, torch.ones_like(out))
    for one, operand in zip(found, given, strict=True):
        assert one.shape == operand.shape
        assert (one == 0).all()


# ---- Packed lengths ------------------------------------------------------------------------------


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("past", [0, 6])
@pytest.mark.parametrize("name", ["none", "top left", "bottom right", "window", "all"])
def test_packed_sequences_are_as_if_each_were_alone(name: str, past: int) -> None:
    lengths_q, lengths_k = [5, 0, 1, 8, 3], [7, 4, 6, 3, 0]
    q, k, v = leaves(
        (
            random(sum(lengths_q) + past, 4, 40),
            random(sum(lengths_k) + past, 2, 40, seed=1),
            random(sum(lengths_k) + past, 2, 40, seed=2),
        )
    )
    results = warploom.attention(
        q,
        k,
        v,
        cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_k=offsets(lengths_k),
        max_seqlen_q=8,
        max_seqlen_k=7,
        return_lse=True,
        **MASKS[name],
    )
    arriving = [random(*one.shape, dtype=one.dtype, seed=7) for one in results]
    found = torch.autograd.grad(results, (q, k, v), arriving)
    wanted = [torch.zeros(t.shape, dtype=torch.float64) for t in (q, k, v)]
    rows, columns = 0, 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        at_q, at_k = slice(rows, rows + length_q), slice(columns, columns + length_k)
        rows, columns = rows + length_q, columns + length_k
        if not (length_q and length_k):
            continue
        one = tuple(t[at].transpose(0, 1)[None] for t, at in ((q, at_q), (k, at_k), (v, at_k)))
        coming = (arriving[0][at_q].transpose(0, 1)[None], arriving[1][None, :, at_q])
        for total, at, part in zip(
            wanted, (at_q, at_k, at_k), expected(one, coming, MASKS[name]), strict=True
        ):
            total[at] = part[0].transpose(0, 1)
    assert_near(found, tuple(wanted))


# ---- What is wanted, where it lies ---------------------------------------------------------------


@pytest.mark.parametrize("wanted", list(product((False, True), repeat=3))[1:], ids=str)
def test_a_gradient_of_some_operands_is_that_of_all(wanted: tuple[bool, ...]) -> None:
    given = operands(7, 9)
    arriving = random(*given[0].shape, seed=7)
    every = leaves(given)
    both = torch.autograd.grad(warploom.attention(*every), every, arriving)  # type: ignore[call-overload]
    some = [t.clone().requires_grad_(one) for t, one in zip(given, wanted, strict=True)]
    warploom.attention(*some).backward(arriving)  # type: ignore[call-overload]
    for tensor, one, expected_one in zip(some, wanted, both, strict=True):
        assert (tensor.grad is not None) == one
        if tensor.grad is not None:
            assert torch.equal(tensor.grad, expected_one)


def test_only_the_log_sum_exp_may_be_differentiated() -> None:
    given = operands(7, 9)
    q, k, v = leaves(given)
    _, lse = warploom.attention(q, k, v, return_lse=True)
    arriving = random(*lse.shape, dtype=torch.float32, seed=7)
    found = torch.autograd.grad(lse, (q, k, v), arriving)
    wanted = expected(given, (torch.zeros(q.shape), arriving), {})
    assert_near(found, wanted)
    assert (found[2] == 0).all()


def test_gradients_lie_in_memory_as_their_operands_do() -> None:
    plain, turned = random(2, 4, 9, 40), random(2, 9, 4, 40).transpose(1, 2)
    together = random(2, 9, 3, 4, 40)
    sliced = [together[:, :, index].transpose(1, 2) for index in range(3)]
    for given in ((plain, turned, turned), (turned, plain, sliced[1]), tuple(sliced)):
        q, k, v = (tensor.detach().requires_grad_() for tensor in given)
        arriving = random(2, 4, 9, 40, seed=7)
        found = torch.autograd.grad(warploom.attention(q, k, v), (q, k, v), arriving)
        for one, operand in zip(found, given, strict=True):
            lies = one if operand is plain else one.transpose(1, 2)
            assert lies.is_contiguous()
        assert_near(found, expected(given, (arriving,), {}))


def test_gradients_reach_what_the_operands_are_views_of() -> None:
    together = random(2, 9, 3, 4, 40).requires_grad_()
    q, k, v = (together[:, :, index].transpose(1, 2) for index in range(3))
    one_head = random(2, 1, 9, 40).requires_grad_()
    warploom.attention(q, k, v).sum().backward()
    assert together.grad is not None
    wanted = expected((q, k, v), (torch.ones(2, 4, 9, 40),), {})
    for index, exact in enumerate(wanted):
        assert_near((together.grad[:, :, index].transpose(1, 2),), (exact,))
    shared = one_head.expand(2, 4, 9, 40)
    (found,) = torch.autograd.grad(warploom.attention(q, shared, shared).sum(), one_head)
    _, dk, dv = expected((q, shared, shared), (torch.ones(2, 4, 9, 40),), {})
    difference = (found.double() - (dk + dv).sum(1, keepdim=True)).abs()
    assert (difference <= 0.05).all()  # autograd adds eight gradients of 16 bits


def test_operands_and_gradients_that_come_in_are_left_as_they_were() -> None:
    given = leaves(operands(7, 9))
    out = warploom.attention(*given, window=(2, 2))  # type: ignore[call-overload]
    arriving = random(*out.shape, seed=7)
    before = [tensor.detach().clone() for tensor in (*given, out, arriving)]
    out.backward(arriving)
    assert all(map(torch.equal, (*given, out, arriving), before))
