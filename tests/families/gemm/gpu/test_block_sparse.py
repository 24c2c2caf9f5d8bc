"""Products of matrices that are sparse by blocks, against float64 of the blocks that count."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import gemm_sparse as sparse
import pytest
import torch
from gemm_cases import short
from processes import run

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm.block_masks import expanded

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sparse_built")]


@pytest.fixture(scope="module")
def sparse_built(
    build: Callable[[Sequence[KernelSpec]], dict[str, Artifact]],
) -> dict[str, Artifact]:
    """The kernels of these tests, by name."""
    return build(sparse.KERNELS)


@pytest.mark.parametrize("density", sparse.DENSITIES)
@pytest.mark.parametrize("shape", sparse.SHAPES.values(), ids=sparse.SHAPES)
@pytest.mark.parametrize("kernel", sparse.KERNELS, ids=short)
def test_blocks_that_count_are_multiplied_and_no_others(
    kernel: KernelSpec, shape: tuple[int, int, int], density: float
) -> None:
    sparse.verify(sparse.call(kernel, *shape, density))


@pytest.mark.parametrize("name", sparse.MUTANTS)
def test_a_kernel_that_misreads_a_list_is_caught(name: str) -> None:
    chosen = sparse.MUTANTS[name]
    sparse.verify(sparse.call(chosen.kernel, *chosen.shape, chosen.density))
    done = run(sys.executable, str(sparse.__file__), name, timeout=100)
    assert done.returncode == 0, f"{name}: {done.stdout}{done.stderr}"


@pytest.mark.parametrize("by", ["a", "b", "out"])
@pytest.mark.parametrize("column", [False, True], ids=["b row", "b col"])
def test_gradients_are_those_of_the_blocks_that_count(by: str, column: bool) -> None:
    m, n, k = 520, 392, 648
    a = torch.randn(m, k, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    b = torch.randn(n, k, device="cuda", dtype=torch.bfloat16)
    b = (b.t() if column else b.t().contiguous()).requires_grad_()
    rows, columns = {"a": (m, k), "b": (k, n), "out": (m, n)}[by]
    mask = torch.rand(-(-rows // 128), -(-columns // 128), device="cuda") < 0.5
    d = warploom.block_sparse_gemm(a, b, mask, sparse=by, alpha=2.0)
    dd = torch.randn_like(d)
    found = torch.autograd.grad(d, (a, b), dd)
    left, right = a.detach().double().requires_grad_(), b.detach().double().requires_grad_()
    counts = expanded(mask, rows, columns)
    exact = 2 * (left * counts if by == "a" else left) @ (right * counts if by == "b" else right)
    exact = exact * counts if by == "out" else exact
    for one, wanted in zip(
        found, torch.autograd.grad(exact, (left, right), dd.double()), strict=True
    ):
        assert (one.double() - wanted).abs().max() <= 2**-7 * wanted.abs().max()
        assert not one[wanted == 0].any()


def test_a_captured_graph_has_another_mask_in_each_replay() -> None:
    x = torch.ones(512, 512, device="cuda", dtype=torch.bfloat16)
    weight = torch.eye(512, device="cuda", dtype=torch.bfloat16)
    drop = warploom.functional.block_dropout_linear
    drop(x, weight, p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = drop(x, weight, p=0.5)
    seen = []
    for _ in range(3):
        graph.replay()
        blocks = y.view(4, 128, 4, 128)
        assert (blocks == blocks[:, :1, :, :1]).all()
        assert set(blocks[:, 0, :, 0].flatten().tolist()) <= {0.0, 2.0}
        seen.append(blocks[:, 0, :, 0].clone())
    assert not (torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2]))


def test_a_mask_is_read_when_a_graph_is_replayed() -> None:
    made = sparse.call(sparse.KERNELS[0], 520, 512, 1024, 0.5)
    sparse.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    for mask in (made.mask & (torch.rand(made.mask.shape, device="cuda") < 0.5), made.mask & False):
        made.mask.copy_(mask)
        made.d.room.fill_(-1)
        graph.replay()
        torch.cuda.synchronize()
        sparse.assert_within(made.d.view, *sparse.exact(made))


def test_results_are_the_same_in_every_run() -> None:
    for kernel in (sparse.KERNELS[0], sparse.KERNELS[11], sparse.KERNELS[19]):
        made = sparse.call(kernel, 3001, 2504, 328, 0.5)
        first = made.run().clone()
        for _ in range(5):
            assert torch.equal(made.run(), first)
