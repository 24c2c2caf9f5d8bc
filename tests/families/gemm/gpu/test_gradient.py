"""Gradients of gemm on a GPU: every element, streams, captured graphs, compilers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gemm_gradients import BF16, E4M3, E5M2, FP16, FP32, Items, exact, held, leaves_of
from watched import CYCLES

import warploom
from warploom.runtime.counters import counters

pytestmark = pytest.mark.gpu

Operands = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    gc.collect()


def drawn(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_()


def poison() -> None:
    """Fill what the allocator will hand out next with NaN, which an element not written stays."""
    rooms = [torch.full((1 << 19,), torch.nan, device="cuda") for _ in range(8)]
    rooms += [torch.full((1 << size,), torch.nan, device="cuda") for size in range(7, 18)] * 2
    del rooms


def check(a: torch.Tensor, b: torch.Tensor, items: Items, **keywords: Any) -> None:
    d = warploom.gemm(a, b, epilogue=items, **keywords)
    wanted = [one for one in leaves_of(a, b, items) if one.requires_grad]
    dd = torch.randn_like(d, dtype=FP32).to(d.dtype)
    poison()
    found = torch.autograd.grad(d, wanted, dd)
    expected = [
        gradient
        for gradient, one in zip(exact(a, b, items, dd), leaves_of(a, b, items), strict=True)
        if one.requires_grad
    ]
    for one, other, like in zip(found, expected, wanted, strict=True):
        assert one.dtype == like.dtype
        held(one, other, max(d.numel() // max(one.numel(), 1), d.shape[-1]), str(list(one.shape)))


LAYOUTS: dict[str, Callable[[int, int, int], Operands]] = {
    "row, col": lambda m, n, k: (drawn(m, k), drawn(n, k).t()),
    "row, row": lambda m, n, k: (drawn(m, k), drawn(k, n)),
    "col, col": lambda m, n, k: (drawn(k, m).t(), drawn(n, k).t()),
    "col, row": lambda m, n, k: (drawn(k, m).t(), drawn(k, n)),
    "slices": lambda m, n, k: (drawn(m, k + 24)[:, 8 : k + 8], drawn(n + 3, k)[3:].t()),
    "rows of one matrix": lambda m, n, k: (drawn(3, m, k), drawn(n, k).t()),
    "batches": lambda m, n, k: (drawn(3, m, k), drawn(3, n, k).mT),
    "broadcast a": lambda m, n, k: (drawn(m, k), drawn(3, k, n)),
    "broadcast b": lambda m, n, k: (drawn(2, 3, m, k), drawn(3, n, k).mT),
    "one b of three dimensions": lambda m, n, k: (drawn(3, m, k), drawn(1, n, k).mT),
}
SHAPES = [(256, 136, 192), (257, 131, 193), (1, 136, 64), (100, 8, 8), (0, 16, 64)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_operands_wherever_they_lie(layout: str, shape: tuple[int, int, int]) -> None:
    for dtype in (BF16, FP16):
        a, b = (leaf(one.to(dtype)) for one in LAYOUTS[layout](*shape))
        check(a, b, [])
        check(a, b, [], out_dtype=FP32)


def epilogue(name: str, m: int, n: int) -> Items:
    scale = torch.rand(1, device="cuda") + 0.5
    row, column = torch.rand(m, device="cuda") + 0.5, torch.rand(n, device="cuda") + 0.5
    bias, c = leaf(drawn(n)), leaf(drawn(m, n))
    found: dict[str, Items] = {
        "bias": [("bias", leaf(drawn(n, dtype=FP32)))],
        "scales": [("scale_a", 0.5), ("scale_b", scale), ("bias", bias), ("residual", c, 0.5)],
        "vectors": [("scale_a", row), ("scale_b", column), ("bias", bias)],
        "relu": [("bias", bias), ("activation", "relu")],
        "silu": [("bias", bias), ("activation", "silu")],
        "gelu": [("activation", "gelu"), ("residual", c, 1.0)],
        "layer": [
            ("scale_a", scale),
            ("bias", bias),
            ("activation", "gelu_tanh"),
            ("residual", c, -0.5),
            ("scale_d", 0.25),
        ],
        "composite": [("scale_a", leaf(row)), ("activation", "silu"), ("bias", bias)],
    }
    return found[name]


NAMES = ["bias", "scales", "vectors", "relu", "silu", "gelu", "layer", "composite"]


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_pass_every_step(name: str, preactivation: str) -> None:
    for m, n, k in SHAPES[:3]:
        a, b = leaf(drawn(m, k)), leaf(drawn(n, k).t())
        check(a, b, epilogue(name, m, n), preactivation=preactivation)
        check(a, b, epilogue(name, m, n), preactivation=preactivation, out_dtype=FP32)


def test_a_layer_copies_nothing() -> None:
    """Weights that were transposed in memory for their gradients would cost what they weigh."""
    x, weight, bias = leaf(drawn(256, 192)), leaf(drawn(136, 192)), leaf(drawn(136))
    for activation in (None, "silu", "relu"):
        counters.reset()
        d = warploom.gemm(x, weight.t(), bias=bias, activation=activation)
        d.backward(torch.randn_like(d))
        assert counters.copies == 0
        assert weight.grad is not None
        assert weight.grad.is_contiguous()


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("n", [136, 131])
def test_the_gradient_of_b_is_added_in_place_and_around_it_nothing(n: int, across: bool) -> None:
    m, k = 257, 192
    a, weight = leaf(drawn(m, k)), leaf(drawn(n, k))
    room = torch.full((n + 2, k + 16), torch.nan, device="cuda")
    inside = room[1:-1, 8:-8]
    inside.fill_(1.0)
    b = weight.t()
    into = inside.t()
    if not across:
        room = torch.full((k + 2, n + 16), torch.nan, device="cuda")
        into = room[1:-1, 8:-8]
        into.fill_(1.0)
    d = warploom.gemm(a, b, main_grad=into, scale_a=0.5)
    dd = drawn(m, n)
    d.backward(dd)
    assert weight.grad is None
    held(into - 1, exact(a, b, [("scale", 0.5)], dd)[1], m, "b")
    assert room.isnan().sum() == room.numel() - into.numel()


@pytest.mark.parametrize("dtype", [BF16, E5M2])
def test_gradients_of_fp8_operands(dtype: torch.dtype) -> None:
    a, b = leaf(drawn(256, 192).to(E4M3)), leaf(drawn(144, 192).t().to(E4M3))
    for one in (a, b):
        one.grad_dtype = BF16
    scale = torch.full((1,), 0.5, device="cuda")
    d = warploom.gemm(a, b, scale_a=scale, activation="silu", gradient_dtype=dtype)
    dd = drawn(256, 144)
    poison()
    d.backward(dd)
    expected = exact(a, b, [("scale", scale), ("activation", "silu")], dd)
    for one, other in zip((a, b), expected, strict=False):
        assert one.grad is not None
        difference = (one.grad.double() - other).square().mean().sqrt()
        assert difference <= (0.01 if dtype == BF16 else 0.08) * other.square().mean().sqrt()


def layer(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    return warploom.gemm(x, weight.t(), bias=bias, activation="silu", **keywords)


def leaves(m: int = 257) -> list[torch.Tensor]:
    return [leaf(drawn(m, 192)), leaf(drawn(136, 192)), leaf(drawn(136))]


@pytest.mark.parametrize("preactivation", ["save", "recompute"])
def test_gradients_are_the_same_in_every_run(preactivation: str) -> None:
    given, dd = leaves(1031), drawn(1031, 136)
    first = torch.autograd.grad(layer(*given, preactivation=preactivation), given, dd)
    for _ in range(5):
        poison()
        again = torch.autograd.grad(layer(*given, preactivation=preactivation), given, dd)
        assert all(map(torch.equal, first, again))


def test_a_backward_pass_waits_for_what_its_stream_does_before() -> None:
    given, dd = leaves(), drawn(257, 136)
    expected = torch.autograd.grad(layer(*given), given, dd)
    late = torch.full_like(dd, torch.nan)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        d = layer(*given)
        torch.cuda._sleep(CYCLES)
        late.copy_(dd)
        found = torch.autograd.grad(d, given, late)
    stream.synchronize()
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("keywords", [{}, {"preactivation": "recompute"}], ids=str)
def test_both_passes_are_captured_in_one_graph(keywords: dict[str, Any]) -> None:
    x, weight, bias = leaves()
    dd = drawn(257, 136)
    into = torch.zeros(136, 192, device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        d = layer(x, weight, bias, main_grad=into.t(), **keywords)
        return torch.autograd.grad(d, (x, bias, weight), dd, allow_unused=True)[:2]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    gc.collect()  # or another test's graph may die, and be reset, during this capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        found = step()
    for _ in range(2):
        with torch.no_grad():
            x.copy_(drawn(257, 192))
            dd.copy_(drawn(257, 136))
            into.zero_()
        graph.replay()
        sums = into.clone()
        expected = torch.autograd.grad(layer(x, weight, bias, **keywords), (x, bias, weight), dd)
        assert all(map(torch.equal, found, expected[:2]))
        assert torch.equal(sums.to(BF16), expected[2])


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
def test_a_compiled_layer_has_the_gradients_of_float64(backend: str, preactivation: str) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return layer(x, weight, bias, preactivation=preactivation)

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for rows in (256, 257, 300):
        given, dd = leaves(rows), drawn(rows, 136)
        torch._dynamo.mark_dynamic(given[0], 0)
        found = torch.autograd.grad(compiled(*given), given, dd)
        x, weight, bias = given
        a, b, sums = exact(x, weight.t(), [("bias", bias), ("activation", "silu")], dd)
        held(found[0], a, 136, "x")
        held(found[1], b.t(), rows, "weight")
        held(found[2], sums, rows, "bias")


def test_graphed_callables_are_differentiated() -> None:
    given, dd = leaves(), drawn(257, 136)
    expected = torch.autograd.grad(layer(*given), given, dd)
    gc.collect()
    graphed = torch.cuda.make_graphed_callables(layer, tuple(leaf(one) for one in given))
    found = torch.autograd.grad(graphed(*given), given, dd)
    assert all(map(torch.equal, found, expected))
