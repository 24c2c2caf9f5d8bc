"""Memory, streams, graphs and compilers of calls on a GPU."""

from __future__ import annotations

import dequantize_cases as cases
import pytest
import torch
from rooms import assert_repeats

import warploom
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts
from warploom.runtime import plan

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


def packed(count: int = 3, n: int = 200, k: int = 1024) -> PackedExperts:
    return cases.there(cases.experts(("uint4", 32, "bf16", "16-bit"), count, n, k))


@pytest.mark.parametrize("kernel", [*cases.SOME, *cases.ROWS], ids=cases.short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 3, 333, 640, pad=(8, 0))
    made.verify()
    assert_repeats(lambda: plan.run(made.call), [made.right], [made.guarded], runs=100)


def test_a_call_runs_on_the_current_stream_behind_what_is_there() -> None:
    given = packed()
    wanted, held = given.dequantize(), PackedExperts.empty(3, given.metadata, "cuda")
    held.slabs.zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.slabs.copy_(given.slabs)
        found = warploom.dequantize(held)
    torch.cuda.current_stream().wait_stream(stream)
    found.record_stream(torch.cuda.current_stream())
    assert torch.equal(found, wanted)


def test_a_captured_call_reads_what_is_there_then() -> None:
    given, others = packed(), cases.experts(("uint4", 32, "bf16", "16-bit"), 3, 200, 1024, seed=5)
    out = torch.empty(given.shape, dtype=torch.bfloat16, device="cuda")
    warploom.dequantize(given, out=out)  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.dequantize(given, out=out)
    for source in (others, packed(), others):
        given.slabs.copy_(source.slabs)
        out.fill_(torch.nan)
        graph.replay()
        assert torch.equal(out.cpu(), source.dequantize().cpu())


def test_a_call_is_one_launch_and_a_warm_one_plans_nothing() -> None:
    given = packed()
    warploom.dequantize(given)
    before = warploom.counters.as_dict()
    warploom.dequantize(given)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 1
    assert after == before


def test_nothing_waits_for_the_host() -> None:
    given = packed()
    warploom.dequantize(given)
    torch.cuda.set_sync_debug_mode("error")
    try:
        warploom.dequantize(given, torch.float16, first=1)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_code_calls_the_operator() -> None:
    def called(given: PackedExperts) -> torch.Tensor:
        return warploom.dequantize(given, first=1) * 2

    given = packed()
    compiled = torch.compile(called, fullgraph=True)
    assert torch.equal(compiled(given), called(given))


@pytest.mark.parametrize("format_", ["int4", "uint4", "mxfp4", "e4m3"])
def test_gradients_of_a_quantized_layer_take_the_kernels_weight(format_: str) -> None:
    """Bit by bit those that torch's own dequantized weight gives."""
    weight = warploom.quantize(torch.randn(192, 256, device="cuda"), format_)
    x = torch.randn(33, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    y = warploom.mixed_gemm(x, weight)
    dy, before = torch.randn_like(y), warploom.counters.launches
    (found,) = torch.autograd.grad(y, x, dy)
    assert warploom.counters.launches == before + 1
    assert torch.equal(found, dy @ weight.dequantize())


def test_torch_functions_of_a_quantized_layers_weight_take_it_too() -> None:
    linear = torch.nn.Linear(256, 192, device="cuda", dtype=torch.bfloat16)
    layer = warploom.nn.QuantizedLinear.from_linear(linear, "int4", group=32)
    x = torch.randn(5, 256, device="cuda", dtype=torch.bfloat16)
    before = warploom.counters.launches
    found = torch.nn.functional.linear(x, layer.weight)
    assert warploom.counters.launches == before + 1
    dense = layer.weight.dequantize(torch.bfloat16)
    assert torch.equal(found, torch.nn.functional.linear(x, dense))
