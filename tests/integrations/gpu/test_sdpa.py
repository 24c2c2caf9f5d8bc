"""torch's attention on the GPU: Warploom's kernels beside, and in place of, those of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from sdpa_bounds import assert_held, differentiated, dout_of, draw
from torch.nn import attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import warploom

pytestmark = pytest.mark.gpu
HALF, BF16 = torch.float16, torch.bfloat16
BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION]
Tensors = tuple[torch.Tensor, ...]
Shape = tuple[int, int, int, int, int, torch.dtype]


@pytest.fixture
def activated() -> Iterator[None]:
    with warploom.sdpa.activate():
        yield


@contextlib.contextmanager
def launching(expected: bool) -> Iterator[None]:
    """Assert that Warploom's kernels run inside of it, or that none does."""
    before = warploom.counters.launches
    yield
    assert (warploom.counters.launches > before) is expected


def by(backend: SDPBackend) -> Callable[..., torch.Tensor]:
    """torch's function, which picks this implementation."""

    def attend(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*given, **keywords)

    return attend


def operands(
    heads: int, kv_heads: int, length: int, key_length: int, dim: int, dtype: torch.dtype = BF16
) -> Tensors:
    q = draw(2, heads, length, dim, dtype=dtype, device="cuda")
    k, v = (draw(2, kv_heads, key_length, dim, dtype=dtype, device="cuda", seed=i) for i in (1, 2))
    return q, k, v


def close(found: Tensors, wanted: Tensors) -> None:
    """Assert that tensors differ by no more than two roundings of bf16, over all."""
    for got, right in zip(found, wanted, strict=True):
        assert got.isfinite().all()
        assert (got.double() - right.double()).norm() <= 0.02 * right.double().norm()


# ---- warploom.sdpa -------------------------------------------------------------------------------

SHAPES = [
    (4, 4, 256, 256, 64, BF16),
    (8, 2, 300, 300, 128, BF16),
    (4, 4, 129, 513, 128, HALF),
    (6, 3, 257, 65, 256, BF16),
    (4, 1, 77, 77, 40, HALF),
    (2, 2, 1, 200, 64, BF16),
]


@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.07}])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_right(shape: Shape, keywords: dict[str, Any]) -> None:
    given = operands(*shape)
    with launching(expected=True):
        assert_held(warploom.sdpa, given, **keywords, enable_gqa=True)


@pytest.mark.parametrize(
    "keywords",
    [{"dropout_p": 0.25}, {"attn_mask": "mask"}, {"scale": -0.5}],
    ids=["dropout", "mask", "scale"],
)
def test_what_kernels_do_not_compute_is_torchs(keywords: dict[str, Any]) -> None:
    given = operands(4, 4, 128, 128, 64)
    if keywords.get("attn_mask"):
        keywords = {"attn_mask": torch.rand(128, 128, device="cuda") > 0.3}
    found, expected = [], []
    for function, into in ((warploom.sdpa, found), (scaled_dot_product_attention, expected)):
        torch.manual_seed(3)
        with launching(expected=False):
            out, gradients = differentiated(function, given, **keywords)
        into += [*out, *gradients]
    assert torch.equal(found[0], expected[0])
    close(tuple(found), tuple(expected))


def test_explain_says_which_kernel_runs() -> None:
    q, k, v = operands(4, 4, 64, 64, 64)
    assert not warploom.explain(warploom.sdpa, q, k, v).torch
    found = warploom.explain(warploom.sdpa, q, k, v, dropout_p=0.1)
    assert found.torch
    assert "dropout_p" in found.reason


# ---- torch's function ----------------------------------------------------------------------------


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
@pytest.mark.parametrize("keywords", [{}, {"is_causal": True}, {"scale": 0.07}])
@pytest.mark.parametrize("shape", [(4, 4, 256, 256, 64, BF16), (8, 2, 300, 300, 128, HALF)])
def test_either_implementation_of_torch_is_warplooms(
    backend: SDPBackend, keywords: dict[str, Any], shape: Shape
) -> None:
    given = operands(*shape)
    with launching(expected=True):
        assert_held(by(backend), given, **keywords, enable_gqa=True)


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("lengths", [(100, 300), (300, 100)])
def test_masks_of_unequal_lengths_begin_at_the_top_left(lengths: tuple[int, int]) -> None:
    """cuDNN's are Warploom's; what torch picks by itself means the same, whoever computes."""
    given = operands(4, 4, *lengths, 64)
    assert_held(scaled_dot_product_attention, given, is_causal=True)
    with launching(expected=True):
        assert_held(by(SDPBackend.CUDNN_ATTENTION), given, is_causal=True)


