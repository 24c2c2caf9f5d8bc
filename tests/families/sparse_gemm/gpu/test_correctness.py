"""Every element of y against float64, over extents that no tile divides."""

from __future__ import annotations

import pytest
import sparse_gemm_cases as cases
import torch
from rooms import assert_repeats
from sparse_gemm_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
# One row; k below a stage, of one and more; n of no vector; several waves.
EXTENTS = [
    (1, 64, 64),
    (3, 72, 16),
    (7, 1, 4112),
    (130, 1003, 96),
    (300, 520, 2080),
    (1031, 4096, 512),
]
# Rows and columns of a weight by which one tile of tokens is multiplied.
WHOLE = [(256, 128), (576, 1024), (1003, 2080)]


@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("extents", EXTENTS, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_element_is_right(kernel: KernelSpec, extents: tuple[int, int, int]) -> None:
    cases.made(kernel, *extents).verify()


@pytest.mark.parametrize(("pad", "shift"), [(8, 0), (16, 8), (1, 0), (13, 1), (0, 3)])
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_rows_of_any_pitch_and_address(kernel: KernelSpec, pad: int, shift: int) -> None:
    cases.made(kernel, 130, 200, 288, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("k", [64, 96, 192, 1056, 1104])  # stages: 1, 2, 3, 17 and 18
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_blocks_of_several_tiles(kernel: KernelSpec, k: int) -> None:
    m, n = 4099, 5003
    tokens, rows, _ = kernel.schedule.tile
    tiles = -(-m // tokens) * -(-n // rows)
    assert tiles > 2 * torch.cuda.get_device_properties(0).multi_processor_count
    cases.made(kernel, m, n, k).verify()


@pytest.mark.parametrize("extents", WHOLE, ids=str)
@pytest.mark.parametrize("kernel", cases.EVERY, ids=short)
def test_every_token_of_a_tile_is_summed_over_all_stages(
    kernel: KernelSpec, extents: tuple[int, int]
) -> None:
    """Long instructions still run when the next stage's metadata are loaded."""
    tokens, _, _ = kernel.schedule.tile
    cases.made(kernel, tokens, *extents).verify()


@pytest.mark.parametrize("kernel", cases.EVERY[:4], ids=short)
def test_results_have_the_same_bits_in_every_run(kernel: KernelSpec) -> None:
    made = cases.made(kernel, 600, 1000, 1024)
    wanted = made.run().view(torch.int16).clone()
    assert_repeats(lambda: [made.run().view(torch.int16)], [wanted], [made.guarded], runs=100)


def test_a_graph_is_replayed_on_other_contents() -> None:
    weight = warploom.sparsify(torch.randn(512, 512, device="cuda").bfloat16())
    x = torch.randn(64, 512, device="cuda").bfloat16()
    out = warploom.sparse_gemm(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        warploom.sparse_gemm(x, weight, out=out)
    x.normal_()
    graph.replay()
    assert torch.equal(out, warploom.sparse_gemm(x, weight))


def test_columns_without_values_are_not_read() -> None:
    """NaN in places of x that no value of the weight stands for does not reach y."""
    dense = torch.zeros(64, 64, device="cuda").bfloat16()
    dense[:, 0:64:4] = dense[:, 2:64:4] = 1
    weight = warploom.SparseWeight.from_dense(dense)
    x = torch.full((8, 64), float("nan"), device="cuda").bfloat16()
    x[:, 0:64:4] = x[:, 2:64:4] = 1
    assert (warploom.sparse_gemm(x, weight) == 32).all()
