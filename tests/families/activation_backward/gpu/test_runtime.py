"""Streams, graphs, compilers and threads of calls on a GPU."""

from __future__ import annotations

import pytest
import torch

import warploom
from warploom.runtime.families.activation_backward.api import activation_backward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]


def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(sum(shape))
    return tuple(torch.randn(shape, device="cuda").bfloat16() for _ in range(2))  # type: ignore[return-value]


def both(dy: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    dz, sums = activation_backward(dy, z, "gelu_tanh", sums=True)
    assert dz is not None and sums is not None
    return dz, sums


def test_a_call_runs_on_the_current_stream_behind_what_is_there() -> None:
    dy, z = pair(2048, 1024)
    wanted = both(dy, z)
    held = torch.zeros_like(dy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        held.copy_(dy)
        found = both(held, z)
    torch.cuda.current_stream().wait_stream(stream)
    for one, other in zip(found, wanted, strict=True):
        one.record_stream(torch.cuda.current_stream())
        assert torch.equal(one, other)


def test_sums_of_several_streams_do_not_meet() -> None:
    """Each call has sums of parts of its own."""
    given = [pair(4096, 512 + 8 * i) for i in range(4)]
    wanted = [both(*one) for one in given]
    streams = [torch.cuda.Stream() for _ in given]
    torch.cuda.synchronize()
    for _ in range(50):
        found = []
        for stream, one in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(both(*one))
        torch.cuda.synchronize()
        for results, expected in zip(found, wanted, strict=True):
            for one, other in zip(results, expected, strict=True):
                assert torch.equal(one, other)


def test_a_captured_call_runs_again_on_what_is_new() -> None:
    dy, z = pair(1000, 264)
    both(dy, z)  # planned
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both(dy, z)
    for _ in range(3):
        dy.normal_()
        for one in found:
            one.fill_(torch.nan)
        graph.replay()
        for one, other in zip(found, both(dy, z), strict=True):
            assert torch.equal(one, other)


def test_a_warm_call_plans_and_copies_nothing() -> None:
    dy, z = pair(64, 128)
    both(dy, z)
    before = warploom.counters.as_dict()
    both(dy, z)
    after = warploom.counters.as_dict()
    assert after.pop("launches") - before.pop("launches") == 1  # few rows are one part
    assert after == before


def test_compiled_code_calls_the_operator() -> None:
    dy, z = pair(512, 320)

    def gradients(dy: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dz, sums = both(dy, z)
        return dz * 2, sums + 1

    compiled = torch.compile(gradients, fullgraph=True)
    for found, expected in zip(compiled(dy, z), gradients(dy, z), strict=True):
        assert torch.equal(found, expected)


def test_torch_finds_no_fault_with_the_operator() -> None:
    dy, z = pair(70, 96)
    operator = torch.ops.warploom.activation_backward.default
    torch.library.opcheck(operator, (dy, z, "silu", True, None, None))
    torch.library.opcheck(operator, (dy, None, None, True, None, None))


def test_the_gpu_computes_what_the_reference_does() -> None:
    dy, z = pair(300, 200)
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        found = activation_backward(dy, z, activation, sums=True, out_dtype=torch.float32)
        wanted = activation_backward(
            dy.cpu(), z.cpu(), activation, sums=True, out_dtype=torch.float32
        )
        for one, other in zip(found, wanted, strict=True):
            assert one is not None and other is not None
            torch.testing.assert_close(one.cpu(), other, rtol=1e-5, atol=2e-5)