@pytest.mark.usefixtures("activated")
def test_what_torch_picks_by_itself_is_warplooms() -> None:
    """Guards against an operator that torch prefers on this GPU and that was left out."""
    for dim in (64, 128, 256, 12):  # torch pads the last to 16
        given = operands(4, 4, 256, 256, dim)
        for keywords in ({}, {"is_causal": True}):
            with launching(expected=True):
                out, gradients = differentiated(scaled_dot_product_attention, given, **keywords)
            wide = tuple(tensor.double() for tensor in given)
            right, wanted = differentiated(scaled_dot_product_attention, wide, **keywords)
            close((*out, *gradients), (*right, *wanted))


LAYOUTS: dict[str, Callable[[], Tensors]] = {
    "heads outside": lambda: tuple(
        torch.randn(2, 4, 200, 64, device="cuda").bfloat16() for _ in range(3)
    ),
    "packed": lambda: (
        torch.randn(2, 200, 3, 4, 64, device="cuda").bfloat16().permute(2, 0, 3, 1, 4).unbind(0)
    ),
    "part of a head": lambda: tuple(
        torch.randn(2, 200, 4, 128, device="cuda").bfloat16()[..., 32:96].transpose(1, 2)
        for _ in range(3)
    ),
}


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_models_are_read_where_they_lie(layout: str) -> None:
    given = LAYOUTS[layout]()
    copies = warploom.counters.copies
    with launching(expected=True):
        assert_held(by(SDPBackend.FLASH_ATTENTION), given, is_causal=True)
    assert warploom.counters.copies == copies


@pytest.mark.usefixtures("activated")
def test_what_cannot_be_read_is_torchs_kernel() -> None:
    q, k, v = operands(4, 4, 128, 128, 64)
    expanded = k[:1].expand_as(k)
    with launching(expected=False):
        out, gradients = differentiated(by(SDPBackend.FLASH_ATTENTION), (q, expanded, v))
    wide = tuple(tensor.double() for tensor in (q, expanded, v))
    right, wanted = differentiated(scaled_dot_product_attention, wide)
    close((*out, *gradients), (*right, *wanted))


@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
def test_what_is_activated_is_undone(backend: SDPBackend) -> None:
    """torch's kernels run before and after, with the same bits; dropout is theirs in between."""
    given = operands(4, 4, 256, 256, 64)

    def dropped() -> torch.Tensor:
        torch.manual_seed(3)
        return by(backend)(*given, dropout_p=0.25)

    before, before_dropped = by(backend)(*given), dropped()
    with warploom.sdpa.activate():
        assert attention.current_flash_attention_impl() == "warploom"
        with launching(expected=True):
            by(backend)(*given)
        with launching(expected=False):
            assert torch.equal(dropped(), before_dropped)
    with launching(expected=False):
        assert torch.equal(by(backend)(*given), before)


@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
@pytest.mark.parametrize("first", ["torch", "warploom"])
def test_either_backward_takes_what_either_forward_returned(
    backend: SDPBackend, first: str
) -> None:
    """Guards against a log-sum-exp in another base, order or place than torch's."""
    given = operands(4, 4, 300, 300, 128)
    leaves = [tensor.requires_grad_() for tensor in given]
    with contextlib.ExitStack() as stack:
        if first == "warploom":
            stack.enter_context(warploom.sdpa.activate())
        out = by(backend)(*leaves, is_causal=True)
    with contextlib.ExitStack() as stack:
        if first == "torch":
            stack.enter_context(warploom.sdpa.activate())
        with launching(expected=first == "torch"):
            found = torch.autograd.grad(out, leaves, dout_of(out))
    wide = tuple(tensor.detach().double() for tensor in given)
    right = [tensor.requires_grad_() for tensor in wide]
    wanted = scaled_dot_product_attention(*right, is_causal=True)
    gradients = torch.autograd.grad(wanted, right, dout_of(out).double())
    close((out.detach(), *found), (wanted.detach(), *gradients))


