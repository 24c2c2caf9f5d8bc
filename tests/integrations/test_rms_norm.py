"""`warploom.functional`: linear layers around an RMS norm, without a kernel between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

import warploom
from warploom.errors import ProblemError
from warploom.generator.epilogue import GateLayout

BF16 = torch.bfloat16
HIDDEN, INNER = 256, 384


def layer() -> dict[str, torch.Tensor]:
    """The weights from an attention's output to the end of a gated feed-forward layer."""
    torch.manual_seed(0)
    shapes = {"o": (HIDDEN, 128), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
    made = {name: (torch.randn(s) / s[1] ** 0.5).to(BF16) for name, s in shapes.items()}
    return made | {"norm": (torch.rand(HIDDEN) + 0.5).to(BF16)}


def by_torch(weights: dict[str, torch.Tensor], h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """What a decoder layer of transformers computes, in float64."""
    w = {name: one.double() for name, one in weights.items()}
    x = x.double() + h.double() @ w["o"].t()
    normed = F.rms_norm(x, (HIDDEN,), w["norm"], 1e-5)
    gate, up = (normed @ w["gate_up"].t()).chunk(2, -1)
    return x + (F.silu(gate) * up) @ w["down"].t()


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("rows", [(1,), (3, 5)])
def test_a_gated_layer_has_no_kernel_for_its_norm(
    rows: tuple[int, ...], *, packed: bool, layout: GateLayout
) -> None:
    weights = layer()
    h, x = torch.randn(*rows, 128).to(BF16), torch.randn(*rows, HIDDEN).to(BF16)
    folded = warploom.functional.fold_rms_norm(weights["gate_up"], weights["norm"])
    if layout == "interleaved":
        folded = torch.stack(folded.chunk(2), 1).flatten(0, 1)
    used: dict[str, Any] = {"o": weights["o"], "gate_up": folded, "down": weights["down"]}
    if packed:
        used = {name: warploom.quantize(one, "int8") for name, one in used.items()}
    into = x.clone()
    stream, shares = warploom.functional.linear_add(h, used["o"], into, out=into)
    assert stream is into
    if packed and layout == "halves":
        both = warploom.functional.rms_norm_linear(stream, used["gate_up"], shares, eps=1e-5)
        gate, up = both.chunk(2, -1)
        hidden = F.silu(gate) * up
    else:
        hidden = warploom.functional.rms_norm_linear(
            stream, used["gate_up"], shares, eps=1e-5, gate="silu", gate_layout=layout
        )
    assert hidden.shape == (*rows, INNER)
    y, more = warploom.functional.linear_add(hidden, used["down"], stream)
    exact = by_torch(weights, h, x)
    assert (y.double() - exact).norm() <= (0.02 if packed else 0.01) * exact.norm()
    mean = y.double().square().mean(-1).reshape(-1)
    torch.testing.assert_close(more.double().sum(-1), mean, rtol=2**-8, atol=0)


def test_biases_are_added_in_their_place() -> None:
    weights = layer()
    h, x = torch.randn(4, 128).to(BF16), torch.randn(4, HIDDEN).to(BF16)
    bias, other = torch.randn(HIDDEN), torch.randn(2 * INNER)
    stream, shares = warploom.functional.linear_add(h, weights["o"], x, bias)
    y = warploom.functional.rms_norm_linear(stream, weights["gate_up"], shares, other, eps=0.5)
    exact = x.double() + h.double() @ weights["o"].double().t() + bias.double()
    normed = stream.double() * (exact.square().mean(-1, keepdim=True) + 0.5).rsqrt()
    expected = normed @ weights["gate_up"].double().t() + other.double()
    torch.testing.assert_close(y.double(), expected, rtol=2**-7, atol=2**-7)


def test_a_norm_is_rounded_once_into_a_weight() -> None:
    weight, norm = torch.randn(24, 16).to(BF16), torch.randn(16).to(BF16)
    folded = warploom.functional.fold_rms_norm(weight, norm)
    assert folded.dtype == BF16
    assert torch.equal(folded, (weight.double() * norm.double()).to(BF16))


def test_what_cannot_be_folded_or_differentiated_is_refused() -> None:
    weights = layer()
    with pytest.raises(ProblemError, match=r"must be \[K\], the weight being"):
        warploom.functional.fold_rms_norm(weights["gate_up"], torch.ones(HIDDEN + 1))
    with pytest.raises(ProblemError, match=r"multiply before warploom\.quantize"):
        warploom.functional.fold_rms_norm(warploom.quantize(weights["o"]), weights["norm"])  # type: ignore[arg-type]
    h, x = torch.randn(4, 128).to(BF16), torch.randn(4, HIDDEN).to(BF16)
    with pytest.raises(ProblemError, match="mean_square with a tensor that requires grad"):
        warploom.functional.linear_add(h.requires_grad_(), weights["o"], x)
    stream, shares = warploom.functional.linear_add(h.detach(), weights["o"], x)
    with pytest.raises(ProblemError, match=r"rms_scale of shape \[4, 15\]"):
        warploom.functional.rms_norm_linear(stream, weights["gate_up"], shares[:, 1:])
    packed = warploom.quantize(weights["gate_up"])
    for gate, layout, said in (
        ("silu", "halves", "gate_layout halves with a quantized weight: must be interleaved"),
        (None, "interleaved", "gate_layout interleaved without gate"),
        ("silu", "rows", "gate_layout 'rows': must be one of"),
        ("tanh", "interleaved", "must be one of relu"),
    ):
        keywords: dict[str, Any] = {"gate": gate, "gate_layout": layout}
        with pytest.raises(ProblemError, match=said):
            warploom.functional.rms_norm_linear(stream, packed, shares, **keywords)
    with pytest.raises(ProblemError, match=r"must be \[N, K\], as torch\.nn\.Linear has it"):
        warploom.functional.rms_norm_linear(stream, 3.0, shares)  # type: ignore[arg-type]
