"""Streams, graphs, compilers, checkpoints: gradients obey the rules of every call."""

from __future__ import annotations

import gc
from typing import Any

import attention_backward_arena as arena
import attention_backward_cases as cases
import pytest
import torch
from attention_backward_cases import SIMPLE, operation
from attention_cases import MASKS, Shape
from torch.utils.checkpoint import checkpoint
from watched import CYCLES, behind_a_kernel, launched, no_synchronization

import warploom
from warploom.errors import DeviceError, ProblemError

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
SHAPE = Shape(2, 20, 4, 517, 517)
Tensors = tuple[torch.Tensor, ...]


def make(name: str, seed: int = 0) -> arena.Pass:
    """A pass of one of the simple kernels, with its mask and its kind of lengths."""
    kernel = SIMPLE[name]
    if operation(kernel).lengths == "packed":
        lengths = [65, 1, 128, 63, 200]
        return arena.packed(kernel, lengths, lengths, seed=seed, causal="bottom_right")
    return arena.make(kernel, SHAPE, seed=seed, **MASKS[operation(kernel).mask][0])


def leaves(seed: int = 0, seq: int = 257) -> list[torch.Tensor]:
    """Fresh q, k and v of which gradients are wanted: four query heads over two."""
    generator = torch.Generator("cuda").manual_seed(seed)
    shapes = ((2, seq, 4, 64), (2, seq, 2, 64), (2, seq, 2, 64))
    made = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    return [tensor.transpose(1, 2).requires_grad_() for tensor in made]


