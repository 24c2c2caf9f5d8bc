"""RMSNorm through two epilogues, as layers decode: launches behind each other, graphs, torch's."""

from __future__ import annotations

from typing import Any

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch
import torch.nn.functional as F

from warploom.functional import linear_add, rms_norm_linear

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
SIDE, INNER, EPS = 1024, 1536, 1e-5
Weights = tuple[Any, Any]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").bfloat16()


def weights(kind: str) -> Weights:
    """[SIDE, INNER] and [INNER, SIDE], packed or dense."""
    if kind == "packed":
        of = cases.operation()
        return tuple(arena.weight(of, n, k).packed for n, k in ((SIDE, INNER), (INNER, SIDE)))  # type: ignore[return-value]
    return drawn(SIDE, INNER), drawn(INNER, SIDE, seed=1)


def exact(weight: Any) -> torch.Tensor:  # noqa: ANN401
    return weight.double() if isinstance(weight, torch.Tensor) else weight.dequantize(torch.float64)


def layers(
    used: Weights, h: torch.Tensor, x: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The stream, its shares and the last result of layers of which each reads the one before's."""
    x, shares = x.clone(), h.new_empty(0)
    for _ in range(count):
        x, shares = linear_add(h, used[0], x, out=x)
        h = rms_norm_linear(x, used[1], shares, eps=EPS)
    return x, shares, h


@pytest.mark.parametrize("m", [1, 5, 16, 64, 300])
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_layers_behind_each_other_read_what_the_launch_before_wrote(kind: str, m: int) -> None:
    used, h, x = weights(kind), drawn(m, INNER, seed=2), drawn(m, SIDE, seed=3)
    with torch.no_grad():
        first = layers(used, h, x, 8)
        for _ in range(10):
            torch.cuda._sleep(arena.PAUSE_CYCLES)  # so that no launch waits for the host
            assert all(map(torch.equal, layers(used, h, x, 8), first))
        stream, shares, y = layers(used, h, x, 1)
    wide = x.double() + h.double() @ exact(used[0]).t()
    assert ((stream.double() - wide).norm() / wide.norm()) < 2**-7
    mean = wide.square().mean(-1)
    torch.testing.assert_close(shares.double().sum(-1), mean, rtol=2**-6, atol=0)
    normed = F.rms_norm(stream.double(), (SIDE,), None, EPS) @ exact(used[1]).t()
    assert ((y.double() - normed).norm() / normed.norm()) < 2**-7


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_a_captured_layer_replays_on_new_contents(kind: str) -> None:
    used, h, x = weights(kind), drawn(16, INNER, seed=4), drawn(16, SIDE, seed=5)
    with torch.no_grad():
        layers(used, h, x, 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = layers(used, h, x, 2)
        for seed in range(3):
            h.copy_(drawn(16, INNER, seed=10 + seed))
            x.copy_(drawn(16, SIDE, seed=20 + seed))
            graph.replay()
            assert all(map(torch.equal, found, layers(used, h, x, 2)))


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_a_compiled_layer_computes_the_same(kind: str) -> None:
    torch._dynamo.reset()
    used, h, x = weights(kind), drawn(16, INNER, seed=6), drawn(16, SIDE, seed=7)
    compiled = torch.compile(lambda h, x: layers(used, h, x, 2), fullgraph=True)
    with torch.no_grad():
        assert all(map(torch.equal, compiled(h, x), layers(used, h, x, 2)))


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_infinities_and_nan_reach_their_rows_alone(kind: str) -> None:
    used, h, x = weights(kind), drawn(19, INNER, seed=8), drawn(19, SIDE, seed=9)
    x[3, 100], x[7, 5], x[18, -1] = torch.inf, torch.nan, -torch.inf
    with torch.no_grad():
        _, shares, y = layers(used, h, x, 1)
    bad = torch.zeros(19, dtype=torch.bool, device="cuda")
    bad[[3, 7, 18]] = True
    assert torch.equal(shares.isfinite().all(-1), ~bad)
    assert torch.equal(y.isnan().all(-1), bad) and torch.equal(y.isfinite().all(-1), ~bad)


# ---- Gated layers: gate and up of a row have its factor before they are multiplied ---------------


def gated_layer(used: Weights, h: torch.Tensor, x: torch.Tensor, gate: str) -> torch.Tensor:
    """A stream to which a product was added, to the gate of its norm."""
    x, shares = linear_add(h, used[0], x)
    keywords: dict[str, Any] = {"gate": gate, "gate_layout": "interleaved"}
    return rms_norm_linear(x, used[1], shares, eps=EPS, **keywords)


@pytest.mark.parametrize("gate", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("m", [1, 5, 16, 43, 64, 300])
@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_a_gate_is_behind_the_norm_of_its_row(kind: str, m: int, gate: str) -> None:
    """Rows are of very different sizes, which the norm divides out; no other row's factor would."""
    used, h, x = weights(kind), drawn(m, INNER, seed=11), drawn(m, SIDE, seed=12)
    sizes = torch.exp2(torch.arange(m, device="cuda") % 13 - 6.0)[:, None]
    h, x = (h * sizes).bfloat16(), (x * sizes).bfloat16()
    with torch.no_grad():
        first = gated_layer(used, h, x, gate)
        for _ in range(10):
            torch.cuda._sleep(arena.PAUSE_CYCLES)  # so that no launch waits for the host
            assert torch.equal(gated_layer(used, h, x, gate), first)
        stream, _ = linear_add(h, used[0], x)
    z = F.rms_norm(stream.double(), (SIDE,), None, EPS) @ exact(used[1]).t()
    function = F.silu if gate == "silu" else lambda one: F.gelu(one, approximate="tanh")
    right = function(z[:, ::2]) * z[:, 1::2]
    assert first.shape == (m, INNER // 2)
    assert ((first.double() - right).norm(dim=-1) <= 2**-6 * right.norm(dim=-1)).all()


@pytest.mark.parametrize("kind", ["packed", "dense"])
def test_a_captured_gated_layer_replays_on_new_contents(kind: str) -> None:
    used, h, x = weights(kind), drawn(16, INNER, seed=13), drawn(16, SIDE, seed=14)
    with torch.no_grad():
        gated_layer(used, h, x, "silu")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = gated_layer(used, h, x, "silu")
        for seed in range(3):
            h.copy_(drawn(16, INNER, seed=30 + seed))
            x.copy_(drawn(16, SIDE, seed=40 + seed))
            graph.replay()
            assert torch.equal(found, gated_layer(used, h, x, "silu"))
