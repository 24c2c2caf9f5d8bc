"""torch.compile and torch.library see attention as an operator that behaves as torch expects."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families.attention_forward import operator_call
from warploom.runtime.families.attention_forward.call import AttentionCall

Q = torch.randn(2, 6, 4, 16).bfloat16().transpose(1, 2)
K, V = torch.randn(2, 2, 9, 16).bfloat16(), torch.randn(2, 2, 9, 16).bfloat16()
OFFSETS_Q = torch.tensor([0, 2, 6], dtype=torch.int32)
OFFSETS_K = torch.tensor([0, 5, 9], dtype=torch.int32)
PACKED: dict[str, Any] = {
    "cu_seqlens_q": OFFSETS_Q,
    "cu_seqlens_k": OFFSETS_K,
    "max_seqlen_q": 4,
    "max_seqlen_k": 5,
}
FIXED = (Q, K, V)
ONE = (Q[0].transpose(0, 1), K[0].transpose(0, 1), V[0].transpose(0, 1))

CALLS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (FIXED, {}),
    "causal": (FIXED, {"causal": "bottom_right"}),
    "causal True": ((Q, Q, Q), {"causal": True}),
    "all": (FIXED, {"causal": "top_left", "window": (3, None), "softcap": 2.0, "scale": 0.3}),
    "packed": (ONE, {"window": (2, 1), **PACKED}),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_takes_every_keyword_without_a_graph_break(name: str) -> None:
    given, keywords = CALLS[name]

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = warploom.attention(q, k, v, return_lse=True, **keywords)
        return out * 2, lse + 1

    expected = layer(*given)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for found, wanted in zip(compiled(*given), expected, strict=True):
        assert torch.equal(found, wanted)
        assert found.stride() == wanted.stride()


def test_torch_compile_writes_to_out() -> None:
    def into(q: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, K, V, out=out) + 1

    compiled = torch.compile(into, fullgraph=True, backend="aot_eager")
    out, expected = torch.zeros_like(Q), torch.zeros_like(Q)
    assert torch.equal(compiled(Q, out), into(Q, expected))
    assert torch.equal(out, expected)


def test_torch_compile_follows_lengths_that_vary() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, k, causal="bottom_right")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq_q, seq_k in ((5, 9), (7, 7), (11, 6)):
        q, k = torch.randn(2, 4, seq_q, 16).half(), torch.randn(2, 2, seq_k, 16).half()
        assert torch.equal(compiled(q, k), layer(q, k))


def test_a_kernel_can_be_named_inside_torch_compile() -> None:
    name = warploom.explain(warploom.plan_attention(*FIXED)).kernel
    compiled = torch.compile(
        lambda q: warploom.attention(q, K, V, spec=name), fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(Q), warploom.attention(Q, K, V))


@pytest.mark.parametrize("packed", [False, True])
def test_torch_finds_no_fault_with_the_operators(packed: bool) -> None:
    given = ONE if packed else FIXED
    lengths = tuple(PACKED.values()) if packed else (None,) * 4
    function = ("bottom_right", 3, None, 2.0, None, *lengths)
    leaves = tuple(tensor.detach().clone().requires_grad_() for tensor in given)
    for operands in (given, leaves):
        arguments = (*operands, *function, None, None, None)
        torch.library.opcheck(torch.ops.warploom.attention.default, arguments)
    into = (*given, *function, None, torch.empty_like(given[0]))
    torch.library.opcheck(torch.ops.warploom.attention_into.default, into)
    out, lse = torch.ops.warploom.attention(*given, *function, None, None, None)
    for dlse in (None, torch.rand_like(lse)):
        backward = (torch.randn_like(out), dlse, *given, out, lse, *function, False, None)
        torch.library.opcheck(torch.ops.warploom.attention_backward.default, backward)


# ---- Gradients -----------------------------------------------------------------------------------


def leaves(given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.detach().clone().requires_grad_() for tensor in given)


@pytest.mark.parametrize("name", CALLS)
def test_torch_compile_differentiates_what_it_takes(name: str) -> None:
    given, keywords = CALLS[name]

    def layer(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = warploom.attention(q, k, v, return_lse=True, **keywords)
        return out * 2, lse + 1

    operands = leaves(given)
    results = layer(*operands)
    arriving = [torch.randn_like(one) for one in results]
    expected = torch.autograd.grad(results, operands, arriving)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*operands), operands, arriving)
    for one, wanted in zip(found, expected, strict=True):
        assert torch.equal(one, wanted)
        assert one.stride() == wanted.stride()


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_torch_compile_differentiates_for_one_operand_and_one_result(wanted: int) -> None:
    compiled = torch.compile(
        lambda q, k, v: warploom.attention(q, k, v, deterministic=False),
        fullgraph=True,
        backend="aot_eager",
    )
    operands = [tensor.clone().requires_grad_(at == wanted) for at, tensor in enumerate(FIXED)]
    arriving = torch.randn_like(Q)
    (found,) = torch.autograd.grad(compiled(*operands), operands[wanted], arriving)
    (same,) = torch.autograd.grad(warploom.attention(*operands), operands[wanted], arriving)
    assert torch.equal(found, same)


def test_torch_compile_differentiates_lengths_that_vary() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, k, causal="bottom_right")

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq_q, seq_k in ((5, 9), (7, 7), (11, 6)):
        q, k = leaves((torch.randn(2, 4, seq_q, 16).half(), torch.randn(2, 2, seq_k, 16).half()))
        arriving = torch.randn_like(q)
        found = torch.autograd.grad(compiled(q, k), (q, k), arriving)
        expected = torch.autograd.grad(layer(q, k), (q, k), arriving)
        assert all(map(torch.equal, found, expected))


def test_torch_compile_recomputes_a_checkpoint() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q, k, v, causal="bottom_right") * 2

    def model(*given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(layer, *given, use_reentrant=False)
        return result.sin()

    operands = leaves(FIXED)
    arriving = torch.randn_like(Q)
    expected = torch.autograd.grad(model(*operands), operands, arriving)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(*operands), operands, arriving)
    for one, wanted in zip(found, expected, strict=True):
        assert torch.allclose(one, wanted, rtol=2e-2, atol=2e-2)


def test_a_selective_checkpoint_can_keep_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionCall] = []
    right = AttentionCall.compute

    def counted(call: AttentionCall, *given: Any) -> None:
        calls.append(call)
        right(call, *given)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:  # noqa: ANN401
        kept = operator is torch.ops.warploom.attention.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return warploom.attention(q.sin(), k, v) * 2

    operands = leaves(FIXED)
    wanted = torch.autograd.grad(layer(*operands).sum(), operands)
    monkeypatch.setattr(AttentionCall, "compute", counted)
    for kept, expected in ((False, 2), (True, 1)):
        calls.clear()
        contexts = partial(create_selective_checkpoint_contexts, policy)
        keywords: Any = {"context_fn": contexts} if kept else {}
        out = checkpoint(layer, *operands, use_reentrant=False, **keywords)
        found = torch.autograd.grad(out.sum(), operands)
        assert len(calls) == expected
        assert all(map(torch.equal, found, wanted))


def test_fake_tensors_have_shapes_strides_and_gradients() -> None:
    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(tensor).requires_grad_() for tensor in FIXED)
        out, lse = warploom.attention(q, k, v, return_lse=True)
        found = torch.autograd.grad((out.sum() + lse.sum()), (q, k, v))
    assert (out.shape, out.stride(), lse.shape) == (Q.shape, Q.stride(), Q.shape[:-1])
    assert [one.shape for one in found] == [Q.shape, K.shape, V.shape]


def test_torch_compile_lowers_what_autocast_lowers() -> None:
    given = [tensor.detach().float().requires_grad_() for tensor in FIXED]
    compiled = torch.compile(warploom.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(*given)
        assert out.dtype == torch.bfloat16
    found = torch.autograd.grad(out.sum(), given)
    assert [one.dtype for one in found] == [torch.float32] * 3


def test_the_operator_is_differentiable_once_too() -> None:
    q, k, v = leaves(FIXED)
    out, _ = torch.ops.warploom.attention(q, k, v, *[None] * 12)
    (found,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(ProblemError, match="differentiable once"):
        found.sum().backward()


def test_out_takes_no_part_in_gradients_of_compiled_functions() -> None:
    (q,) = leaves((Q,))
    call = AttentionCall(q, K, V, out=torch.empty_like(Q))
    with pytest.raises(ProblemError, match="leave out=None"):
        operator_call.attention(call)
