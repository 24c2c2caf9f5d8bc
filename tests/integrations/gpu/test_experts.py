"""Mixtures of experts on a GPU: layers, models of transformers, graphs, K = 2880 of gpt-oss."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from moe_models import MODELS, model, tokens

import warploom
from warploom.runtime.counters import counters

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
EXTENTS = [
    (37, 3, 6, 64, 48),
    (300, 4, 8, 2880, 2880),
    (1, 8, 128, 2048, 768),
    (900, 8, 33, 512, 264),
]


def drawn(
    tokens: int, k: int, experts: int, hidden: int, inner: int
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Ids, of which some are no expert's, and hidden, weights, gate_up and down."""
    torch.manual_seed(tokens)

    def values(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, device="cuda") * shape[-1] ** -0.5
        return made.to(BF16).requires_grad_()

    ids = torch.rand(tokens, experts + 2, device="cuda").topk(k).indices
    weights = torch.rand(tokens, k, device="cuda").requires_grad_()
    given = values(tokens, hidden), weights, values(experts, 2 * inner, hidden)
    return ids, (*given, values(experts, hidden, inner))


def exact(ids: torch.Tensor, given: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """The layer in fp32, expert by expert."""
    hidden, weights, gate_up, down = (one.float() for one in given)
    out = torch.zeros_like(hidden)
    for expert in range(len(gate_up)):
        token, choice = torch.where(ids == expert)
        gate, up = (hidden[token] @ gate_up[expert].mT).chunk(2, -1)
        rows = (F.silu(gate) * up) @ down[expert].mT
        out = out.index_add(0, token, rows * weights[token, choice, None])
    return out


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool((found.float() - wanted.float()).abs().max() <= 2**-5 * wanted.abs().max())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("extents", EXTENTS, ids=str)
def test_results_and_gradients_are_those_of_a_loop(
    extents: tuple[int, ...], transposed: bool
) -> None:
    ids, given = drawn(*extents)
    wanted = exact(ids, given)
    called = [*given]
    if transposed:
        called[2:] = [one.mT.contiguous() for one in given[2:]]
    hidden, weights, gate_up, down = called

    def layer() -> torch.Tensor:
        return warploom.experts(hidden, ids, weights, gate_up, down, transposed=transposed)

    found, gradient = layer(), torch.randn_like(wanted)
    assert close(found, wanted)
    with torch.no_grad():
        assert close(layer(), wanted)
    pairs = zip(
        torch.autograd.grad(found, given, gradient.to(BF16)),
        torch.autograd.grad(wanted, given, gradient),
        strict=True,
    )
    assert all(close(one, held) for one, held in pairs)


def test_a_layer_is_five_launches() -> None:
    ids, given = drawn(64, 8, 128, 2048, 768)
    with torch.no_grad():
        warploom.experts(given[0], ids, *given[1:])
        before = counters.launches
        warploom.experts(given[0], ids, *given[1:])
    assert counters.launches - before == 5


def test_one_graph_serves_every_routing() -> None:
    ids, given = drawn(256, 4, 16, 512, 256)
    hidden = given[0].detach()
    with torch.no_grad():
        warploom.experts(hidden, ids, *given[1:])
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = warploom.experts(hidden, ids, *given[1:])
        for routing in (ids * 0, ids * 0 + 15, ids * 0 - 1, ids.flip(0)):
            ids.copy_(routing)
            hidden.normal_()
            graph.replay()
            assert close(found, exact(ids, (hidden, *given[1:])))
            assert torch.equal(found, warploom.experts(hidden, ids, *given[1:]))


def test_results_have_the_same_bits_in_every_run() -> None:
    ids, given = drawn(900, 8, 33, 512, 264)

    def both() -> list[torch.Tensor]:
        out = warploom.experts(given[0], ids, *given[1:])
        return [out, *torch.autograd.grad(out.float().square().sum(), given)]

    wanted = both()
    for _ in range(20):
        assert all(torch.equal(one, held) for one, held in zip(both(), wanted, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_models_compute_what_they_do_by_eager(name: str) -> None:
    warploom.register_transformers()
    made, ids = model(name, BF16, "cuda"), tokens(2, 11).cuda()
    single = model(name).cuda()
    errors = []
    with torch.no_grad():
        torch.manual_seed(0)
        single.set_experts_implementation("eager")
        wanted = single.eval()(ids).logits
        for implementation in ("eager", "warploom"):
            made.set_experts_implementation(implementation)
            errors.append((made.eval()(ids).logits - wanted).abs().max())
    assert errors[1] <= 2 * errors[0] + 1e-3


def test_a_model_compiles_to_one_graph_and_generates() -> None:
    warploom.register_transformers()
    made = model("qwen3_moe", BF16, "cuda").eval()
    made.set_experts_implementation("warploom")
    compiled = torch.compile(made, fullgraph=True)
    with torch.no_grad():
        found = compiled(tokens(2, 7).cuda(), use_cache=False).logits
        assert close(found, made(tokens(2, 7).cuda(), use_cache=False).logits)
    written = made.generate(tokens(2, 5).cuda(), max_new_tokens=8, do_sample=False)
    assert written.shape == (2, 13)
