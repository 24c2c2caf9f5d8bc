"""Torch's fused operators as Warploom implements them: values, gradients, layouts, fallbacks.

They are registered for the CPU here; sdpa_torchs stands for what torch has there on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdpa_bounds import assert_held, differentiated, dout_of, draw
from sdpa_torchs import operator
from torch.nn.functional import scaled_dot_product_attention

import warploom

FLASH, CUDNN, EFFICIENT = "flash_attention", "cudnn_attention", "efficient_attention"
Q = draw(2, 4, 9, 16)


def through(name: str) -> Any:  # noqa: ANN401
    """An attention with the arguments of torch's function, by one of its operators."""

    def attend(*given: torch.Tensor, enable_gqa: bool = False, **keywords: Any) -> torch.Tensor:
        out: torch.Tensor = operator(name, *given, **keywords)[0]
        return out

    return attend


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.31}])
@pytest.mark.parametrize(("heads", "length", "dim"), [(4, 33, 64), (2, 40, 40), (1, 1, 128)])
def test_operators_compute_what_torchs_function_does(
    name: str,
    keywords: dict[str, Any],
    heads: int,
    length: int,
    dim: int,
    activated: list[str],
) -> None:
    q, k, v = (draw(2, n, length, dim, seed=n) for n in (4, heads, heads))
    assert_held(through(name), (q, k, v), **keywords, enable_gqa=True)
    assert not activated


def test_cudnns_causal_mask_begins_at_the_top_left(activated: list[str]) -> None:
    """Guards against FlashAttention's alignment, the only one that its operator has."""
    for lengths in ((9, 30), (30, 9)):
        q, k, v = (draw(2, 4, n, 64, seed=i) for i, n in enumerate((*lengths, lengths[1])))
        assert_held(through(CUDNN), (q, k, v), is_causal=True)
        expected = warploom.attention(q, k, v, causal="bottom_right")
        assert torch.equal(operator(FLASH, q, k, v, is_causal=True)[0], expected)
    assert not activated


LAYOUTS = {
    "as it comes": lambda: tuple(torch.randn(2, 4, 9, 16).bfloat16() for _ in range(3)),
    "rows outside": lambda: tuple(draw(2, 4, 9, 16, seed=i) for i in range(3)),
    "packed": lambda: torch.randn(2, 9, 3, 4, 16).bfloat16().permute(2, 0, 3, 1, 4).unbind(0),
    "one head": lambda: tuple(draw(2, 1, 9, 16, seed=i) for i in range(3)),
}


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_results_lie_as_a_compiler_was_told(name: str, layout: str, activated: list[str]) -> None:
    """Guards against results that torch.compile takes for others: it believes the fake ones."""

    def told(given: tuple[torch.Tensor, ...]) -> list[tuple[Any, ...]]:
        leaves = [tensor.requires_grad_() for tensor in given]
        results = operator(name, *leaves)
        arriving = torch.zeros_like(results[0])
        gradients = torch.autograd.grad(results[0], leaves, arriving)
        looks = [(*one.shape, one.stride(), one.dtype) for one in (*results[:2], *gradients)]
        small = [(tuple(one.shape), one.dtype) for one in results[6:8]]
        return [*looks, *small, results[4:6], tuple(one is None for one in results)]

    real: tuple[torch.Tensor, ...] = LAYOUTS[layout]()
    assert told(real) == told(
        tuple(torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in real)
    )
    assert not activated