@pytest.mark.usefixtures("activated")
def test_deterministic_gradients_are_bit_equal() -> None:
    given = operands(8, 2, 700, 700, 128)
    torch.use_deterministic_algorithms(True)
    try:
        found = [
            differentiated(by(SDPBackend.FLASH_ATTENTION), given, enable_gqa=True)[1]
            for _ in range(5)
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for again in found[1:]:
        for got, first in zip(again, found[0], strict=True):
            assert torch.equal(got, first)


@pytest.mark.usefixtures("activated")
def test_packed_sequences_are_warplooms() -> None:
    """torch's varlen_attn, sequence by sequence as torch's function has each."""
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    lengths = [100, 1, 333]
    given = tuple(torch.randn(434, 4, 64, device="cuda").bfloat16() for _ in range(3))
    starts = torch.tensor([0, 100, 101, 434], dtype=torch.int32, device="cuda")

    def one_by_one(*tensors: torch.Tensor) -> torch.Tensor:
        parts = zip(*(tensor.split(lengths) for tensor in tensors), strict=True)
        heads = ([tensor.transpose(0, 1)[None] for tensor in part] for part in parts)
        return torch.cat([scaled_dot_product_attention(*p)[0].transpose(0, 1) for p in heads])

    with launching(expected=True):
        out, gradients = differentiated(
            lambda *tensors: varlen(*tensors, starts, starts, 333, 333), given
        )
    wide = tuple(tensor.double() for tensor in given)
    right, wanted = differentiated(one_by_one, wide)
    close((*out, *gradients), (*right, *wanted))


# ---- Compilers, graphs, modules ------------------------------------------------------------------


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
def test_compiled_models_are_warplooms(backend: SDPBackend, mode: str) -> None:
    """Guards against results that lie otherwise than a compiler was told, and kept memory."""
    weight = torch.randn(256, 768, device="cuda").bfloat16() / 16

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weight).view(2, 300, 3, 4, 64).permute(2, 0, 3, 1, 4).unbind(0)
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(2, 300, 256) + x

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    arriving = torch.randn(2, 300, 256, device="cuda").bfloat16()
    for seed in range(4):  # reduce-overhead warms up, records, replays
        torch.manual_seed(seed)
        x = torch.randn(2, 300, 256, device="cuda").bfloat16().requires_grad_()
        with sdpa_kernel(backend):
            before = warploom.counters.launches
            out = compiled(x)
            (gradient,) = torch.autograd.grad(out, x, arriving)
            if seed == 0:
                assert warploom.counters.launches > before
            found = out.detach().clone(), gradient.clone()
            expected = layer(x)
            (wanted,) = torch.autograd.grad(expected, x, arriving)
        close(found, (expected.detach(), wanted))


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("backend", BACKENDS, ids=["flash", "cudnn"])
def test_a_captured_call_replays_on_new_contents(backend: SDPBackend) -> None:
    given = operands(4, 4, 256, 256, 64)
    leaves = [tensor.requires_grad_() for tensor in given]

    def step() -> Tensors:
        out = by(backend)(*leaves, is_causal=True)
        return out.detach(), *torch.autograd.grad(out, leaves, arriving)

    arriving = dout_of(given[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with launching(expected=True), torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for tensor in leaves:
            tensor.copy_(torch.randn_like(tensor))
    graph.replay()
    replayed = tuple(tensor.clone() for tensor in found)
    close(replayed, step())


@pytest.mark.usefixtures("activated")
def test_a_first_call_during_capture_is_torchs() -> None:
    """Guards against an error where torch alone has none: nothing can be planned then."""
    given = operands(4, 4, 111, 111, 64)
    attend = by(SDPBackend.FLASH_ATTENTION)
    graph = torch.cuda.CUDAGraph()
    with launching(expected=False), torch.cuda.graph(graph):
        out = attend(*given)
    graph.replay()
    wide = tuple(tensor.double() for tensor in given)
    close((out,), (scaled_dot_product_attention(*wide),))
    with launching(expected=True):
        attend(*given)


@pytest.mark.usefixtures("activated")
@pytest.mark.parametrize("training", [False, True])
def test_modules_of_torch_are_warplooms(training: bool) -> None:
    """The fast path of inference and the one that learns."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(256, 4, 512, dropout=0.0, batch_first=True)
    layer = layer.to("cuda", BF16).train(training)
    x = torch.randn(2, 200, 256, device="cuda").bfloat16()
    with torch.set_grad_enabled(training):
        for module in (layer, lambda y: layer.self_attn(y, y, y, need_weights=False)[0]):
            with launching(expected=True):
                found = module(x)
            if training:
                with launching(expected=True):
                    found.sum().backward()
            layer.double()
            expected = module(x.double())
            layer.bfloat16()
            close((found.detach(),), (expected.detach(),))


@pytest.mark.usefixtures("activated")
def test_autocast_and_checkpoints_are_warplooms() -> None:
    given = operands(4, 4, 200, 200, 64)
    wide = tuple(tensor.float() for tensor in given)
    with launching(expected=True), torch.autocast("cuda", dtype=BF16):
        found = scaled_dot_product_attention(*wide)
    assert torch.equal(found, scaled_dot_product_attention(*given))

    def layer(*tensors: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(scaled_dot_product_attention, *tensors, use_reentrant=False)
        return out

    out, gradients = differentiated(layer, given)
    right, wanted = differentiated(scaled_dot_product_attention, given)
    close((*out, *gradients), (*right, *wanted))
