"""Block-scaled products against float64 of dequantised operands, and what calls do with them."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import gemm_arena as arena
import gemm_cases as cases
import gemm_chosen
import gemm_wider as wider
import pytest
import torch
from gemm_cases import SHAPES, short

import warploom
from warploom.generator.families.gemm import FAMILY, GemmOperation, GemmSchedule, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import choose
from warploom.runtime.families.gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]

# K / 128 is 5 (torch was once wrong where it is no multiple of 4), the last block of k is short,
# and N is no multiple of 128: of 192 columns, a gate's and an up's 96, a block straddles both.
ODD = {
    "five blocks of k": (64, 576, 640),
    "five blocks, the last short": (129, 192, 520),
    "a short block of n": (17, 2112, 1000),
    "gate and up of 192": (61, 384, 1160),  # the second block has 64 columns of either
    "many blocks": (300, 1032, 4200),
}
KERNELS = [*wider.SCALED]


@pytest.mark.parametrize("shape", [*SHAPES.values(), *ODD.values()], ids=[*SHAPES, *ODD])
@pytest.mark.parametrize("kernel", KERNELS, ids=short)
def test_no_block_is_scaled_by_the_scale_of_another(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    for seed in range(2):  # whose scales lie otherwise
        arena.verify(arena.call(kernel, *cases.fitting(shape, kernel), seed=seed))


@pytest.mark.parametrize("shape", [(3, 200, 1160), (61, 576, 4200), (300, 1032, 640)], ids=str)
@pytest.mark.parametrize("kernel", gemm_chosen.BLOCK_SCALED, ids=short)
def test_what_the_model_chooses_from_is_right(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    for seed in range(2):  # by TMA's copies of scales, and by those of warps
        arena.verify(arena.call(kernel, *cases.fitting(shape, kernel), seed=seed))


@pytest.mark.parametrize("m", [1, 3, 6, 130])
@pytest.mark.parametrize("scales", ["row_block", "row_row"])
def test_scales_of_casts_come_by_tma_whatever_their_number(scales: str, m: int) -> None:
    """Each column begins at 16 bytes; what fills these is NaN here, and scales nothing."""
    kernel = gemm_chosen.block_scaled(scales)[0]
    made = arena.call(kernel, m, 1032, 640)
    for _, scale in made.scales[: 1 if scales == "row_block" else 2]:
        assert scale.stride(-1) % 4 == 0 and scale.data_ptr() % 16 == 0
    arena.verify(made)


@pytest.mark.parametrize("batches", wider.BATCHES.values(), ids=wider.BATCHES)
@pytest.mark.parametrize("shape", [(257, 136, 520), (1, 512, 640), (61, 200, 193)], ids=str)
@pytest.mark.parametrize("kernel", wider.SCALED_BATCHED, ids=short)
def test_no_batch_has_the_block_scales_of_another(
    kernel: KernelSpec,
    shape: tuple[int, int, int],
    batches: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    arena.verify(arena.call(kernel, *cases.fitting(shape, kernel), batches=batches))


@pytest.mark.parametrize("scales", ["row_block", "row_row"])
@pytest.mark.parametrize("m", [1, 3, 16, 33, 100, 128, 200, 512, 1025])
@pytest.mark.parametrize("weight", [(576, 7168), (2112, 1536), (384, 640)], ids=str)
def test_the_table_chooses_a_kernel_for_block_scales_that_is_right(
    weight: tuple[int, int], m: int, scales: str
) -> None:
    n, k = weight
    operation = replace(
        cast("GemmOperation", wider.SCALED[0].operation),
        block_scales=scales,  # type: ignore[arg-type]
    )
    shape = GemmShape(m, n, k)
    kernel = choose(operation, shape, requires=FAMILY.table.required(operation, shape)).spec
    made = arena.call(kernel, m, n, k, seed=m)
    pair = dict(made.scales)
    d = warploom.gemm(made.a.view, made.b.view, **pair)
    arena.assert_within(d, *reference.gemm_bound(made.a.view, made.b.view, made.items, d.dtype))
    assert warploom.explain(made.a.view, made.b.view, **pair).copies == ()


def test_a_scale_of_nan_or_0_is_that_of_its_own_block_alone() -> None:
    kernel = next(k for k in wider.SCALED if "e8m0" in k.name)
    made = arena.call(kernel, 257, 264, 520)
    scale_a, scale_b = (scale for _, scale in made.scales)
    scale_a.view(torch.uint8)[7, 1] = 255
    scale_b.view(torch.uint8)[1, 0] = 0  # 2^-127, of which nothing is left here
    d = made.run()
    exact, error = arena.bound(made, made.listed, d.dtype)
    rows = torch.arange(257, device="cuda") != 7
    assert d[7].isnan().all()
    arena.assert_within(d[rows], exact[rows], error[rows])


def test_block_scales_are_read_when_a_graph_is_replayed() -> None:
    made = arena.call(wider.SCALED[0], 257, 264, 520)
    arena.verify(made)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made.run()
    for scale in (made.scales[0][1], made.scales[1][1]):
        scale.mul_(3)
    made.d.room.fill_(-1)
    graph.replay()
    arena.assert_within(made.d.view, *arena.bound(made, made.listed, made.d.view.dtype))


def test_a_compiled_function_has_what_the_call_has() -> None:
    made = arena.call(wider.SCALED[0], 257, 264, 520)
    pair = dict(made.scales)

    def layer(a: torch.Tensor) -> torch.Tensor:
        return warploom.gemm(a, made.b.view, **pair)

    wanted = layer(made.a.view)
    assert torch.equal(torch.compile(layer, fullgraph=True)(made.a.view), wanted)


def test_schedules_of_one_block_scaled_operation_agree_to_the_bit() -> None:
    made = arena.call(wider.SCALED[0], 1021, 1032, 1031)
    expected = arena.verify(made).clone()
    others = [kernel for kernel in wider.SCALED if kernel.operation == made.spec.operation]
    schedules = [(one, cast("GemmSchedule", one.schedule)) for one in others]
    whole = [
        kernel
        for kernel, one in schedules
        if one.cluster_split_k == one.split_k == 1 and not (one.stream_k or one.swap_ab)
    ]
    assert len(whole) > 4
    for kernel in whole:
        assert torch.equal(replace(made, spec=kernel).run(), expected), kernel.name