REFUSED: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any]]] = {
    "dropout": ((Q, Q, Q), {"dropout_p": 1e-9}),
    "fp32": ((Q.float(),) * 3, {}),
    "negative scale": ((Q, Q, Q), {"scale": -1.0}),
    "expanded": ((Q, Q[:1].expand_as(Q), Q), {}),
    "8 bytes off": ((torch.randn(2 * 4 * 9 * 16 + 4).bfloat16()[4:].view(2, 4, 9, 16), Q, Q), {}),
    "head dimension 12": ((Q[..., :12],) * 3, {}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_kernels_do_not_compute_is_torchs_kernels(case: str, activated: list[str]) -> None:
    """Guards against copies, errors and wrong results where torch has a kernel."""
    given, keywords = REFUSED[case]
    copies = warploom.counters.copies
    (out,), found = differentiated(through(FLASH), given, **keywords)
    assert activated == [FLASH, f"{FLASH}_backward"]
    assert warploom.counters.copies == copies
    (wanted,), expected = differentiated(scaled_dot_product_attention, given, **keywords)
    for got, right in zip((out, *found), (wanted, *expected), strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", [FLASH, CUDNN])
@pytest.mark.parametrize("first", ["torch", "warploom"])
def test_either_backward_takes_what_either_forward_returned(
    name: str, first: str, ran: list[str]
) -> None:
    """Guards against gradients that are wrong where Warploom comes or goes between the passes."""

    def attend(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
        out: torch.Tensor = operator(name, *given, **keywords)[0]
        return out

    given = draw(2, 4, 9, 16), draw(2, 4, 9, 16, seed=1), draw(2, 4, 9, 16, seed=2)
    with warploom.sdpa.activate():
        leaves = [tensor.requires_grad_() for tensor in given]
        out = attend(*leaves, is_causal=True)
        expected = torch.autograd.grad(out, leaves, dout_of(out), retain_graph=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warploom.integrations.sdpa_override.attend", lambda *_: None)
            if first == "torch":
                out = attend(*leaves, is_causal=True)
            else:
                patch.setattr("warploom.integrations.sdpa_override.differentiate", lambda *_: None)
            found = torch.autograd.grad(out, leaves, dout_of(out))
    assert len(ran) == 1
    for got, right in zip(found, expected, strict=True):
        torch.testing.assert_close(got, right, atol=2e-2, rtol=2e-2)


def test_what_inference_planned_serves_training(activated: list[str]) -> None:
    """Guards against kept tensors that autograd refuses, as those of inference_mode are."""
    q = draw(1, 3, 11, 24)
    with torch.inference_mode():
        expected = operator(FLASH, q, q, q)[0]
    leaf = q.clone().requires_grad_()
    results = operator(FLASH, leaf, q, q)
    results[0].sum().backward()
    assert torch.equal(results[0], expected)
    assert not any(one.is_inference() for one in results if isinstance(one, torch.Tensor))
    assert not activated


def test_a_warm_call_plans_nothing(activated: list[str]) -> None:
    differentiated(through(FLASH), (Q, Q, Q))
    plans = warploom.counters.plans
    differentiated(through(FLASH), (Q, Q, Q))
    assert warploom.counters.plans == plans
    assert not activated


# ---- Masks ---------------------------------------------------------------------------------------

RANDOM = torch.Generator().manual_seed(2)
MASKS = {
    "every score": torch.randn(2, 4, 33, 40, generator=RANDOM).bfloat16(),
    "fp32": torch.randn(2, 4, 33, 40, generator=RANDOM),
    "heads": torch.randn(1, 4, 33, 40, generator=RANDOM).bfloat16(),
    "keys": torch.randn(2, 1, 1, 40, generator=RANDOM).bfloat16(),
    "rows": torch.randn(33, 1, generator=RANDOM),
}


def with_a_mask(name: str) -> Any:  # noqa: ANN401
    """An attention with a mask, by an operator; cuDNN's gets it as it is, the other expanded."""

    def attend(
        *given: torch.Tensor, attn_mask: torch.Tensor | None = None, **keywords: Any
    ) -> torch.Tensor:
        q, k, v, *more = given
        mask = more[0] if more else attn_mask
        if name == EFFICIENT and mask is not None:
            mask = mask.expand(*q.shape[:3], k.shape[2])
        out: torch.Tensor = operator(name, q, k, v, attn_bias=mask, **keywords)[0]
        return out

    return attend


def drawn() -> list[torch.Tensor]:
    return [draw(2, 4, length, 32, seed=i) for i, length in enumerate((33, 40, 40))]


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_masks_are_added_to_scores(
    name: str, mask: str, scale: float | None, activated: list[str]
) -> None:
    """Of a mask that requires grad torch picks the second, which has the gradient of all of it."""
    given = tuple(drawn())
    assert_held(with_a_mask(name), given, attn_mask=MASKS[mask], scale=scale)
    if name == EFFICIENT:
        assert_held(with_a_mask(name), (*given, MASKS[mask]), scale=scale)
    assert not activated


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("mask", ["every score", "fp32"])
def test_results_with_a_mask_lie_as_a_compiler_was_told(
    name: str, wanted: bool, mask: str, activated: list[str]
) -> None:
    def told(given: list[torch.Tensor]) -> list[object]:
        leaves = [tensor.requires_grad_() for tensor in given[: 4 - (name == CUDNN)]]
        with torch.set_grad_enabled(wanted):
            results = operator(name, *given[:3], attn_bias=given[3])
        found = list(results[:2])
        if wanted:
            found += torch.autograd.grad(results[0], leaves, torch.zeros_like(results[0]))
        return [(*one.shape, one.stride(), one.dtype) for one in found]

    real = [*drawn(), MASKS[mask].clone()]
    meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in real]
    assert told(real) == told(meta)
    assert not activated


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize("rows", [32, 33])
@pytest.mark.parametrize("first", ["torch", "warploom"])
def test_either_backward_takes_a_mask_that_either_forward_had(
    name: str, rows: int, first: str, ran: list[str]
) -> None:
    """Guards against a log-sum-exp with other rows past the last than torch's kernel reads."""
    q, k, v = drawn()
    leaves, mask = [q[:, :, :rows].requires_grad_(), k, v], MASKS["heads"][:, :, :rows]
    run = with_a_mask(name)
    with warploom.sdpa.activate():
        out = run(*leaves, mask)
        (expected,) = torch.autograd.grad(out, leaves[:1], dout_of(out), retain_graph=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("warploom.integrations.sdpa_biased.attend", lambda *_: None)
            if first == "torch":
                out = run(*leaves, mask)
            else:
                patch.setattr("warploom.integrations.sdpa_biased.differentiate", lambda *_, **__: 0)
            (found,) = torch.autograd.grad(out, leaves[:1], dout_of(out))
    assert len(ran) == 1
    torch.testing.assert_close(found, expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", [CUDNN, EFFICIENT])
@pytest.mark.parametrize(
    "keywords",
    [
        {"is_causal": True},
        {"attn_bias": MASKS["every score"][0]},
        {"attn_bias": MASKS["fp32"]},
        {"dropout_p": 1e-9},
        {"scale": -1.0},
    ],
    ids=["causal", "three dimensions", "fp32", "dropout", "scale"],
)
def test_masks_that_torch_takes_otherwise_are_its_own(
    name: str,
    keywords: dict[str, Any],
    activated: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And no memory is taken for what Warploom would write."""
    monkeypatch.setattr("warploom.integrations.sdpa_biased.room_of_ds", lambda *_: 1 // 0)
    q, k, v = drawn()
    if keywords.get("attn_bias", q).dtype == torch.float32:
        q, k, v = q.float(), k.float(), v.float()
    q.requires_grad_()
    given = {"attn_bias": MASKS["every score"]} | keywords
    given["attn_bias"] = given["attn_bias"].clone().requires_grad_(name == EFFICIENT)
    out = operator(name, q, k, v, **given)[0]
    out.sum().backward()
    assert activated == [name, f"{name}_backward"]
