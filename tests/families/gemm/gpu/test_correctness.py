"""Every kernel against float64, element by element, over types, layouts, schedules, epilogues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

import gemm_arena as arena
import gemm_cases as cases
import gemm_chosen
import gemm_wider as wider
import pytest
import torch
from gemm_cases import SHAPES, SIMPLE, short
from rooms import assert_repeats

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def verify(kernel: KernelSpec, shape: tuple[int, int, int]) -> None:
    arena.verify(arena.call(kernel, *cases.fitting(shape, kernel)))


def test_no_kernel_spills_or_has_its_products_serialised(built: dict[str, Artifact]) -> None:
    artifacts = [built[kernel.name] for kernel in wider.ALL]
    resources = {artifact.name: artifact.resources[artifact.name] for artifact in artifacts}
    spilled = {name for name, used in resources.items() if used.spill_bytes or used.local_bytes}
    assert spilled == set()
    assert [artifact.name for artifact in artifacts if artifact.serialised] == []


@over_shapes
@pytest.mark.parametrize("kernel", cases.TYPES, ids=short)
def test_no_type_pair_rounds_more_than_it_must(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.LAYOUTS, ids=short)
def test_no_layout_is_misread(kernel: KernelSpec, shape: tuple[int, int, int]) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.SCHEDULES, ids=short)
def test_no_schedule_loses_a_product_or_a_tile(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.EPILOGUES, ids=short)
def test_no_epilogue_is_out_of_order_or_misplaced(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.TRAINED, ids=short)
def test_no_output_of_a_step_is_of_other_rows_or_beside_its_place(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.OUTPUTS, ids=short)
def test_no_8_bit_output_is_rounded_or_saturated_wrongly(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.PROMOTED, ids=short)
def test_promoted_sums_keep_the_bits_that_the_tensor_core_loses(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.SWAPPED, ids=short)
def test_no_swapped_kernel_mistakes_rows_for_columns(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.GATED, ids=short)
def test_no_gate_multiplies_columns_that_are_not_its_own(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.UNGATED, ids=short)
def test_no_gradient_of_a_gate_is_of_another_place(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.QUANTIZED, ids=short)
def test_no_block_of_d_has_the_scale_of_another(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", wider.NORMS, ids=short)
def test_no_row_has_the_mean_of_squares_of_another(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.SPLIT, ids=short)
def test_no_part_of_k_is_lost_or_added_twice(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@pytest.mark.parametrize("batches", wider.BATCHES.values(), ids=wider.BATCHES)
@pytest.mark.parametrize("shape", [(257, 131, 193), (1, 512, 37), (61, 200, 520)], ids=str)
@pytest.mark.parametrize("kernel", wider.BATCHED, ids=short)
def test_no_batch_is_taken_for_another(
    kernel: KernelSpec,
    shape: tuple[int, int, int],
    batches: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    arena.verify(arena.call(kernel, *cases.fitting(shape, kernel), batches=batches))


@pytest.mark.parametrize(
    ("m", "n", "k"), [(0, 8, 16), (5, 0, 16), (300, 776, 0), (0, 0, 0), (1, 8, 0)]
)
@pytest.mark.parametrize(
    "kernel",
    [SIMPLE["tma"], SIMPLE["direct"], SIMPLE["residual"], *cases.EPILOGUES[-5:], *cases.TYPES[-2:]],
    ids=short,
)
def test_an_extent_of_0_is_not_handed_to_the_tensor_memory_accelerator(
    kernel: KernelSpec, m: int, n: int, k: int
) -> None:
    arena.verify(arena.call(kernel, m, n, k))


@pytest.mark.parametrize("shape", gemm_chosen.CHOSEN_SHAPES, ids=str)
@pytest.mark.parametrize("operation", gemm_chosen.CHOSEN_OPERATIONS, ids=lambda o: o.a)
def test_the_table_chooses_a_kernel_that_is_right(
    operation: GemmOperation, shape: tuple[int, int, int]
) -> None:
    chosen = gemm_chosen.chosen(operation, shape)
    made = arena.call(chosen, *shape)
    d = warploom.gemm(made.a.view, made.b.view, epilogue=made.listed, out_dtype=torch.bfloat16)
    bound = reference.gemm_bound(made.a.view, made.b.view, made.listed, d.dtype)
    arena.assert_within(d, *bound)
    explained = warploom.explain(
        made.a.view, made.b.view, epilogue=made.listed, out_dtype=torch.bfloat16
    )
    assert explained.copies == ()


@pytest.mark.parametrize("a", ["fp16", "bf16", "e4m3", "int8"])
def test_the_bound_would_notice_a_lost_k_step_or_two_swapped_fragments(a: str) -> None:
    kernel = next(k for k in cases.TYPES if cast("GemmOperation", k.operation).a == a)
    made = arena.call(kernel, 257, 136, 520)
    d = arena.verify(made).clone()
    exact, bound = reference.gemm_bound(made.a.view, made.b.view, [], d.dtype)
    step = 32 if made.a.view.itemsize == 1 else 16
    last = made.a.view[:, -step:].double() @ made.b.view[-step:].double()
    swapped = d.clone()
    swapped[248:256, 0:8], swapped[248:256, 8:16] = d[248:256, 8:16], d[248:256, 0:8]
    for wrong in ((d.double() - last).to(d.dtype), swapped):
        with pytest.raises(AssertionError, match="are wrong"):
            arena.assert_within(wrong, exact, bound)


@pytest.fixture
def whole_sums() -> Iterator[None]:
    """Keep cuBLAS from rounding partial sums to 16 bits; not all of pytest can restore that."""
    settings = torch.backends.cuda.matmul
    names = [f"allow_{name}_reduced_precision_reduction" for name in ("fp16", "bf16")]
    before = [getattr(settings, name) for name in names]
    for name in names:
        setattr(settings, name, False)
    yield
    for name, value in zip(names, before, strict=True):
        setattr(settings, name, value)


@pytest.mark.usefixtures("whole_sums")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("k", [64, 1040, 8192])
def test_the_bound_is_not_tighter_than_the_vendors_library(dtype: torch.dtype, k: int) -> None:
    generator = torch.Generator("cuda").manual_seed(k)
    a, b = (torch.empty(272, k, dtype=dtype, device="cuda") for _ in range(2))
    for operand in (a, b):
        arena.fill(operand, generator)
    if dtype == torch.float8_e4m3fn:
        one = torch.ones((), device="cuda")
        scales = {"scale_a": one, "scale_b": one}
        d = torch._scaled_mm(a, b.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    else:
        d = torch.mm(a, b.t())
    arena.assert_within(d, *reference.gemm_bound(a, b.t(), [], d.dtype))


def test_a_kernel_is_bit_equal_over_1000_runs_beside_another_kernel() -> None:
    made = arena.call(SIMPLE["tma"], 1021, 1032, 1031)
    first = arena.verify(made).clone()
    assert_repeats(lambda: [made.run()], [first], [made.d])


def test_schedules_of_one_operation_agree_to_the_bit() -> None:
    made = arena.call(SIMPLE["tma"], 1021, 1032, 1031)
    expected = arena.verify(made).clone()
    others = [kernel for kernel in cases.SCHEDULES if kernel.operation == made.spec.operation]
    assert len(others) > 10
    for kernel in others:
        assert torch.equal(replace(made, spec=kernel).run(), expected), kernel.name
