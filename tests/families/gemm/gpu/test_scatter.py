"""Rows that are written where indices say, against float64: no other row of D may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import gemm_grouped as grouped
import gemm_scatter as scatter
import pytest
import torch
from gemm_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("scattered_built")]

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def scattered_built(
    build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]],
) -> dict[str, Artifact]:
    """The kernels of these tests, by name."""
    return build(scatter.KERNELS)


@pytest.mark.parametrize("shape", scatter.SHAPES, ids=str)
@pytest.mark.parametrize("kernel", scatter.PLAIN, ids=short)
def test_rows_are_written_where_indices_say_and_nowhere_else(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    scatter.verify(scatter.call(kernel, *shape))


@pytest.mark.parametrize("routing", grouped.ROUTINGS.values(), ids=grouped.ROUTINGS)
@pytest.mark.parametrize("kernel", scatter.GROUPED, ids=short)
def test_rows_of_groups_are_written_where_indices_say(
    kernel: KernelSpec, routing: grouped.Routing
) -> None:
    if routing.size == 1 and "scale_row" in kernel.name:
        pytest.skip("a scale of one row is one number, which another kernel takes")
    scatter.verify(scatter.grouped_call(kernel, routing))


@pytest.mark.parametrize("kernel", [scatter.PLAIN[0], scatter.PLAIN[13]], ids=short)
def test_more_tiles_than_multiprocessors(kernel: KernelSpec) -> None:
    """Staging buffers alternate from tile to tile."""
    scatter.verify(scatter.call(kernel, 8191, 1032, 193, seed=1))


@pytest.mark.parametrize(
    "kernel", [scatter.PLAIN[0], scatter.PLAIN[7], scatter.PLAIN[13]], ids=short
)
def test_bits_are_the_same_in_every_run(kernel: KernelSpec) -> None:
    made = scatter.call(kernel, 701, 520, 1160)
    first = scatter.verify(made).view(torch.int16).clone()
    for _ in range(200):
        made.d.room.fill_(-1)
        assert torch.equal(made.run().view(torch.int16), first)


@pytest.mark.parametrize("kernel", [scatter.PLAIN[0], scatter.GROUPED[3]], ids=short)
def test_one_graph_serves_all_indices(kernel: KernelSpec) -> None:
    if kernel in scatter.GROUPED:
        made = scatter.grouped_call(kernel, grouped.ROUTINGS["ragged"])
    else:
        made = scatter.call(kernel, 257, 264, 136)
    scatter.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    rows, rows_d = len(made.index), made.d.view.shape[0]
    others = [scatter.indices(rows, rows_d, made.index.dtype, seed) for seed in (5, 6)]
    for other in (*others, torch.full_like(made.index, -1), torch.full_like(made.index, rows_d)):
        made.index.copy_(other)
        made.d.room.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        scatter.assert_right(made)


@pytest.mark.parametrize("count", [1, 5, 64, 3000])
def test_a_layer_of_experts_returns_rows_to_their_tokens(count: int) -> None:
    """Kernels are chosen: the results are those of the same call without indices, moved."""
    generator = torch.Generator("cuda").manual_seed(count)
    ids = torch.rand(count, 16, device="cuda", generator=generator).topk(4).indices.int()
    offsets, order, inverse = warploom.route(ids, 16)
    rows = torch.randn(count * 4, 256, device="cuda", generator=generator).to(BF16)
    weight = torch.randn(16, 512, 256, device="cuda", generator=generator).to(BF16)
    share = torch.rand(count * 4, device="cuda", generator=generator)
    arguments = {"offs": offsets, "row_scale": share}
    sorted_rows = warploom.grouped_gemm(rows, weight.mT, **arguments)
    found = torch.full((count * 4, 512), torch.nan, device="cuda", dtype=BF16)
    warploom.grouped_gemm(rows, weight.mT, scatter=order, out=found, **arguments)
    assert torch.equal(found, sorted_rows[inverse.flatten().long()])
    assert torch.equal(
        found, warploom.grouped_gemm(rows, weight.mT, scatter=order.long(), **arguments)
    )


def test_warm_calls_take_the_indices_they_are_given() -> None:
    a, b = (torch.randn(96, 64, device="cuda").to(BF16) for _ in range(2))
    plain = warploom.gemm(a, b.t())
    for seed in range(5):
        index = torch.randperm(
            96, generator=torch.Generator("cuda").manual_seed(seed), device="cuda"
        )
        assert torch.equal(warploom.gemm(a, b.t(), scatter=index)[index], plain)
        out = torch.full((200, 96), 7.0, device="cuda", dtype=BF16)
        warploom.gemm(a, b.t(), scatter=index + 100, out=out)
        assert (out[:100] == 7).all() and (out[196:] == 7).all()
        assert torch.equal(out[100:196][index], plain)


def test_gradients_come_back_by_the_same_indices() -> None:
    a, b = (torch.randn(96, 64, device="cuda").to(BF16).requires_grad_() for _ in range(2))
    index = torch.randperm(96, device="cuda")
    index[3] = -1
    d = warploom.gemm(a, b.t(), activation="silu", scatter=index)
    dd = torch.randn_like(d)
    found = torch.autograd.grad(d, (a, b), dd)
    taken = dd[index.clamp(min=0)]
    taken[3] = 0
    wanted = torch.autograd.grad(warploom.gemm(a, b.t(), activation="silu"), (a, b), taken)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize(("m", "n", "k", "rows"), [(0, 8, 8, 5), (5, 8, 0, 9), (5, 8, 8, 0)])
def test_nothing_is_launched_for_what_is_empty(m: int, n: int, k: int, rows: int) -> None:
    a, b = torch.ones(m, k, device="cuda", dtype=BF16), torch.ones(k, n, device="cuda", dtype=BF16)
    index = torch.arange(m, device="cuda") + 1
    out = torch.full((rows, n), 7.0, device="cuda", dtype=BF16)
    warploom.gemm(a, b, bias=torch.full((n,), 2.0, device="cuda"), scatter=index, out=out)
    wanted = torch.full_like(out, 7.0)
    if k == 0:
        wanted[1 : m + 1] = 2
    assert torch.equal(out, wanted)
