"""Attention in autograd: what it keeps, how often it is differentiable, checkpoints, autocast."""

from __future__ import annotations

import pytest
import torch
from attention_calls import BF16, gradients, leaves, random
from attention_calls import causal as attention
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families._attention.problem import Arguments

# ---- What is kept --------------------------------------------------------------------------------


def test_only_operands_results_and_offsets_are_saved() -> None:
    saved: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    q, k, v = leaves()
    offsets = torch.tensor([0, 4, 13], dtype=torch.int32)
    packed = [random(13, n, 40, seed=i).requires_grad_() for i, n in enumerate((4, 2, 2))]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out, lse = warploom.attention(q, k, v, return_lse=True)
        fixed, saved = saved, []
        longest = {"max_seqlen_q": 9, "max_seqlen_k": 9}
        attention(*packed, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **longest)
    assert [t.data_ptr() for t in fixed] == [t.data_ptr() for t in (q, k, v, out, lse)]
    assert [list(t.shape) for t in saved[:4]] == [
        [13, 4, 40],
        [13, 2, 40],
        [13, 2, 40],
        [13, 4, 40],
    ]
    assert [t.data_ptr() for t in saved[5:]] == [offsets.data_ptr()] * 2


def test_a_graph_that_is_dropped_keeps_nothing_alive() -> None:
    given = leaves()
    out = attention(*given)
    node = out.grad_fn
    assert node is not None
    kept = [
        name for name in vars(node) if isinstance(getattr(node, name), torch.Tensor | Arguments)
    ]
    assert kept == []


def test_tensors_may_come_back_from_where_they_were_saved_in_another_layout() -> None:
    given = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in leaves()]
    given = [tensor.requires_grad_() for tensor in given]
    wanted = gradients(given)
    contiguous = torch.contiguous_format
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: tensor.clone(memory_format=contiguous), lambda tensor: tensor
    ):
        found = gradients(given)
    assert all(map(torch.equal, found, wanted))


def test_lengths_that_are_equal_stay_so_when_they_are_saved_apart() -> None:
    given = [random(13, heads, 40, seed=i).requires_grad_() for i, heads in enumerate((4, 2, 2))]
    offsets = torch.tensor([0, 4, 13], dtype=torch.int32)
    lengths = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
    longest = {"max_seqlen_q": 9, "max_seqlen_k": 9}
    wanted = gradients(given, **lengths, **longest)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        found = gradients(given, **lengths, **longest)
    assert all(map(torch.equal, found, wanted))


def test_a_result_that_was_overwritten_is_noticed() -> None:
    given = leaves()
    out = attention(*given)
    with torch.no_grad():
        out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_that_is_retained_gives_the_same_gradients_again() -> None:
    given = leaves()
    out = attention(*given)
    arriving = random(*out.shape, seed=7)
    first = torch.autograd.grad(out, given, arriving, retain_graph=True)
    second = torch.autograd.grad(out, given, arriving)
    assert all(map(torch.equal, first, second))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_recomputes_the_forward_pass(reentrant: bool) -> None:
    given = leaves()
    calls = 0

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return attention(q, k, v) * 2

    out = checkpoint(layer, *given, use_reentrant=reentrant)
    arriving = random(*out.shape, seed=7)
    out.backward(arriving)
    assert calls == 2
    wanted = torch.autograd.grad(layer(*given), given, arriving)
    for operand, one in zip(given, wanted, strict=True):
        assert operand.grad is not None
        assert torch.equal(operand.grad, one)


def test_without_grad_mode_nothing_is_kept() -> None:
    given = leaves()
    with torch.no_grad():
        assert attention(*given).grad_fn is None
    with torch.inference_mode():
        assert not attention(*given).requires_grad
    assert attention(*(tensor.detach() for tensor in given)).grad_fn is None


# ---- Second derivatives --------------------------------------------------------------------------


def test_a_second_derivative_is_refused_when_it_is_asked_for_and_not_before() -> None:
    given = leaves()
    out = attention(*given)
    arriving = random(*out.shape, seed=7)
    wanted = torch.autograd.grad(out, given, arriving, retain_graph=True)
    found = torch.autograd.grad(out, given, arriving, create_graph=True)
    assert all(map(torch.equal, found, wanted))
    with pytest.raises(ProblemError, match=r"differentiable once.*create_graph"):
        found[0].sum().backward()
    parameter = torch.ones((), requires_grad=True)  # another part of the graph is no matter
    (first,) = torch.autograd.grad(
        attention(*given).sum() * parameter**3, parameter, create_graph=True
    )
    (second,) = torch.autograd.grad(first, parameter)
    assert second.item() == pytest.approx(2 * first.item(), rel=0.02)


# ---- Autocast ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_converts_as_it_does_for_the_attention_of_torch(dtype: torch.dtype) -> None:
    given = [tensor.detach().float().requires_grad_() for tensor in leaves()]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    with torch.autocast("cpu", dtype=dtype):
        out = attention(*given)
        theirs = sdpa(*given, is_causal=True, enable_gqa=True)
        assert out.dtype == theirs.dtype == dtype
        out.sum().backward()
    lowered = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
    wanted = torch.autograd.grad(attention(*lowered).sum(), lowered)
    for operand, one in zip(given, wanted, strict=True):
        assert operand.grad is not None
        assert operand.grad.dtype == torch.float32
        assert torch.equal(operand.grad, one.float())


def test_autocast_does_not_lower_what_the_reference_computes_in() -> None:
    given = leaves()
    wanted = [attention(*given), *gradients(given)]
    with torch.autocast("cpu", dtype=BF16):
        found = [attention(*given), *gradients(given)]
    assert all(map(torch.equal, found, wanted))


def test_out_takes_no_part_in_gradients() -> None:
    q, k, v = leaves()
    out = torch.empty_like(q)
    plain = [tensor.detach() for tensor in (q, k, v)]
    for given in ((q, *plain[1:]), (*plain[:2], v), plain):
        if given is plain:
            out = out.detach().requires_grad_()
        with pytest.raises(ProblemError, match=r"requires grad.*leave out=None"):
            attention(*given, out=out)
    with torch.no_grad():
        attention(q, k, v, out=out)
    assert torch.equal(out, attention(*plain))
