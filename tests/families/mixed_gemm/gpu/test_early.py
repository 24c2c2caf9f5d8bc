"""Launches behind each other: the next begins under the last blocks of the one before.

A kernel reads its weight before the launch before it is done, so that the first slabs arrive under
that one. What it needs is that a weight is complete before the kernel that precedes begins, or that
this one does not let the next begin before it ends: torch's never do, and no kernel of Warploom's
writes a weight. All else it waits for.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch
from mixed_cases import SIMPLE

import warploom
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedWeight

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
WAYS = ("few", "some", "split", "shared")
SIDE = 2048
Write = Callable[[torch.Tensor, torch.Tensor], object]
WRITES: dict[str, Write] = {  # by a copy of the driver's, and by kernels
    "a copy": lambda to, source: to.copy_(source),
    "a kernel": lambda to, source: torch.bitwise_or(source, 0, out=to),
    "a kernel of few blocks": lambda to, source: [
        torch.bitwise_or(one, 0, out=out)
        for out, one in zip(to.chunk(16), source.chunk(16), strict=True)
    ],
}


def repeated(chain: arena.Chain, runs: int) -> None:
    """Run a chain, which is right, again and again: each result has the same bits."""
    first = [value.clone() for value in chain.run()]
    chain.assert_right()
    for _ in range(runs):
        assert all(map(torch.equal, chain.run(), first))


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("name", WAYS)
def test_a_launch_reads_what_the_one_before_wrote(name: str, m: int) -> None:
    repeated(arena.chain(SIMPLE[name], m, 512, 512, length=24), runs=10)


@pytest.mark.parametrize("name", ["few", "many"])
def test_waves_of_blocks_read_what_the_launch_before_wrote(name: str) -> None:
    repeated(arena.chain(SIMPLE[name], 520, SIDE, SIDE, length=4), runs=5)


@pytest.mark.parametrize("name", WAYS)
def test_a_launch_writes_nothing_that_the_one_before_still_reads(name: str) -> None:
    """Two results take turns: each launch overwrites what the one before it read."""
    chain = arena.chain(SIMPLE[name], 16, 512, 512, length=9)
    expected = [value.clone() for value in chain.run()]
    two = [torch.empty_like(chain.values[0]) for _ in range(2)]
    for _ in range(10):
        two[0].copy_(chain.values[0])
        torch.cuda._sleep(arena.PAUSE_CYCLES)
        for i in range(9):
            out = two[(i + 1) % 2]
            warploom.mixed_gemm(two[i % 2], chain.weight.packed, out=out, spec=chain.spec)
        assert torch.equal(two[1], expected[-1])


def test_an_epilogue_reads_what_the_launch_before_wrote() -> None:
    made = arena.call(SIMPLE["residual"], 16, SIDE, SIDE)
    first = arena.call(SIMPLE["few"], 16, SIDE, SIDE, seed=1)
    c = torch.empty(16, SIDE, dtype=torch.bfloat16, device="cuda")
    packed, of_first = made.weight.packed, first.weight.packed

    def run(apart: bool) -> torch.Tensor:
        c.fill_(torch.nan)
        torch.cuda._sleep(arena.PAUSE_CYCLES)
        warploom.mixed_gemm(first.a.view, of_first, out=c, spec=first.spec)
        if apart:
            torch.cuda.synchronize()
        listed = [("residual", c, 1.0)]
        return warploom.mixed_gemm(made.a.view, packed, epilogue=listed, spec=made.spec)

    expected = run(True).clone()
    assert expected.isfinite().all()
    for _ in range(10):
        assert torch.equal(run(False), expected)


class Changing:
    """A weight whose bytes are those of two others in turn, and products with it."""

    def __init__(self, kernel: KernelSpec, m: int, between: int = 0) -> None:
        of = cases.operation()
        self.kernel, self.between = kernel, between
        self.others = [arena.weight(of, SIDE, SIDE, seed).packed for seed in (1, 2)]
        self.packed = PackedWeight.from_tensors(
            {"data": torch.empty_like(self.others[0].data)}, self.others[0].metadata
        )
        self.a = torch.randn(m, SIDE, device="cuda").bfloat16()
        self.small = torch.randn(64, 64, device="cuda").bfloat16()
        self.expected = []
        for other in self.others:
            self.expected.append(self._multiply(other).clone())
            torch.cuda.synchronize()
        assert not torch.equal(*self.expected)

    def _multiply(self, weight: PackedWeight) -> torch.Tensor:
        return warploom.mixed_gemm(self.a, weight, spec=self.kernel)

    def run(self, write: Write, times: int) -> list[torch.Tensor]:
        """Write one weight and multiply by it, then the other, and so on."""
        found = []
        torch.cuda._sleep(arena.PAUSE_CYCLES)
        for i in range(times):
            write(self.packed.data, self.others[i % 2].data)
            for _ in range(self.between):  # they let the next launch begin
                warploom.gemm(self.small, self.small.t())
            found.append(self._multiply(self.packed))
        return found

    def assert_right(self, found: list[torch.Tensor]) -> None:
        """Assert that each product is with the weight that was written last."""
        for i, d in enumerate(found):
            assert torch.equal(d, self.expected[i % 2]), i


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("between", [0, 1, 3])
@pytest.mark.parametrize("name", WAYS)
def test_a_weight_that_was_just_written_is_the_one_that_is_multiplied(
    name: str, between: int, write: Write
) -> None:
    changing = Changing(SIMPLE[name], 16, between)
    for _ in range(3):
        changing.assert_right(changing.run(write, 12))


@pytest.mark.parametrize("between", [0, 1])
def test_a_weight_that_a_graph_writes_is_the_one_that_it_multiplies(between: int) -> None:
    changing = Changing(SIMPLE["few"], 16, between)
    changing.run(WRITES["a kernel"], 2)
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = changing.run(WRITES["a kernel"], 6)
    for _ in range(10):
        for d in found:
            d.fill_(torch.nan)
        graph.replay()
        changing.assert_right(found)


def test_a_weight_that_another_stream_wrote_is_seen_behind_its_event() -> None:
    changing = Changing(SIMPLE["few"], 16)
    side, main = torch.cuda.Stream(), torch.cuda.current_stream()
    for i in range(20):
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000)
            WRITES["a kernel"](changing.packed.data, changing.others[i % 2].data)
        warploom.gemm(changing.small, changing.small.t())
        main.wait_stream(side)
        found = warploom.mixed_gemm(changing.a, changing.packed, spec=changing.kernel)
        assert torch.equal(found, changing.expected[i % 2])
