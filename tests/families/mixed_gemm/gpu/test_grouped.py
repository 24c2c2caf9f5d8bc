"""Grouped GEMMs with quantized weights against float64, over routings that no tile divides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import mixed_grouped as grouped
import pytest
import torch
from gemm_grouped import Routing
from processes import run
from product_arena import assert_within

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families.gemm import MOST_GROUPS
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts
from warploom.runtime.families.mixed_gemm.grouped_call import GroupedMixedCall

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped_built")]


@pytest.fixture(scope="module")
def grouped_built(
    build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]],
) -> dict[str, Artifact]:
    """The kernels of these tests, by name."""
    return build(grouped.KERNELS)


@pytest.mark.parametrize("routing", grouped.ROUTINGS.values(), ids=grouped.ROUTINGS)
@pytest.mark.parametrize("kernel", grouped.KERNELS, ids=grouped.cases.short)
def test_groups_are_multiplied_by_their_weights(kernel: KernelSpec, routing: Routing) -> None:
    if routing.groups == MOST_GROUPS and kernel not in grouped.KERNELS[::6]:
        pytest.skip("a reference takes seconds: other kernels have this routing")
    if routing.size == 1 and "scale_row" in kernel.name:
        pytest.skip("a scale of one row is one number, which another kernel takes")
    grouped.verify(grouped.call(kernel, routing))


@pytest.mark.parametrize("kernel", grouped.KERNELS[:4], ids=grouped.cases.short)
def test_the_k_of_gpt_oss_ends_within_a_slab(kernel: KernelSpec) -> None:
    grouped.verify(grouped.call(kernel, Routing(97, 16, "skewed"), n=1440, k=2880))


@pytest.mark.parametrize("name", grouped.MUTANTS)
def test_a_kernel_that_takes_a_neighbour_for_its_own_is_caught(name: str) -> None:
    chosen = grouped.MUTANTS[name]
    grouped.verify(grouped.call(chosen.kernel, chosen.routing))
    done = run(sys.executable, str(grouped.__file__), name, timeout=100)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "kernel", [grouped.KERNELS[0], grouped.KERNELS[4], grouped.KERNELS[12]], ids=grouped.cases.short
)
def test_one_graph_serves_all_routings(kernel: KernelSpec) -> None:
    made = grouped.call(kernel, grouped.ROUTINGS["ragged"])
    grouped.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    for seed, how in enumerate(("even", "skewed", "one"), 1):
        again = grouped.call(kernel, Routing(701, 9, how), seed=seed)
        made.offs.copy_(again.offs)
        made.a.view.copy_(again.a.view)
        made.d.room.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert made.d.untouched_outside()
        exact, bound = made.exact()
        right = exact.isnan() | ((made.d.view.double() - exact).abs() <= bound)
        assert right.all()


@pytest.mark.parametrize(
    "ends",
    [
        [5, 3, 900, -4, 100, 2**31 - 1],
        [-5] * 6,
        [800] * 6,
        [100, 200, 150, 300, 250, 700],
        [-(2**31), 2**31 - 1, 0, 0, 0, 0],
    ],
    ids=str,
)
def test_offsets_that_only_the_device_sees_are_clamped(ends: list[int]) -> None:
    """Whatever they are, nothing outside of D is written, and nothing hangs."""
    offs = torch.tensor(ends, device="cuda", dtype=torch.int32)
    clamped = offs.clamp(0, 700).cummax(0).values.to(torch.int32)
    for kernel in (grouped.KERNELS[0], grouped.KERNELS[3], grouped.KERNELS[12]):
        made = grouped.call(kernel, Routing(700, 6, "even", 0))
        made.offs.copy_(offs)
        made.d.room.fill_(-1)
        d = made.run()
        torch.cuda.synchronize()
        assert made.d.untouched_outside()
        made.offs.copy_(clamped)
        exact, bound = made.exact()
        last = int(clamped[-1])
        assert_within(d[:last], exact[:last], bound[:last])


def test_results_are_the_same_in_every_run_and_on_another_stream() -> None:
    for kernel in (grouped.KERNELS[0], grouped.KERNELS[4], grouped.KERNELS[12]):
        made = grouped.call(kernel, grouped.ROUTINGS["more tiles than multiprocessors"])
        made.d.room.fill_(-1)
        first = made.run().clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(5):
                assert torch.equal(made.run().view(torch.int16), first.view(torch.int16))
        torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("rows", [1, 7, 20, 40, 130])
@pytest.mark.parametrize("kind", ["mxfp4", "int4"])
def test_the_kernel_that_is_chosen_is_right(rows: int, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    groups, n, k = 12, 160, 224
    offs = Routing(rows * groups, groups, "skewed").offsets(generator)
    a = torch.randn(rows * groups, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(groups, n, k, device="cuda", generator=generator)
    packed = PackedExperts.quantize(w, kind, group=32)
    bias = torch.randn(groups, n, device="cuda", generator=generator)
    last = int(offs[-1])
    for keywords in (
        {},
        {"bias": bias, "gate": "swiglu_oai"},
        {"bias": bias, "gate": "swiglu_oai", "gate_alpha": 0.5, "gate_limit": 1.5},
    ):
        call = GroupedMixedCall(a, packed.slabs, offs, packed.metadata, **keywords)
        d = warploom.grouped_mixed_gemm(a, packed, offs=offs, **keywords)
        within = [
            ((d.double() - exact).abs() <= bound)[:last].all()
            for exact, bound in map(call.bound, ("sums", "weights"))
        ]
        assert any(within)
