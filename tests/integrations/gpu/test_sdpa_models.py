"""Compilers, captured graphs and modules of torch while Warploom is torch's attention."""

from __future__ import annotations

import pytest
import torch
from sdpa_bounds import differentiated, dout_of
from sdpa_on_gpu import BACKENDS, BF16, Tensors, by, close, launching, operands
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import warploom

pytestmark = pytest.mark.gpu


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
