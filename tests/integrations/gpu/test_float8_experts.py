"""Experts that train in fp8 on a GPU: results and gradients, graphs, compiled code, and memory."""

from __future__ import annotations

import float8_expert_layers as exact
import pytest
import torch
from moe_models import model, tokens

import warploom
from warploom.integrations import float8_experts
from warploom.integrations.float8_experts import float8_grouped_linear
from warploom.integrations.recipes import Recipe
from warploom.runtime.counters import counters

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
# Experts, K, N, and where their rows end; of some rows no expert is.
LAYERS = [
    (5, 144, 272, (70, 70, 200, 201, 290)),
    (1, 2048, 768, (333,)),
    (33, 512, 1536, tuple(range(0, 33 * 61, 61))),
    (4, 2880, 5760, (1, 129, 129, 1000)),
]


def drawn(layer: tuple[int, int, int, tuple[int, ...]], dtype: torch.dtype) -> list[torch.Tensor]:
    """Rows, of which those of no expert are NaN, weights, offsets and a gradient; on the CPU."""
    experts, k, n, ends = layer
    torch.manual_seed(k)

    def values(*shape: int) -> torch.Tensor:
        return (torch.randn(shape) * 2.0 ** torch.randint(-3, 4, shape[-1:])).to(dtype)

    total = ends[-1] + 10
    rows, weight, dy = values(total, k), values(experts, n, k) * k**-0.5, values(total, n)
    rows[ends[-1] :], dy[ends[-1] :] = torch.nan, torch.nan
    return [rows, weight, torch.tensor(ends, dtype=torch.int32), dy]


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: "x".join(map(str, layer[:3])))
def test_results_and_gradients_are_those_of_quantized_operands(
    layer: tuple[int, int, int, tuple[int, ...]], inputs_first: bool, dtype: torch.dtype
) -> None:
    given = drawn(layer, dtype)
    expected = exact.linear(*given)
    rows, weight, offsets, dy = (one.cuda() for one in given)
    stored = weight.mT.contiguous() if inputs_first else weight
    leaves = rows.requires_grad_(), stored.requires_grad_()
    matrices = stored if inputs_first else stored.mT
    y = float8_grouped_linear(rows, matrices, offsets, None, "blockwise")
    dx, dw = torch.autograd.grad(y, leaves, dy)
    counted, lost = slice(layer[3][-1]), exact.TENSOR_CORE
    assert exact.share(y[counted].cpu(), *(one[counted] for one in expected[0]), lost) <= 1
    assert exact.share(dx.cpu(), *expected[1], lost) <= 1
    assert exact.share((dw.mT if inputs_first else dw).cpu(), *expected[2], lost) <= 1


def test_operands_are_read_where_casts_put_them() -> None:
    """The transposes of all experts' weights are one matrix, whose columns are those of one."""
    rows, weight, offsets, dy = (one.cuda() for one in drawn(LAYERS[2], BF16))
    rows.requires_grad_(), weight.requires_grad_()
    before = counters.copies
    y = float8_grouped_linear(rows, weight.mT, offsets, None, "blockwise")
    torch.autograd.grad(y, (rows, weight), dy)
    assert counters.copies == before


def moe(tokens: int = 300) -> dict[str, torch.Tensor]:
    """A layer of 16 experts of 128 and 256 elements, whose router knows of two more."""
    torch.manual_seed(0)

    def values(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, device="cuda") * shape[-1] ** -0.5
        return made.to(BF16).requires_grad_()

    return {
        "hidden": values(tokens, 256),
        "ids": torch.rand(tokens, 18, device="cuda").topk(4).indices,
        "weights": torch.rand(tokens, 4, device="cuda").requires_grad_(),
        "gate_up": values(16, 256, 256),
        "down": values(16, 256, 128),
    }


def both(
    given: dict[str, torch.Tensor], recipe: Recipe | None = "blockwise", gate: str = "silu"
) -> list[torch.Tensor]:
    """The result, and the gradients of its squares."""
    out = warploom.experts(**given, recipe=recipe, gate=gate, first_expert=0)
    leaves = [one for one in given.values() if one.requires_grad]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), leaves)]


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted.float()).norm() / wanted.float().norm())


def test_a_layer_is_near_that_of_16_bits_and_the_same_in_every_run() -> None:
    given = moe()
    found = both(given)
    for one, other in zip(found, both(given, None), strict=True):
        assert 0 < difference(one, other) < 0.12
    for _ in range(10):
        assert all(torch.equal(*pair) for pair in zip(both(given), found, strict=True))


@pytest.mark.parametrize("gate", ["silu", "gelu", "gelu_tanh", "relu"])
def test_a_gate_that_casts_compute_is_near_that_of_torch(
    gate: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = moe()
    found = both(given, gate=gate)
    monkeypatch.setattr(float8_experts, "is_gated_by_casts", lambda *_: False)
    for one, other in zip(found, both(given, gate=gate), strict=True):
        assert difference(one, other) < 0.03


def test_memory_that_nothing_wrote_reaches_nothing() -> None:
    """Rows of no expert are left as the allocator has them: here NaN, as torch fills them."""
    given = moe()
    right = both(given)
    torch.use_deterministic_algorithms(True)
    try:
        found = both(given)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(*pair) for pair in zip(found, right, strict=True))


def test_a_step_is_as_many_launches_as_its_parts() -> None:
    """Six GEMMs, six casts, and those of routing, which are as many without a recipe."""
    given = moe()
    both(given)
    before = counters.launches
    both(given)
    assert counters.launches - before == 6 + 6 + 5


def test_one_graph_of_both_passes_serves_every_routing() -> None:
    given = moe()
    both(given)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both(given)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph):
        found = both(given)
    ids = given["ids"].clone()
    for routing in (ids, ids * 0, ids * 0 + 15, ids * 0 - 1, ids.flip(0)):
        given["ids"].copy_(routing)
        for one in found:
            one.fill_(torch.nan)
        graph.replay()
        assert all(torch.equal(*pair) for pair in zip(found, both(given), strict=True))


def test_compiled_code_is_near_eager() -> None:
    given = moe()

    def call(**tensors: torch.Tensor) -> torch.Tensor:
        return warploom.experts(**tensors, recipe="blockwise", first_expert=0)

    compiled = torch.compile(call, fullgraph=True)
    out = compiled(**given)
    leaves = [one for one in given.values() if one.requires_grad]
    found = [out, *torch.autograd.grad(out.float().square().sum(), leaves)]
    for one, other in zip(found, both(given), strict=True):
        assert difference(one.detach(), other) < 0.02


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_a_patched_model_trains_its_experts_in_fp8(name: str) -> None:
    made, given = model(name, BF16, "cuda"), tokens(2, 40).cuda()
    warploom.patch(made, recipe="blockwise")
    optimizer, losses = torch.optim.AdamW(made.parameters(), lr=2e-2), []
    for _ in range(8):
        optimizer.zero_grad()
        loss = made(given, labels=given).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < 0.9 * losses[0]
