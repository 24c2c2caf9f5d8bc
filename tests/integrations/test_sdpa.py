"""`warploom.sdpa` is torch's function: its arguments, its results, its errors, whoever computes.

Kernels run on a GPU only; here their reference does, where a test lets it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdpa_bounds import assert_held, differentiated, draw
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.integrations import sdpa_rules

HALF, BF16 = torch.float16, torch.bfloat16
RANDOM = torch.Generator().manual_seed(7)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Warploom compute on the CPU what it would on a GPU."""
    monkeypatch.setattr(sdpa_rules, "elsewhere", lambda tensor: None)


def by_torch(*given: torch.Tensor, **keywords: Any) -> str:
    """Why torch computes a call; empty where Warploom does."""
    found = warploom.explain(warploom.sdpa, *given, **keywords)
    return found.reason if found.torch else ""


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.31}])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "length", "key_length", "dim", "dtype"),
    [
        (4, 4, 33, 33, 64, BF16),
        (4, 2, 17, 40, 40, HALF),
        (6, 1, 40, 17, 128, BF16),
        (1, 1, 1, 1, 8, HALF),
    ],
)
def test_results_and_gradients_are_torchs(
    heads: int,
    kv_heads: int,
    length: int,
    key_length: int,
    dim: int,
    dtype: torch.dtype,
    keywords: dict[str, Any],
) -> None:
    """Guards against an alignment at the bottom right, and heads that share the wrong keys."""
    q = draw(2, heads, length, dim, dtype=dtype)
    k, v = (draw(2, kv_heads, key_length, dim, dtype=dtype, seed=i) for i in (1, 2))
    keywords = {**keywords, "enable_gqa": heads != kv_heads}
    assert not by_torch(q, k, v, **keywords)
    assert_held(warploom.sdpa, (q, k, v), **keywords)


