"""transformers' experts in fp8 with block scales, by Warploom's kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import frozen_expert_layers as exact
import pytest
import torch
from transformers.integrations import finegrained_fp8

import warploom
from warploom.errors import ProblemError
from warploom.integrations import fp8_experts
from warploom.integrations.frozen_experts import Gate

HIDDEN, INNER, EXPERTS, TOKENS, CHOICES = 320, 192, 5, 23, 3  # no multiples of 128


def layer(**change: Any) -> finegrained_fp8.FP8Experts:
    """A layer with random weights, whose scales are far from each other."""
    config = SimpleNamespace(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        moe_intermediate_size=INNER,
        hidden_act="silu",
        _experts_implementation="warploom",
    )
    made = finegrained_fp8.FP8Experts(config, **{"block_size": (128, 128), **change})
    torch.manual_seed(0)
    for name, one in made.named_parameters():
        drawn = torch.rand(one.shape) + 0.25 if "scale" in name else torch.randn(one.shape)
        one.data.copy_((drawn / 32 if "scale" in name else drawn).to(one.dtype))
    return made


def wide(made: finegrained_fp8.FP8Experts, name: str) -> torch.Tensor:
    """A weight times its scales, in float64."""
    weight = getattr(made, name).double()
    scale = getattr(made, f"{name}_scale_inv").double()
    spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)
    return weight * spread[:, : weight.shape[1], : weight.shape[2]]


def tokens() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    hidden = torch.randn(TOKENS, HIDDEN).bfloat16()
    chosen, ids = torch.rand(TOKENS, EXPERTS).topk(CHOICES)
    return hidden, ids, chosen.bfloat16()


@torch.no_grad()
@pytest.mark.parametrize(
    "gate",
    [{}, {"swiglu_alpha": 0.5, "swiglu_limit": 0.25}, {"swiglu_limit": 0.25, "limit": 0.25}],
    ids=str,
)
def test_experts_are_those_of_dequantized_weights(
    gate: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that was left to transformers would be right, and show nothing. Ids past the last
    expert are of other ranks.
    """
    monkeypatch.setattr(finegrained_fp8, "fp8_grouped_mm_experts_forward", None)
    made, (hidden, ids, chosen) = layer(), tokens()
    for name, value in gate.items():
        setattr(made, name, value)
    ids[3, 1] = ids[7, 0] = EXPERTS
    found = fp8_experts.forward(made, hidden, ids, chosen)
    gate_up, down = wide(made, "gate_up_proj"), wide(made, "down_proj")
    exact = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for token, choice in torch.cartesian_prod(torch.arange(TOKENS), torch.arange(CHOICES)).tolist():
        expert = int(ids[token, choice])
        if expert < EXPERTS:
            inner = made._apply_gate(gate_up[expert] @ hidden[token].double())
            exact[token] += chosen[token, choice].double() * (down[expert] @ inner)
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 2**-4 * exact.abs().max()  # tokens in e4m3


def test_transformers_finds_them_by_name() -> None:
    warploom.register_transformers()
    functions = finegrained_fp8.ALL_FP8_EXPERTS_FUNCTIONS
    assert functions.get_interface("warploom", None) is fp8_experts.forward


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"block_size": None}, "scales are of None"),
        ({"block_size": (128, 64)}, "not 128x128"),
        ({"activation_scheme": "static"}, "static, not 128x128 dynamic"),
        ({"expert_dtype": "fp4"}, "torch.int8"),
    ],
    ids=str,
)
def test_layers_without_kernels_say_why(change: dict[str, Any], told: str) -> None:
    assert told in str(fp8_experts.unfit(layer(**change)))


@pytest.mark.parametrize("gate", [{}, {"swiglu_alpha": 0.5, "swiglu_limit": 0.25}], ids=str)
def test_tokens_get_gradients_through_frozen_experts(
    gate: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids past the last expert are of other ranks, and rows of theirs have none."""
    monkeypatch.setattr(finegrained_fp8, "fp8_grouped_mm_experts_forward", None)
    made, (hidden, ids, chosen) = layer().requires_grad_(False), tokens()
    for name, value in gate.items():
        setattr(made, name, value)
    ids[3, 1] = ids[7, 0] = EXPERTS
    given = {"hidden": hidden.requires_grad_(), "weights": chosen.float().requires_grad_()}
    out = fp8_experts.forward(made, hidden, ids, given["weights"])
    dout = torch.randn(out.shape).bfloat16()
    found = [out, *torch.autograd.grad(out, [*given.values()], dout)]
    named = Gate("swiglu_oai", "halves", *gate.values()) if gate else Gate("silu")
    weights = {part: wide(made, f"{part}_proj") for part in ("gate_up", "down")}
    told = exact.Layer(**weights, gate=named, fused=True, eight=True)
    shares = exact.shares(told, {**given, "ids": ids}, found, dout)
    assert max(shares.values()) <= 1


def test_where_weights_train_transformers_computes() -> None:
    made, (hidden, _, _) = layer(), tokens()
    told = "a weight in fp8, or its scales, require grad, and Warploom's are frozen"
    assert fp8_experts.refusal(made, hidden) == told
    made.requires_grad_(False)
    assert fp8_experts.refusal(made, hidden.requires_grad_()) is None
    made.down_proj_scale_inv.requires_grad_()
    assert fp8_experts.refusal(made, hidden) == told
    with torch.no_grad():
        assert fp8_experts.refusal(made, hidden) is None
        assert fp8_experts.refusal(made, hidden.float()) == "tokens are torch.float32"


@torch.no_grad()
def test_layers_without_kernels_run_by_a_function_that_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """transformers' grouped function refuses static scales, and its loop over experts does not."""
    kind = type("Own", (finegrained_fp8.FP8Experts,), {"forward": None})
    loop = type("Loop", (), {"__wrapped__": staticmethod(lambda self, hidden, *_: hidden + 1)})
    monkeypatch.setattr(kind, "forward", loop)
    made, (hidden, ids, chosen) = layer(activation_scheme="static"), tokens()
    made.__class__ = kind
    assert torch.equal(fp8_experts.forward(made, hidden, ids, chosen), hidden + 1)


@torch.no_grad()
def test_a_weight_of_experts_that_is_nan_stays_nan_as_in_torch() -> None:
    """Only in what the expert computes of its tokens: no other sum must become NaN."""
    made, (hidden, ids, chosen) = layer(), tokens()
    made.down_proj.detach().view(torch.uint8)[2, 7, 11] = 0x7F
    found = fp8_experts.forward(made, hidden, ids, chosen)
    assert torch.equal(found.isnan().any(1), (ids == 2).any(1))
    assert found.isnan().any(0).nonzero().tolist() == [[7]]


def test_a_scale_of_experts_that_is_nan_is_named_before_a_patch_changes_anything() -> None:
    made = layer()
    made._is_expert_parallel, made.is_concatenated = False, True  # as transformers decorates it
    made.down_proj_scale_inv.detach()[2, 0, 1] = float("nan")
    with pytest.raises(ProblemError, match=r"^1: down_proj_scale_inv nan at \[2, 0, 1\]"):
        warploom.patch(torch.nn.Sequential(torch.nn.Linear(8, 8), made), attention=False)
