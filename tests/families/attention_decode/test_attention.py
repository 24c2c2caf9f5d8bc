"""Few query rows over many keys are decoded by `warploom.attention` itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_calls import random

import warploom
from warploom.errors import ProblemError
from warploom.generator.families.attention_decode import DecodeOperation, DecodeProblem
from warploom.generator.launches import NO_GPU
from warploom.runtime.families.attention_forward.call import FEW, OWN, SHARED, AttentionCall
from warploom.runtime.plan import Plan

LONG = SHARED[1]  # keys that a row is decoded over, where heads share them
Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def operands(seq_q: int = 1, seq_k: int = LONG, *, heads: int = 8, dim: int = 64) -> Given:
    q = random(2, seq_q, heads, dim).transpose(1, 2)
    k, v = (random(2, 2, seq_k, dim, seed=seed) for seed in (1, 2))
    return q, k, v


def kernel(given: Given, **keywords: Any) -> str:
    return warploom.explain(*given, **keywords).kernel


@pytest.mark.parametrize(
    ("given", "keywords", "decodes"),
    [
        (operands(), {}, True),
        (operands(), {"causal": "bottom_right", "softcap": 2.0}, True),
        (operands(FEW // 2, SHARED[0] * FEW), {"window": (9, 3)}, True),
        (operands(FEW // 2 + 1, 4 * SHARED[0] * FEW), {}, False),
        (operands(8, 16 * SHARED[0] - 1), {}, False),
        (operands(seq_k=LONG - 1), {}, False),
        (operands(heads=2, seq_k=OWN[1]), {}, True),
        (operands(heads=2, seq_k=OWN[1] - 1), {}, False),
        (operands(dim=96), {}, True),
        (operands(dim=72), {}, False),
        (operands(2), {"causal": "top_left"}, False),
    ],
)
def test_which_calls_are_decoded(given: Given, keywords: dict[str, Any], decodes: bool) -> None:
    wanted = "attention_decode" if decodes else "attention_forward"
    assert kernel(given, **keywords).startswith(f"{wanted}_sm90a")


def test_packed_sequences_are_not_decoded() -> None:
    q, k, v = (one[0].transpose(0, 1) for one in operands())
    told = kernel(
        (q, k, v),
        cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32),
        cu_seqlens_k=torch.tensor([0, LONG], dtype=torch.int32),
        max_seqlen_q=1,
        max_seqlen_k=LONG,
    )
    assert told.startswith("attention_forward")


@pytest.mark.parametrize(
    "keywords",
    [{}, {"causal": "bottom_right"}, {"window": (100, 0)}, {"softcap": 2.0, "scale": 0.3}],
    ids=str,
)
@pytest.mark.parametrize("rows", [1, 3])
def test_both_functions_give_the_same(rows: int, keywords: dict[str, Any]) -> None:
    q, k, v = operands(rows)
    out, lse = warploom.attention(q, k, v, return_lse=True, **keywords)
    given = {**keywords, "causal": "causal" in keywords}
    same, same_lse = warploom.attention_decode(q, k, v, return_lse=True, **given)
    torch.testing.assert_close(same, out, rtol=2**-7, atol=1e-5)
    torch.testing.assert_close(same_lse, lse, rtol=1e-5, atol=1e-5)
    assert same.shape == out.shape


def test_a_decoded_call_is_told_what_a_call_of_decoding_is() -> None:
    """The same addresses by the same names: what launches it is attention's own plan."""
    q, k, v = operands(3)
    call = AttentionCall(q, k, v, "bottom_right", (100, None), 2.0)
    found = call.draft(NO_GPU)
    assert found.choice.spec.operation == DecodeOperation("bf16", 64, mask="window", softcap=True)
    assert isinstance(found.problem, DecodeProblem)
    assert (found.problem.left, found.problem.right) == (100, 0)
    assert found.problem.strides_q == (3 * 8 * 64, 64, 8 * 64)
    assert found.problem.strides_k == (2 * LONG * 64, LONG * 64, 64)
    assert (found.tensors, found.scalars) == (("q", "k", "v", "o", "lse"), ("scale", "softcap"))


def test_a_decoded_call_has_its_gradients() -> None:
    q, k, v = (one.clone().requires_grad_() for one in operands(3))
    out, lse = warploom.attention(q, k, v, causal="bottom_right", return_lse=True)
    found = torch.autograd.grad((out.float().sum() + lse.sum()), (q, k, v))
    wide = [one.detach().double().requires_grad_() for one in (q, k, v)]
    repeated = [one.repeat_interleave(4, 1) for one in wide[1:]]
    s = wide[0] @ repeated[0].mT * 64**-0.5
    s = s.masked_fill(torch.ones(3, LONG).tril(LONG - 3) == 0, -torch.inf)
    loss = (s.softmax(-1) @ repeated[1]).sum() + s.logsumexp(-1).sum()
    for one, wanted in zip(found, torch.autograd.grad(loss, wide), strict=True):
        torch.testing.assert_close(one.double(), wanted, rtol=0.05, atol=0.02)
    told = warploom.explain(*operands(3), causal="bottom_right", gpu="NVIDIA H200")
    assert told.gradients is not None
    assert told.gradients.spec.name.startswith("attention_backward")


def test_a_kernel_of_either_family_can_be_named() -> None:
    given = operands()
    decode, forward = kernel(given), kernel(operands(seq_k=LONG - 1))
    for name in (decode, forward):
        assert kernel(given, spec=name) == name
    assert kernel(operands(seq_k=LONG - 1), spec=decode) == decode
    with pytest.raises(ProblemError, match="computes another operation"):
        kernel(operands(2), causal="top_left", spec=decode)


def test_a_decoded_call_is_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept of attention's calls hands a decode kernel what it names, in its order."""
    launched: list[Plan[Any, Any]] = []
    run_at: Callable[..., None] = Plan.run_at

    def noted(self: Plan[Any, Any], *given: Any) -> None:
        launched.append(self)
        run_at(self, *given)

    monkeypatch.setattr(Plan, "run_at", noted)
    q, k, v = operands(3)
    keywords: dict[str, Any] = {"causal": "bottom_right", "softcap": 2.0, "return_lse": True}
    first, *more = [warploom.attention(q, k, v, **keywords) for _ in range(3)]
    assert [one.choice.spec.operation.family for one in launched[-2:]] == ["attention_decode"] * 2
    for one in more:
        assert all(torch.equal(found, wanted) for found, wanted in zip(one, first, strict=True))
