"""Threads, streams and graphs: launches that run at the same time share nothing they count in.

The kernel here takes tiles from a counter that is kept between launches. A lost or shared counter
leaves tiles unwritten, so out is NaN beforehand.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from attention_cases import SIMPLE
from cuda.bindings import driver

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.driver import check

pytestmark = pytest.mark.gpu
KERNEL = SIMPLE["dynamic"]
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(scope="module", autouse=True)
def built(build: Callable[[list[KernelSpec]], object]) -> None:
    build([KERNEL])


def operands(seed: int = 0, *, seq: int = 1009, batch: int = 2, device: int = 0) -> Operands:
    generator = torch.Generator(f"cuda:{device}").manual_seed(seed)

    def one() -> torch.Tensor:
        shape = (batch, 12, seq, KERNEL.operation.dim)  # type: ignore[attr-defined]
        return torch.randn(shape, device=generator.device, generator=generator).bfloat16()

    return one(), one(), one()


def attend(given: Operands, out: torch.Tensor | None = None) -> torch.Tensor:
    if out is not None:
        out.fill_(torch.nan)
    return warploom.attention(*given, causal=True, spec=KERNEL, out=out)


def in_threads(*works: Callable[[], object]) -> None:
    """Run each in a thread of its own, together; raise what one of them raises."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("planned", [False, True])
def test_a_thread_new_to_cuda_runs_attention(planned: bool) -> None:
    """The driver was asked about its stream before it had a context there."""
    given, out = operands(), torch.empty_like(operands()[0])
    expected = attend(given)
    plan = warploom.plan_attention(*given, causal=True, spec=KERNEL, out=out)
    out.fill_(torch.nan)
    torch.cuda.synchronize()
    run = plan if planned else warploom.attention
    in_threads(lambda: run(*given, causal=True, spec=KERNEL, out=out))
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_threads_on_their_default_streams_share_no_counter() -> None:
    """One handle stands for the default streams of all threads."""
    given = [operands(seed, seq=1500) for seed in (1, 2)]
    expected = [attend(one) for one in given]
    outs = [torch.empty_like(one) for one in expected]
    torch.cuda.synchronize()
    together, wrong = threading.Barrier(2, timeout=60), [0, 0]

    def work(i: int) -> None:
        stream = torch.cuda.ExternalStream(2)  # cudaStreamPerThread
        with torch.cuda.stream(stream):
            for _ in range(40):
                together.wait()
                attend(given[i], outs[i])
                stream.synchronize()
                wrong[i] += not torch.equal(outs[i], expected[i])

    in_threads(lambda: work(0), lambda: work(1))
    assert wrong == [0, 0]


def test_a_stream_that_gets_the_handle_of_an_older_one_has_a_counter_of_its_own() -> None:
    """The older stream's kernels may still run when its handle is given anew."""
    given = [operands(seed, seq=4001) for seed in (1, 2)]
    expected = [attend(one) for one in given]
    outs = [torch.empty_like(one) for one in expected]
    torch.cuda.synchronize()
    flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
    for _ in range(20):
        for one, out in zip(given, outs, strict=True):
            handle = check(driver.cuStreamCreate(flags))
            with torch.cuda.stream(torch.cuda.ExternalStream(int(handle))):
                attend(one, out)
            check(driver.cuStreamDestroy(handle))  # returns at once; the kernel runs on
        torch.cuda.synchronize()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


def test_a_graph_replays_beside_eager_calls_of_its_plan() -> None:
    given, eager = operands(), torch.empty_like(operands()[0])
    expected = attend(given)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    gc.collect()  # or another test's graph may die, and be reset, during this capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(given)
    for _ in range(40):
        captured.fill_(torch.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(one):
            graph.replay()
        with torch.cuda.stream(two):
            attend(given, eager)
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)
        assert torch.equal(eager, expected)


def test_branches_of_one_graph_share_no_counter() -> None:
    first, second = operands(1), operands(2)
    expected = attend(first), attend(second)
    side = torch.cuda.Stream()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            other = attend(second)
        own = attend(first)
        main.wait_stream(side)
    for _ in range(40):
        own.fill_(torch.nan)
        other.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(own, expected[0])
        assert torch.equal(other, expected[1])


def test_a_graph_may_hold_any_number_of_launches_and_follow_others() -> None:
    """Buffers for captures once ran out, and a new shape in one ended it."""
    given, fresh = operands(seq=130, batch=1), operands(seq=141, batch=1)
    expected = attend(given)
    gc.collect()
    graph, late = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.stack([attend(given) for _ in range(1100)])
    with torch.cuda.graph(late):
        fresh_out = attend(fresh)  # its kernel is loaded; its shape is new
    for _ in range(2):
        found.fill_(torch.nan)
        fresh_out.fill_(torch.nan)
        graph.replay()
        late.replay()
        torch.cuda.synchronize()
        assert bool((found == expected).all())
        assert torch.equal(fresh_out, attend(fresh))


def test_graph_trees_of_a_compiled_layer_find_no_memory_that_is_not_theirs() -> None:
    """What a first call keeps must not lie in the pool of the graph that it is recorded into."""
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    q, k, v = operands(seq=333)
    weight = torch.randn(q.shape[-1], q.shape[-1], device="cuda").bfloat16()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return warploom.attention(x @ weight, k, v, causal=True, spec=KERNEL.name) * 2

    compiled = torch.compile(layer, mode="reduce-overhead", fullgraph=True)
    with torch.no_grad():
        for seed in range(5):
            x = operands(seed, seq=333)[0]
            found = compiled(x).clone()
            torch.testing.assert_close(found, layer(x), rtol=2e-2, atol=2e-2)


def test_four_threads_on_four_streams_do_not_disturb_each_other() -> None:
    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            given = operands(seed, seq=517 + 64 * seed)
            out = torch.empty_like(given[0])
            expected = attend(given).clone()
            for _ in range(60):
                assert torch.equal(attend(given, out), expected)

    in_threads(*(lambda seed=seed: work(seed) for seed in range(4)))  # type: ignore[misc]


def test_a_capture_on_a_device_that_is_not_current_is_seen() -> None:
    """A kernel was loaded under it, which ended the capture."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = operands(device=1, seq=200)
    with torch.cuda.device(1):
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        gc.collect()
        with torch.cuda.graph(graph, stream=stream):
            given[0].add_(0)
            with (
                torch.cuda.device(0),
                pytest.raises(warploom.DeviceError, match="cuda:1 is capturing"),
            ):
                warploom.attention(*given, window=(7, 0))  # a kernel that nothing has loaded
        graph.replay()
    assert torch.isfinite(warploom.attention(*given, window=(7, 0))).all()
