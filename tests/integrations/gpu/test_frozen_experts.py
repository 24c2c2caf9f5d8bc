"""Gradients through frozen quantized experts on a GPU: bounds, graphs, memory, compiled code."""

from __future__ import annotations

from typing import Any

import frozen_expert_layers as exact
import moe_models
import pytest
import torch
from frozen_expert_layers import Layer, sample

import warploom
from warploom.generator.epilogue import GateLayout
from warploom.integrations import frozen_experts as module
from warploom.integrations.checkpoints.experts import QuantizedExperts
from warploom.integrations.frozen_experts import Gate
from warploom.runtime.counters import counters

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
OAI = Gate("swiglu_oai", "interleaved")
WEIGHTS: dict[str, dict[str, Any]] = {
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
    "int4": {"format": "int4", "group": 32},
    "uint4": {"format": "uint4", "group": 32, "symmetric": False},
    "int8": {"format": "int8", "group": None},
    "e4m3": {},  # with block scales
}
# What sums lose of magnitudes. Kernels that scale quantized weights round them to 16 bits, too.
LOST = {"e4m3": 2.0**-9}


def keywords(gate: Gate) -> dict[str, Any]:
    """What a call says of its gate; ids may be of no expert."""
    names = ("gate", "gate_layout", "alpha", "limit")
    return {**dict(zip(names, gate, strict=True)), "first_expert": 0}


def leaves(args: dict[str, Any]) -> list[torch.Tensor]:
    return [args[name] for name in exact.graded(args)]


def step(args: dict[str, Any], dout: torch.Tensor, gate: Gate = OAI) -> list[torch.Tensor]:
    """The result of a call, and the gradients of all that requires one."""
    out = warploom.experts(**args, **keywords(gate))
    return [out.detach(), *torch.autograd.grad(out, leaves(args), dout)]


def moe(
    name: str, *sizes: int, dtype: torch.dtype = BF16, **how: Any
) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """The arguments of a call, its weights in fp64 on the CPU, and a gradient."""
    args, weights = sample(*sizes, biases=True, dtype=dtype, device="cuda", **WEIGHTS[name], **how)
    torch.manual_seed(1)
    return args, weights, torch.randn_like(args["hidden"])


def same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(results, expected, strict=True))


