"""`warploom.nn.Linear` on a GPU: results and gradients, on any stream, in any graph."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from linear_bounds import ACTIVATIONS, differentiated, within

import warploom
from warploom.integrations.recipes import RECIPES
from warploom.runtime.families.gemm.block_masks import dropout_mask, expanded

pytestmark = pytest.mark.gpu
# rows, in_features, out_features: ragged ones, rows that TMA cannot read, and one of a model
SHAPES = [(1, 64, 64), (129, 200, 72), (77, 513, 130), (300, 1024, 1536)]
IN, OUT, ROWS = 256, 192, 130


def layer(n_in: int = IN, n_out: int = OUT, **options: Any) -> warploom.nn.Linear:
    torch.manual_seed(0)
    given = {"device": "cuda", "dtype": torch.bfloat16, **options}
    return warploom.nn.Linear(n_in, n_out, **given)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that is handed out next is full of NaN; and nothing waits for the GPU."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        held = [torch.full((size,), torch.nan, device="cuda") for _ in range(8)]
        del held
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("preactivation", ["save", "recompute"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients_are_those_of_float64(
    activation: str | None, preactivation: str, shape: tuple[int, int, int]
) -> None:
    """A lost k step, a row that is not written or a gradient of another parameter would show."""
    m, k, n = shape
    module = layer(k, n, activation=activation, preactivation=preactivation)
    x, residual, dy = rows(m, k).requires_grad_(), rows(m, n).requires_grad_(), rows(m, n)
    assert not warploom.explain(module, x, residual).torch
    module(x, residual).backward(dy)  # builds and loads what it needs, which waits
    leaves = [x, residual, *module.parameters()]
    first = [leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    with poisoned():
        y = module(x, residual)
        y.backward(dy)
    z = x.detach().double() @ module.weight.detach().double().t() + module.bias.detach().double()
    magnitude = x.detach().double().abs() @ module.weight.detach().double().abs().t() + 4
    assert within(y.detach(), ACTIVATIONS[activation](z) + residual.detach().double(), magnitude)
    for leaf, (exact, magnitude) in zip(
        leaves, differentiated(module, x, residual, dy), strict=True
    ):
        assert within(leaf.grad, exact, magnitude)
    assert all(torch.equal(one, leaf.grad) for one, leaf in zip(first, leaves, strict=True))


@pytest.mark.parametrize("shape", [(300, 520, 392), (1024, 1024, 512)])
def test_dropped_blocks_and_their_gradients_are_those_of_float64(
    shape: tuple[int, int, int],
) -> None:
    """A mask that a pass does not share, blocks of dx not written, or a lost 1 / (1 - p) show."""
    m, k, n = shape
    module, x, dy = layer(k, n, dropout_blocks=0.5), rows(m, k).requires_grad_(), rows(m, n)
    assert "sparse_a" in warploom.explain(module, x).kernel
    module(x).backward(dy)  # builds and loads what it needs, which waits
    module.zero_grad()
    x.grad = None
    state = torch.cuda.get_rng_state()
    with poisoned():
        y = module(x)
        y.backward(dy)
    torch.cuda.set_rng_state(state)
    counts = expanded(dropout_mask(m, k, 0.5, x.device), m, k)
    assert 0.1 < counts.double().mean() < 0.9
    dropped = (2 * x.detach() * counts).requires_grad_()
    residual = torch.zeros_like(dy)
    dx, _, dw, db = differentiated(module, dropped, residual, dy)
    with torch.no_grad():
        assert module.bias is not None
        magnitude = dropped.double().abs() @ module.weight.double().abs().t() + 4
        assert within(y, dropped.double() @ module.weight.double().t() + module.bias, magnitude)
    assert within(x.grad, *(2 * counts * one for one in dx))
    assert within(module.weight.grad, *dw) and within(module.bias.grad, *db)
    whole = module.eval()(x)
    module.dropout_blocks = 0.0
    assert torch.equal(whole, module(x))


@pytest.mark.parametrize("shape", [(ROWS, IN), (3, 5, IN), (IN,), (0, IN), (2, 0, IN)])
def test_any_leading_dimensions_and_none_at_all(shape: tuple[int, ...]) -> None:
    module, x = layer(activation="relu"), rows(*shape).requires_grad_()
    y = module(x)
    assert y.shape == (*shape[:-1], OUT)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    assert warploom.explain(module, x).torch is (x.numel() == 0)


def test_views_that_are_not_contiguous_are_read_as_they_are() -> None:
    module, wide = layer(), rows(ROWS, 2 * IN + 3)
    for x in (wide[:, :IN], wide[:, 3 : IN + 3], wide[:, ::2][:, :IN], rows(IN, ROWS).t()):
        given = x.detach().requires_grad_()
        module.zero_grad()
        y = module(given)
        y.sum().backward()
        residual = torch.zeros_like(y)
        exact = differentiated(module, given, residual, torch.ones_like(y))
        assert within(given.grad, *exact[0])
        assert within(module.weight.grad, *exact[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_types_without_kernels_are_torchs(dtype: torch.dtype) -> None:
    module, x = layer(dtype=dtype, activation="silu"), rows(ROWS, IN).to(dtype)
    assert warploom.explain(module, x).torch
    plain = torch.nn.functional.linear(x, module.weight, module.bias)
    assert torch.equal(module(x), torch.nn.functional.silu(plain))


def test_autocast_runs_kernels_on_parameters_of_fp32() -> None:
    module, x = layer(dtype=torch.float32), rows(ROWS, IN).float()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert not warploom.explain(module, x).torch
        y = module(x)
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    exact = x.double().sum(0).expand(OUT, IN)
    assert within(module.weight.grad, exact, x.double().abs().sum(0).expand(OUT, IN))
    assert module.weight.grad is not None
    assert module.weight.grad.dtype == torch.float32


def test_another_stream_computes_the_same() -> None:
    """Forward and backward run on the stream that is current, each after what it reads."""
    module, x = layer(activation="gelu"), rows(ROWS, IN)
    module(x).sum().backward()
    expected = module.weight.grad
    module.zero_grad()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1 << 24)
        module(x.clone()).sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    assert expected is not None
    assert torch.equal(expected, module.weight.grad)


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_training_step_is_captured_in_a_graph(recipe: str | None) -> None:
    module, x = layer(activation="silu", recipe=recipe), rows(ROWS, IN)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            module.zero_grad(set_to_none=True)
            module(x).float().square().sum().backward()
    torch.cuda.current_stream().wait_stream(stream)
    module.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = module(x)
        y.float().square().sum().backward()
    x.copy_(rows(ROWS, IN))
    before = copy.deepcopy(module.scaling)  # of steps: the replay is one of them
    graph.replay()
    replayed = [y.detach().clone(), *(one.grad.clone() for one in module.parameters())]
    module.zero_grad(set_to_none=True)
    module.scaling = before
    again = module(x)
    again.float().square().sum().backward()
    for one, other in zip(
        replayed, [again.detach(), *(one.grad for one in module.parameters())], strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("recipe", [None, "rowwise"])
def test_torch_compile_trains_it_whole(recipe: str | None) -> None:
    module = layer(activation="gelu_tanh", recipe=recipe)
    torch.compiler.reset()  # of all layers compiled before, which share one forward
    compiled = torch.compile(module, fullgraph=True)
    dy = rows(ROWS, OUT)
    for m in (ROWS, ROWS, 64, 200):  # the last ones with dynamic shapes
        x, residual = rows(m, IN), rows(m, OUT)
        dy, results = rows(m, OUT), []
        for call in (module, compiled):
            given = x.clone().requires_grad_()
            module.zero_grad()
            y = call(given, residual)
            y.backward(dy)
            results.append([y.detach(), given.grad, *(one.grad for one in module.parameters())])
        for one, other in zip(*results, strict=True):
            size = other.double().abs().max()
            assert ((one.double() - other.double()).abs() <= 2**-6 * size).all()


@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_micro_batches_add_up_in_main_grad(recipe: str | None) -> None:
    options = {"recipe": recipe, "activation": "relu"}
    module, plain = layer(accumulate_into_main_grad=True, **options), layer(**options)
    module.weight.main_grad = torch.zeros(OUT, IN, device="cuda")
    total = torch.zeros(OUT, IN, device="cuda", dtype=torch.float64)
    for _ in range(3):
        x, dy = rows(ROWS, IN), rows(ROWS, OUT)
        for one in (module, plain):
            one.zero_grad()
            one(x).backward(dy)
        total += plain.weight.grad.double()
    assert module.weight.grad is None
    assert within(module.weight.main_grad, total, total.abs().max().expand(OUT, IN))


@pytest.mark.parametrize("recipe", [None, "tensorwise"])
def test_graph_trees_add_up_in_main_grad(recipe: str | None) -> None:
    """A graph that copied it would lose the gradient of each step."""
    module = layer(accumulate_into_main_grad=True, recipe=recipe)
    x, once = rows(ROWS, IN), torch.zeros(OUT, IN, device="cuda")
    module.weight.main_grad = once
    module(x).float().square().mean().backward()
    module.weight.main_grad = torch.zeros_like(once)
    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    for step in range(1, 5):
        torch.compiler.cudagraph_mark_step_begin()
        module.bias.grad = None
        compiled(x).float().square().mean().backward()
        bound = once.abs().max().expand(OUT, IN).double()
        assert within(module.weight.main_grad / step, once.double(), bound, 2**-6)


@pytest.mark.parametrize(
    ("recipe", "gradient_dtype"),
    [
        *((recipe, None) for recipe in RECIPES),
        *product(RECIPES[:3], (torch.bfloat16, torch.float8_e5m2)),
    ],
)
def test_recipes_compute_on_the_gpu_what_the_reference_does(
    recipe: str, gradient_dtype: torch.dtype | None
) -> None:
    options = {"recipe": recipe, "gradient_dtype": gradient_dtype}
    ours, reference = layer(**options), layer(device="cpu", **options)
    reference.load_state_dict(ours.state_dict())
    x, dy = rows(ROWS, IN), rows(ROWS, OUT)
    ours(x.requires_grad_()).backward(dy)
    ours.zero_grad()
    x.grad = None
    with poisoned():
        y = ours(x)
        y.backward(dy)
    on_cpu = x.detach().cpu().requires_grad_()
    reference(on_cpu).backward(dy.cpu())  # as often: scales may be of the call before
    reference.zero_grad()
    on_cpu.grad = None
    expected = reference(on_cpu)
    expected.backward(dy.cpu())
    pairs = [(y.detach(), expected.detach()), (x.grad, on_cpu.grad)]
    pairs += [
        (one.grad, two.grad)
        for one, two in zip(ours.parameters(), reference.parameters(), strict=True)
    ]
    for found, other in pairs:
        assert within(
            found.cpu(), other.double(), other.double().abs() + other.double().std(), 2**-5
        )
