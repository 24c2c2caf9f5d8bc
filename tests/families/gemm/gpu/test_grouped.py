"""Grouped GEMMs against float64, over routings that no tile divides."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import gemm_grouped as grouped
import pytest
import torch
from gemm_cases import short
from processes import run
from product_arena import assert_within
from torch.nn import functional

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm.grouped_call import GroupedCall

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("grouped_built")]


@pytest.fixture(scope="module")
def grouped_built(
    build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]],
) -> dict[str, Artifact]:
    """The kernels of these tests, by name."""
    return build(grouped.KERNELS)


@pytest.mark.parametrize("routing", grouped.ROUTINGS.values(), ids=grouped.ROUTINGS)
@pytest.mark.parametrize("kernel", grouped.KERNELS, ids=short)
def test_groups_are_multiplied_and_nothing_else(
    kernel: KernelSpec, routing: grouped.Routing
) -> None:
    if routing.size == 1 and "scale_row" in kernel.name:
        pytest.skip("a scale of one row is one number, which another kernel takes")
    grouped.verify(grouped.call(kernel, routing))


@pytest.mark.parametrize("kernel", grouped.BLOCKS_OF_K, ids=short)
def test_block_scales_of_groups_of_k_are_read_wherever_they_lie(kernel: KernelSpec) -> None:
    for name in ("ragged", "skewed", "most are empty", "a row"):
        grouped.verify(grouped.call(kernel, grouped.ROUTINGS[name], seed=3, along_k=True))


@pytest.mark.parametrize("k", [400, 2880, 64])
@pytest.mark.parametrize("kernel", grouped.BLOCKS, ids=short)
def test_block_scales_are_read_wherever_they_lie(kernel: KernelSpec, k: int) -> None:
    """Side by side along rows, by TMA from any row of a group on, or along k, by warps."""
    for routing in (grouped.ROUTINGS["ragged"], grouped.ROUTINGS["skewed"]):
        grouped.verify(grouped.call(kernel, routing, seed=k, k=k, along_k=True))
        grouped.verify(grouped.call(kernel, routing, seed=k, k=k))


@pytest.mark.parametrize(
    "kernel", [grouped.ROWS[0], grouped.ROWS[6], grouped.ROWS[14], *grouped.MASKED], ids=short
)
def test_k_of_gpt_oss_is_no_whole_number_of_tiles(kernel: KernelSpec) -> None:
    grouped.verify(grouped.call(kernel, grouped.ROUTINGS["ragged"], k=2880))


@pytest.mark.parametrize("kernel", [grouped.MASKED[2], grouped.MASKED[5]], ids=short)
def test_one_graph_serves_all_lengths_and_clamps_them(kernel: KernelSpec) -> None:
    made = grouped.call(kernel, grouped.ROUTINGS["ragged"])
    grouped.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    each = made.a.view.shape[0] // len(made.offs)
    grouped.fill(made.a.view, torch.Generator("cuda").manual_seed(1))
    if "scale_a" in made.keywords:
        made.keywords["scale_a"].fill_(0.75)
    for lengths in ([0] * 9, [each] * 9, [-(2**31), 2**31 - 1, -1, each + 1, 5, 0, each, 1, 2]):
        given = torch.tensor(lengths, device="cuda", dtype=torch.int32)
        made.offs.copy_(given)
        made.d.room.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert made.d.untouched_outside()
        made.offs.copy_(given.clamp(0, each))
        counted, (exact, bound) = made.call.counted(), made.exact()
        assert (made.d.view[~counted].view(torch.int16) == -1).all()
        assert_within(made.d.view[counted], exact[counted], bound[counted])


@pytest.mark.parametrize("name", grouped.MUTANTS)
def test_a_kernel_that_takes_a_neighbour_for_its_own_is_caught(name: str) -> None:
    chosen = grouped.MUTANTS[name]
    grouped.verify(grouped.call(chosen.kernel, chosen.routing))
    done = run(sys.executable, str(grouped.__file__), name, timeout=100)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize(
    "kernel",
    [grouped.ROWS[0], grouped.ROWS[7], grouped.BY_K[0], grouped.WHOLE_K[0]],
    ids=short,
)
def test_one_graph_serves_all_routings(kernel: KernelSpec) -> None:
    routing = grouped.ROUTINGS["ragged"]
    made = grouped.call(kernel, routing)
    grouped.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    for seed, how in enumerate(("even", "skewed", "one"), 1):
        other = grouped.Routing(routing.size, routing.groups, how)
        again = grouped.call(kernel, other, seed=seed)  # poisoned where this one has no groups
        made.offs.copy_(again.offs)
        made.a.view.copy_(again.a.view)
        made.b.view.copy_(again.b.view)
        made.d.room.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        assert made.d.untouched_outside()
        found, (exact, bound) = made.d.view.clone(), made.exact()
        right = exact.isnan() | ((found.double() - exact).abs() <= bound)
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
    for kernel in (grouped.ROWS[0], grouped.ROWS[5], grouped.ROWS[6]):
        made = grouped.call(kernel, grouped.Routing(700, 6, "even", 0))
        made.offs.copy_(offs)
        made.d.room.fill_(-1)
        d = made.run()
        torch.cuda.synchronize()
        assert made.d.untouched_outside()
        made.offs.copy_(clamped)
        exact, bound = made.exact()
        last = int(clamped[-1])
        assert_within(d[:last], exact[:last], bound[:last])
    for kernel in (grouped.BY_K[0], grouped.WHOLE_K[0], grouped.BLOCKS_OF_K[0]):
        by_k = grouped.call(kernel, grouped.Routing(700, 6, "even", 0))
        by_k.offs.copy_(offs)
        by_k.d.room.fill_(-1)
        by_k.run()
        torch.cuda.synchronize()
        assert by_k.d.untouched_outside()


def test_results_are_the_same_in_every_run_and_on_another_stream() -> None:
    for kernel in (grouped.ROWS[0], grouped.ROWS[2], grouped.BY_K[2]):
        made = grouped.call(kernel, grouped.ROUTINGS["more tiles than multiprocessors"])
        made.d.room.fill_(-1)
        first = made.run().clone()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        integers = {2: torch.int16, 4: torch.int32}[first.dtype.itemsize]
        with torch.cuda.stream(stream):
            for _ in range(5):
                assert torch.equal(made.run().view(integers), first.view(integers))
        torch.cuda.current_stream().wait_stream(stream)


@pytest.mark.parametrize("rows", [1, 7, 40, 130, 700])
@pytest.mark.parametrize("columns", [256, 129])
def test_the_kernel_that_is_chosen_is_right(rows: int, columns: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    groups, k = 12, 200
    offs = grouped.Routing(rows * groups, groups, "skewed").offsets(generator)
    a = torch.randn(rows * groups, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(groups, columns, k, device="cuda", generator=generator).bfloat16()
    bias = torch.randn(groups, columns, device="cuda", generator=generator)
    last = int(offs[-1])
    for keywords in ({}, {"bias": bias, "activation": "gelu"}):
        call = GroupedCall(a, w.mT, offs, **keywords)
        exact, bound = call.bound()
        d = warploom.grouped_gemm(a, w.mT, offs=offs, **keywords)
        assert_within(d[:last], exact[:last], bound[:last])


def test_rows_that_are_views_are_read_where_they_lie() -> None:
    """Any row stride of 16 bytes; others are copied, as is a matrix of stride 0."""
    room = torch.randn(300, 3 * 128, device="cuda").bfloat16()
    w = torch.randn(1, 64, 128, device="cuda").bfloat16().expand(4, 64, 128)
    offs = torch.tensor([10, 10, 200, 300], device="cuda", dtype=torch.int32)
    for a in (room[:, 128:256], room.t()[:128].t(), room[:, 1:129], torch._neg_view(room[:, :128])):
        before = warploom.counters.copies
        exact, bound = GroupedCall(a.resolve_neg(), w.contiguous().mT, offs).bound()
        assert_within(warploom.grouped_gemm(a, w.mT, offs=offs), exact, bound)
        assert warploom.counters.copies == before + 1 + (a.is_neg() or a.data_ptr() % 16 != 0)


def test_gradients_of_a_sum_are_those_of_all_groups() -> None:
    """Of groups of k: autograd expands a number to all matrices."""
    offs = torch.tensor([10, 10, 200, 256], device="cuda", dtype=torch.int32)
    a = torch.randn(256, 128, device="cuda").bfloat16().requires_grad_()
    b = torch.randn(256, 64, device="cuda").bfloat16().requires_grad_()
    warploom.grouped_gemm(a.t(), b, offs=offs).sum().backward()
    for one, other in ((a, b), (b, a)):
        exact = other.detach().double().sum(1, keepdim=True).expand(one.shape)
        torch.testing.assert_close(one.grad.double(), exact, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_the_groups(compiled: bool) -> None:
    torch.manual_seed(0)
    rows, groups, n, k = 1000, 7, 256, 192
    generator = torch.Generator("cuda").manual_seed(0)
    offs = grouped.Routing(rows, groups, "skewed").offsets(generator)
    a = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(groups, n, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    bias = torch.randn(groups, n, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def call(a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return warploom.grouped_gemm(a, w.mT, offs=offs, bias=bias, gate="silu")

    d = (torch.compile(call, fullgraph=True) if compiled else call)(a, w, bias)
    dd = torch.randn_like(d)
    found = torch.autograd.grad(d, (a, w, bias), dd)
    wide = [one.detach().double().requires_grad_() for one in (a, w, bias)]
    last = int(offs[-1])
    each = torch.arange(last, device="cuda", dtype=torch.int32)
    group = torch.searchsorted(offs, each, right=True)
    x = torch.einsum("sk,snk->sn", wide[0][:last], wide[1][group]) + wide[2][group]
    exact = functional.silu(x[:, : n // 2]) * x[:, n // 2 :]
    wanted = torch.autograd.grad(exact, wide, dd[:last].double())
    for one, other in zip(found, wanted, strict=True):
        assert (one.double() - other).abs().max() <= 2**-6 * other.abs().max()
    assert not found[0][last:].any()


def test_torchs_function_runs_these_kernels() -> None:
    torch.manual_seed(0)
    a = torch.randn(500, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(5, 256, 192, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    offs = torch.tensor([50, 50, 333, 400, 500], device="cuda", dtype=torch.int32)
    exact = functional.grouped_mm(a, w.mT, offs=offs)
    dd = torch.randn_like(exact)
    wanted = (exact, *torch.autograd.grad(exact, (a, w), dd))
    before = warploom.counters.launches
    with warploom.grouped_mm.activate():
        d = functional.grouped_mm(a, w.mT, offs=offs)
        found = (d, *torch.autograd.grad(d, (a, w), dd))
        assert warploom.counters.launches == before + 3
        compiled = torch.compile(functional.grouped_mm, fullgraph=True)
        assert torch.equal(compiled(a, w.mT, offs=offs), d)
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 2**-6 * other.abs().max()