def difference(results: torch.Tensor, expected: torch.Tensor) -> float:
    return float((results.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("layout", ["interleaved", "halves"])
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("sizes", [(6, 128, 192), (5, 352, 160), (33, 576, 448)], ids=str)
def test_gradients_are_near_those_of_autograd_in_fp64(
    name: str, layout: GateLayout, sizes: tuple[int, ...], dtype: torch.dtype
) -> None:
    args, weights, dout = moe(name, *sizes, dtype=dtype, tokens=137)
    fused = layout == "interleaved" if WEIGHTS[name] else 2 * sizes[2] % 128 == 0
    lost = LOST.get(name, exact.UNITS[dtype] + exact.SUMS)
    for gate in (Gate("silu", layout), Gate("swiglu_oai", layout, 1.25, 0.5)):
        layer = Layer(**weights, gate=gate, fused=fused, eight=name == "e4m3", of_z=lost)
        results = step(args, dout, gate)
        for what, share in exact.shares(layer, args, results, dout).items():
            assert share <= 1, (gate, what)


@pytest.mark.parametrize("name", ["mxfp4", "int4", "e4m3"])
@pytest.mark.parametrize(("experts", "rows"), [(1, 1000), (5, 1), (8, 100), (16, 700)])
def test_some_experts_and_rows_at_a_time_have_gradients_as_near(
    name: str, experts: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args, weights, dout = moe(name, 16, 384, 192, tokens=300)
    monkeypatch.setattr(module, "LARGEST", experts * 384 * 384)
    monkeypatch.setattr(module, "RANGE", rows * 384)
    lost = LOST.get(name, exact.UNITS[BF16] + exact.SUMS)
    layer = Layer(**weights, gate=OAI, eight=name == "e4m3", of_z=lost)
    assert max(exact.shares(layer, args, step(args, dout), dout).values()) <= 1


@pytest.mark.parametrize("name", WEIGHTS)
def test_results_are_those_without_gradients_and_the_same_in_every_run(name: str) -> None:
    args, _, dout = moe(name, 16, 384, 192, tokens=500)
    expected = step(args, dout)
    with torch.no_grad():
        assert torch.equal(warploom.experts(**args, **keywords(OAI)), expected[0])
    for _ in range(10):
        assert same(step(args, dout), expected)


@pytest.mark.parametrize("name", WEIGHTS)
def test_one_graph_of_both_passes_serves_every_routing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of parts of the experts, too, whose rows begin where only the device knows."""
    monkeypatch.setattr(module, "LARGEST", 6 * 384 * 384)
    args, _, dout = moe(name, 16, 384, 192, tokens=300)
    step(args, dout)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(args, dout)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(args, dout)
    ids = args["ids"].clone()
    for routing in (ids, ids * 0, ids * 0 + 15, ids * 0 - 1, ids.flip(0)):
        args["ids"].copy_(routing)
        for one in results:
            one.fill_(torch.nan)
        graph.replay()
        assert same(results, step(args, dout))


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_memory_that_nothing_wrote_reaches_nothing(name: str) -> None:
    args, _, dout = moe(name, 16, 384, 192, tokens=300)
    expected = step(args, dout)
    torch.use_deterministic_algorithms(True)
    try:
        results = step(args, dout)
    finally:
        torch.use_deterministic_algorithms(False)
    assert same(results, expected)


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_operands_are_read_where_they_are(name: str) -> None:
    args, _, dout = moe(name, 16, 384, 160, tokens=300)
    step(args, dout)
    before = counters.copies
    step(args, dout)
    assert counters.copies == before


@pytest.mark.parametrize("name", ["mxfp4", "int4", "e4m3"])
def test_the_backward_pass_has_the_weights_of_few_experts_in_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of gpt-oss's sizes: gate_up's weights are 398 MB in 16 bits, of two experts 66 MB.

    What computes a range takes 14 bytes for each of 2^22 weights; tokens are few.
    """
    monkeypatch.setattr(module, "LARGEST", 2 * 5760 * 2880)
    monkeypatch.setattr(module, "RANGE", 1 << 22)
    args, _, dout = moe(name, 12, 2880, 2880, tokens=16, k=1)
    step(args, dout)
    out = warploom.experts(**args, **keywords(OAI))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(out, leaves(args), dout)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 2 * module.LARGEST + 24 * module.RANGE + (64 << 20)


@pytest.mark.parametrize("name", ["mxfp4", "e4m3"])
def test_compiled_code_is_near_eager(name: str) -> None:
    args, _, dout = moe(name, 16, 384, 192, tokens=300)

    def call(**tensors: Any) -> torch.Tensor:
        return warploom.experts(**tensors, **keywords(OAI))

    compiled = torch.compile(call, fullgraph=True)
    out = compiled(**args)
    results = [out.detach(), *torch.autograd.grad(out, leaves(args), dout)]
    for one, other in zip(results, step(args, dout), strict=True):
        assert difference(one, other) < 2**-6


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_moe"])
def test_what_is_before_the_experts_of_a_patched_model_trains(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read back: experts one by one would be."""
    inner = {"gpt_oss": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}[name]
    monkeypatch.setitem(moe_models.MODELS, name, {**moe_models.MODELS[name], inner: 64})
    made = moe_models.model(name, BF16, "cuda").requires_grad_(False)
    warploom.patch(made, weights={"format": "mxfp4", "skip": ["self_attn", "lm_head"]})
    own = [one for one in made.modules() if isinstance(one, QuantizedExperts)]
    for layer in own:
        monkeypatch.setattr(layer, "_one_by_one", None)
    trained = [one for key, one in made.named_parameters() if "_proj.weight" in key]
    for one in trained:
        one.requires_grad_()
    ids, losses = moe_models.tokens(2, 40).cuda(), []
    optimizer = torch.optim.AdamW(trained, lr=2e-2)
    for _ in range(8):
        optimizer.zero_grad()
        loss = made(ids, labels=ids).loss
        loss.backward()
        assert len(own) == 2 and all(one.grad.any() for one in trained)  # type: ignore[union-attr]
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