def attention(*given: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """Causal attention whose gradients are bit-equal from run to run."""
    options = {"causal": True, "deterministic": True, **keywords}
    result: torch.Tensor = warploom.attention(*given, **options)  # type: ignore[call-overload]
    return result


def gradients(given: list[torch.Tensor], dout: torch.Tensor) -> Tensors:
    """The gradients of `attention`, as they are without anything special."""
    return torch.autograd.grad(attention(*given), given, dout)


# ---- CUDA graphs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SIMPLE)
def test_a_captured_pass_replays_on_new_contents(name: str) -> None:
    made = make(name)
    made.run()
    gc.collect()  # or another test's graph may die, and be reset, during this capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = made.run()
    for seed in (1, 2):
        fresh = make(name, seed)
        for to, source in zip(made.read, fresh.read, strict=True):
            to.copy_(source)
        for guarded in made.gradients:
            guarded.room.fill_(-1)
        graph.replay()
        arena.assert_right(made, found)
        assert all(guarded.untouched_outside() for guarded in made.gradients)


def test_forward_and_backward_are_captured_together() -> None:
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            gradients(given, dout)
    torch.cuda.current_stream().wait_stream(stream)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gradients(given, dout)
    for seed in (1, 2):
        fresh = leaves(seed)
        with torch.no_grad():
            for to, source in zip((*given, dout), (*fresh, torch.randn_like(dout)), strict=True):
                to.copy_(source)
        graph.replay()
        for one, wanted in zip(found, gradients(fresh, dout), strict=True):
            assert torch.equal(one, wanted)


def test_torch_makes_graphed_callables_of_it() -> None:
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    sample = tuple(tensor.detach().clone().requires_grad_() for tensor in given)
    gc.collect()
    graphed = torch.cuda.make_graphed_callables(attention, sample)
    for seed in (1, 2):
        fresh = leaves(seed)
        found = torch.autograd.grad(graphed(*fresh), fresh, dout)
        for one, wanted in zip(found, gradients(fresh, dout), strict=True):
            assert torch.equal(one, wanted)


def test_a_first_pass_during_capture_is_refused() -> None:
    fields = {"q_tile": 64, "kv_tile": 64, "stages": 3}
    made = arena.make(cases.spec(64, fields, mask="causal"), SHAPE, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(DeviceError, match="capturing"):
        made.run()
    arena.verify(made)


# ---- Streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["causal", "packed", "deterministic"])
def test_two_streams_do_not_share_what_a_launch_needs(name: str) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    passes = [make(name, seed) for seed in (1, 2)]
    for made in passes:
        made.run()
    torch.cuda.synchronize()
    for _ in range(50):
        for stream, made in zip(streams, passes, strict=True):
            with torch.cuda.stream(stream):
                made.run()
    torch.cuda.synchronize()
    for made in passes:
        dq, dk, dv = (guarded.view for guarded in made.gradients)
        arena.assert_right(made, (dq, dk, dv))


@pytest.mark.parametrize("name", ["none", "deterministic"])
def test_gradients_wait_for_what_their_stream_does_before(name: str) -> None:
    made = make(name)
    source = made.dout.view.clone()
    made.dout.view.fill_(torch.nan)
    made.run()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(CYCLES)
        made.dout.view.copy_(source)
        after = arena.clones(made.run())
    stream.synchronize()
    arena.assert_right(made, after)


def test_passes_one_after_the_other_see_each_others_results() -> None:
    """Kernels may start early, under the last blocks of the one before: they must still wait."""
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    dq = gradients(given, dout)[0]
    wanted = [one.clone() for one in gradients(given, dq)]
    for _ in range(50):
        first = gradients(given, dout)
        for one, expected in zip(gradients(given, first[0]), wanted, strict=True):
            assert torch.equal(one, expected)


def test_no_pass_waits_for_the_gpu() -> None:
    passes = [make(name) for name in SIMPLE]
    for made in passes:
        made.run()
    given = leaves()
    expanded = torch.ones((), device="cuda").bfloat16().expand(2, 4, 257, 64)
    gradients(given, expanded)
    with no_synchronization():
        for made in passes:
            made.run()
        gradients(given, expanded)  # whose dout is copied
    behind_a_kernel(lambda: [made.run() for made in passes])
    for made in passes:
        dq, dk, dv = (guarded.view for guarded in made.gradients)
        arena.assert_right(made, (dq, dk, dv))


@pytest.mark.parametrize("name", SIMPLE)
def test_only_our_kernels_and_memsets_run_and_as_many_for_any_size(name: str) -> None:
    kernel = SIMPLE[name]
    counts = set()
    for batch, length in ((1, 65), (7, 1021)):
        if operation(kernel).lengths == "packed":
            made = arena.packed(kernel, [length] * batch, [length] * batch, causal="top_left")
        else:
            keywords = MASKS[operation(kernel).mask][0]
            made = arena.make(kernel, Shape(batch, 4, 2, length, length), **keywords)
        made.run()
        ran = launched(made.run)
        ours = [one for one in ran if one.startswith(kernel.name)]
        memsets = [one for one in ran if "Memset" in one or "FillFunctor" in one]
        assert len(ours) + len(memsets) == len(ran), ran
        counts.add((len(ours), len(memsets)))
    assert len(counts) == 1  # the size is no matter
    kernels, filled = counts.pop()
    assert 1 <= kernels <= 4
    assert filled <= 4


# ---- Plans ---------------------------------------------------------------------------------------


def test_a_pass_is_planned_once_and_for_other_tensors_and_numbers() -> None:
    passes = [make("causal", seed) for seed in (1, 2, 3)]
    passes[0].run()
    before = warploom.counters.as_dict()
    for scale, made in enumerate(passes * 2, 1):
        made.forward.keywords["scale"] = 0.1 * scale
        arena.fill(made, scale)  # lse is of this scale
        arena.verify(made)
    after = warploom.counters.as_dict()
    assert (after["plans"], after["copies"]) == (before["plans"], before["copies"])
    assert after["launches"] - before["launches"] in (6, 12, 18, 24)  # as many for each pass


def test_gradients_are_those_of_the_kernel_that_torch_is_set_to() -> None:
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    wanted = gradients(given, dout)
    out = attention(*given, deterministic=None)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        found = torch.autograd.grad(out, given, dout)
    finally:
        torch.use_deterministic_algorithms(before)
    assert all(map(torch.equal, found, wanted))


def test_a_second_derivative_is_refused() -> None:
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    found = torch.autograd.grad(attention(*given), given, dout, create_graph=True)
    assert all(map(torch.equal, found, gradients(given, dout)))
    with pytest.raises(ProblemError, match="differentiable once"):
        found[0].sum().backward()


# ---- Checkpoints, compilers, autocast ------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_comes_to_the_same_gradients(reentrant: bool) -> None:
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    checkpoint(attention, *given, use_reentrant=reentrant).backward(dout)
    for operand, wanted in zip(given, gradients(given, dout), strict=True):
        assert operand.grad is not None
        assert torch.equal(operand.grad, wanted)


def test_what_is_saved_may_be_kept_on_the_cpu() -> None:
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    with torch.autograd.graph.save_on_cpu():
        out = attention(*given)
    found = torch.autograd.grad(out, given, dout)
    assert all(map(torch.equal, found, gradients(given, dout)))


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_torch_compile_differentiates_without_a_graph_break(backend: str) -> None:
    weight = torch.randn(64, 64, device="cuda").bfloat16() / 8
    packed = make("packed").forward
    offsets = {name: value for name, value in packed.keywords.items() if name != "causal"}

    def layer(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q @ weight, k, v).transpose(1, 2).flatten(2) * 2

    def recomputed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(layer, q, k, v, use_reentrant=False)
        return result * 1

    def sequences(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, k, v, causal="bottom_right", **offsets) * 2

    fixed = leaves()
    of_lengths = [tensor.detach().requires_grad_() for tensor in packed.given]
    for function, given in ((layer, fixed), (recomputed, fixed), (sequences, of_lengths)):
        out = function(*given)
        dout = torch.randn_like(out)
        wanted = torch.autograd.grad(out, given, dout)
        compiled = torch.compile(function, fullgraph=True, backend=backend)
        found = torch.autograd.grad(compiled(*given), given, dout)
        for one, expected in zip(found, wanted, strict=True):
            assert torch.allclose(one, expected, atol=2e-2, rtol=2e-2)


def test_torch_finds_no_fault_with_the_operators() -> None:
    given = leaves()
    warploom.attention(*given)  # the operators are registered when the runtime is first used
    function = ("equal", None, None, None, 0.2, None, None, None, None)
    torch.library.opcheck(
        torch.ops.warploom.attention.default, (*given, *function, None, True, None)
    )
    plain = [tensor.detach() for tensor in given]
    out, lse = torch.ops.warploom.attention(*plain, *function, None, None, None)
    for dlse in (None, torch.randn_like(lse)):
        arguments = (torch.randn_like(out), dlse, *plain, out, lse, *function, True, None)
        torch.library.opcheck(torch.ops.warploom.attention_backward.default, arguments)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_lowers_operands_and_raises_gradients(dtype: torch.dtype) -> None:
    given = [tensor.detach().float().requires_grad_() for tensor in leaves()]
    with torch.autocast("cuda", dtype=dtype):
        out = attention(*given)
        assert out.dtype == dtype
    found = torch.autograd.grad(out, given, torch.ones_like(out))
    lowered = [tensor.detach().to(dtype).requires_grad_() for tensor in given]
    wanted = gradients(lowered, torch.ones_like(out))
    for one, expected in zip(found, wanted, strict=True):
        assert torch.equal(one, expected.float())


def test_gradients_are_computed_where_the_tensors_are_and_not_on_the_current_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here")
    given, dout = leaves(), torch.randn(2, 4, 257, 64, device="cuda").bfloat16()
    wanted = gradients(given, dout)
    there = [tensor.detach().to("cuda:1").requires_grad_() for tensor in given]
    for stream in (torch.cuda.default_stream(1), torch.cuda.Stream(1)):
        stream.wait_stream(torch.cuda.current_stream(1))
        with torch.cuda.stream(stream), torch.cuda.device(0):
            found = gradients(there, dout.to("cuda:1"))
        stream.synchronize()
        for one, expected in zip(found, wanted, strict=True):
            assert torch.equal(one.to("cuda:0"), expected)
        assert torch.cuda.current_device() == 0


def test_a_first_pass_loads_every_entry_of_its_kernel() -> None:
    kernel = cases.chosen(96, mask="none", deterministic=True)
    loaded = warploom.load(kernel)
    assert len(loaded.artifact.resources) > 1
    assert all(entry.startswith(kernel.name) for entry in loaded.artifact.resources)