MASKS: dict[str, torch.Tensor] = {
    "of every score": torch.rand(2, 4, 17, 40, generator=RANDOM) > 0.3,
    "of keys": torch.rand(2, 1, 1, 40, generator=RANDOM) > 0.3,
    "of rows and keys": torch.rand(17, 40, generator=RANDOM) > 0.3,
    "of whole rows": torch.rand(17, 1, generator=RANDOM) > 0.3,
    "of heads, transposed": (torch.rand(4, 40, 17, generator=RANDOM) > 0.3).mT,
    "added": torch.randn(2, 4, 17, 40, generator=RANDOM).bfloat16(),
    "added in fp32 by heads": torch.randn(1, 4, 17, 40, generator=RANDOM),
    "added by keys": torch.randn(2, 1, 1, 40, generator=RANDOM).bfloat16(),
    "added by rows and keys": torch.randn(17, 40, generator=RANDOM),
    "added, as a number": torch.full((), 3.0),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", MASKS)
def test_masks_and_their_gradients_are_torchs(name: str) -> None:
    """Guards against a mask that hides what it shows, or is broadcast along another dimension."""
    q, mask = draw(2, 4, 17, 32), MASKS[name]
    k, v = (draw(2, 2, 40, 32, seed=i) for i in (1, 2))
    keywords: dict[str, Any] = {"enable_gqa": True, "scale": 0.3}
    assert not by_torch(q, k, v, mask, **keywords)
    if mask.dtype == torch.bool:
        assert_held(warploom.sdpa, (q, k, v), attn_mask=mask, **keywords)
    else:
        assert_held(warploom.sdpa, (q, k, v, mask), **keywords)


@pytest.mark.usefixtures("here")
def test_keys_that_minus_infinity_is_added_to_do_not_count() -> None:
    """Guards against NaN in rows that attend to nothing, in results and gradients alike."""
    q = draw(1, 2, 9, 16)
    mask = torch.zeros(9, 9).masked_fill(TRIANGLE.logical_not(), -torch.inf)
    mask[3] = -torch.inf
    (out,), gradients = differentiated(warploom.sdpa, (q, q, q), attn_mask=mask)
    (wanted,), expected = differentiated(scaled_dot_product_attention, (q, q, q), attn_mask=mask)
    assert (out[:, :, 3] == 0).all()
    for got, right in zip((out, *gradients), (wanted, *expected), strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("lead", [(), (3, 2)])
@pytest.mark.parametrize("own", [(), (1,), "all"])
def test_a_mask_of_any_number_of_batches_is_one(lead: tuple[int, ...], own: Any) -> None:  # noqa: ANN401
    q = torch.randn(*lead, 4, 9, 16).half()
    shape = (*(lead if own == "all" else own * len(lead)), 4, 9, 9)
    mask = torch.rand(shape, generator=RANDOM) > 0.3
    assert not by_torch(q, q, q, mask)
    expected = scaled_dot_product_attention(*[q.double()] * 3, mask)
    torch.testing.assert_close(warploom.sdpa(q, q, q, mask).double(), expected, atol=2e-3, rtol=0)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("lead", [(), (3, 2)])
def test_any_number_of_batches_is_one(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, 4, 9, 16).half() for _ in range(3))
    assert not by_torch(q, k, v, is_causal=True)
    out = warploom.sdpa(q, k, v, is_causal=True)
    assert out.shape == q.shape
    wide = (tensor.double() for tensor in (q, k, v))
    expected = scaled_dot_product_attention(*wide, is_causal=True)
    torch.testing.assert_close(out.double(), expected, atol=2e-3, rtol=2e-3)


Q, K = draw(2, 4, 9, 16), draw(2, 2, 7, 16)
TRIANGLE = torch.ones(9, 9).tril().bool()
TORCHS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = {
    "mask beside is_causal": ((Q, Q, Q), {"attn_mask": TRIANGLE, "is_causal": True}, "exclude"),
    "mask of some batches": (
        (draw(6, 4, 9, 16).unflatten(0, (2, 3)),) * 3,
        {"attn_mask": TRIANGLE.expand(2, 1, 1, 9, 9)},
        "some dimensions of batches [2, 3]",
    ),
    "dropout of everything": ((Q, Q, Q), {"dropout_p": 1.0}, "dropout_p is 1.0"),
    "negative scale": ((Q, Q, Q), {"scale": -1.0}, "positive scale"),
    "fp32": ((Q.float(),) * 3, {}, "torch.float32"),
    "head dimension 12": ((Q[..., :12],) * 3, {}, "12, 12 and 12"),
    "a larger one of value": ((Q, Q, draw(2, 4, 9, 24)), {}, "16, 16 and 24"),
    "head dimension 264": ((draw(1, 1, 5, 264),) * 3, {}, "264"),
    "broadcast batch": ((Q, Q[:1], Q[:1]), {}, "differ in batches"),
    "expanded batch": ((Q, Q[:1].expand_as(Q), Q), {}, "key, of strides"),
    "broadcast head": ((Q, Q[:, :1], Q[:, :1]), {}, "4 heads of query"),
    "two dimensions": ((Q[0, 0],) * 3, {}, "2 dimensions"),
    "columns first": ((Q.mT.contiguous().mT,) * 3, {}, "query, of strides"),
    "no keys": ((Q, Q[:, :, :0], Q[:, :, :0]), {}, "nothing"),
}
OURS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = {
    "causal": ((Q, Q, Q), {"is_causal": True}, ""),
    "a mask": ((Q, Q, Q), {"attn_mask": TRIANGLE}, ""),
    "a smaller one of value": ((Q, Q, Q[..., :8]), {"is_causal": True}, ""),
    "a smaller one of value, masked": ((Q, Q, Q[..., 8:]), {"attn_mask": TRIANGLE}, ""),
    "a mask that is added": ((Q, Q, Q, torch.randn(4, 9, 9, generator=RANDOM)), {}, ""),
}


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", TORCHS)
def test_what_kernels_do_not_compute_is_torchs_own_call(name: str) -> None:
    """Guards against a call that would be refused, copied or computed wrongly by Warploom."""
    given, keywords, reason = TORCHS[name]
    assert reason in by_torch(*given, **keywords)
    copies = warploom.counters.copies
    torch.manual_seed(5)
    found = differentiated(warploom.sdpa, given, **keywords)
    torch.manual_seed(5)
    expected = differentiated(scaled_dot_product_attention, given, **keywords)
    for got, wanted in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        assert torch.equal(got, wanted)
        assert got.stride() == wanted.stride()
    assert warploom.counters.copies == copies


@pytest.mark.usefixtures("here")
def test_errors_are_torchs() -> None:
    for given in ((Q, K, K), (Q, Q, K), (Q, Q.float(), Q)):
        with pytest.raises(RuntimeError) as theirs:
            scaled_dot_product_attention(*given)
        with pytest.raises(RuntimeError) as ours:
            warploom.sdpa(*given)
        assert str(ours.value) == str(theirs.value)


def test_the_cpu_is_torchs_and_a_gpu_that_is_named_is_not() -> None:
    found = warploom.explain(warploom.sdpa, Q, K, K, enable_gqa=True)
    assert found.torch
    assert str(found) == "runs     torch's own kernel\nbecause  query is on cpu"
    there = warploom.explain(warploom.sdpa, Q, K, K, enable_gqa=True, gpu="NVIDIA H200")
    assert not there.torch
    assert there.kernel.startswith("attention_forward_")
    assert there.backward
    masked = warploom.explain(warploom.sdpa, Q, Q, Q, TRIANGLE, gpu="h200")
    assert "_masked_" in masked.kernel
    dropped = warploom.explain(warploom.sdpa, Q, Q, Q, dropout_p=1.0, gpu="h200")
    assert dropped.torch
    assert dropped.gpu == "NVIDIA H200"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", [*OURS, *TORCHS])
def test_torch_compile_takes_either_without_a_graph_break(name: str) -> None:
    given, keywords, _ = (OURS | TORCHS)[name]

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        return warploom.sdpa(*tensors, **keywords) + 1

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, expected = (differentiated(function, given) for function in (compiled, layer))
    for got, wanted in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
        torch.testing.assert_close(got, wanted, atol=2e-2, rtol=2e-2, equal_nan=True)


@pytest.mark.usefixtures("here")
def test_one_compiled_graph_serves_lengths_that_vary() -> None:
    def layer(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return warploom.sdpa(q, k, k, is_causal=True, enable_gqa=True)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for length, key_length in ((5, 9), (7, 7), (11, 6)):
        q, k = draw(2, 4, length, 16), draw(2, 2, key_length, 16)
        assert torch.equal(compiled(q, k), layer(q, k))


@pytest.mark.usefixtures("here")
def test_autocast_converts_as_torchs_does() -> None:
    q = Q.float().requires_grad_()
    with torch.autocast("cpu", dtype=BF16):
        assert not by_torch(q, q, q)
        out = warploom.sdpa(q, q, q)
        masked = warploom.sdpa(q, q, q, added := torch.randn(9, 9))
    assert out.dtype == BF16
    assert torch.equal(out, warploom.attention(Q, Q, Q))
    assert torch.equal(masked, warploom.attention(Q, Q, Q, bias=added.to(BF16)))
    out.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.usefixtures("here")
def test_transforms_of_torch_are_torchs() -> None:
    """Guards against vmap, torch.func and tangents, which Warploom's kernels refuse."""
    stacked = torch.stack([Q, 2 * Q])
    found = torch.vmap(warploom.sdpa)(stacked, stacked, stacked)
    expected = torch.vmap(scaled_dot_product_attention)(stacked, stacked, stacked)
    assert torch.equal(found, expected)
    gradient = torch.func.grad(lambda q: warploom.sdpa(q, Q, Q).sum())
    wanted = torch.func.grad(lambda q: scaled_dot_product_attention(q, Q, Q).sum())
    assert torch.equal(gradient(Q), wanted(Q))


@pytest.mark.usefixtures("here")
def test_a_checkpoint_computes_the_same() -> None:
    def layer(*given: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(warploom.sdpa, *given, use_reentrant=False)
        return found

    _, found = differentiated(layer, (Q, Q, Q))
    _, expected = differentiated(warploom.sdpa, (Q, Q, Q))
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got, wanted)


def test_negated_operands_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels would read copies of them; torch's own resolve them."""
    monkeypatch.setattr(sdpa_rules, "elsewhere", lambda tensor: None)
    query = torch.randn(1, 2, 8, 64).bfloat16()
    negated = torch._neg_view(query)
    for _ in range(2):  # the plain call is remembered, and so is the other
        assert sdpa_rules.misfit(query, query, query, enable_gqa=False) is None
        reason = sdpa_rules.misfit(negated, query, query, enable_gqa=False)
        assert reason is not None
        assert "negated lazily" in reason
    torch.testing.assert_close(
        warploom.sdpa(negated, query, query),
        torch.nn.functional.scaled_dot_product_attention(-query, query, query),
    )
