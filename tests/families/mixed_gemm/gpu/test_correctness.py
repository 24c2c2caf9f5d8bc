"""Every kernel against float64, element by element, over formats, schedules, epilogues, rows."""

from __future__ import annotations

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch
from mixed_cases import SHAPES, SIMPLE, short
from product_arena import assert_within
from rooms import assert_repeats

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.mixed_gemm import reference

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
over_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
FEW = [SHAPES[name] for name in ("ragged", "few rows", "many rows")]


def verify(kernel: KernelSpec, shape: tuple[int, int, int]) -> None:
    arena.verify(arena.call(kernel, *cases.fitting(shape, kernel)))


def test_no_kernel_spills_or_has_its_products_serialised(built: dict[str, Artifact]) -> None:
    artifacts = [built[kernel.name] for kernel in cases.USUAL]
    resources = {artifact.name: artifact.resources[artifact.name] for artifact in artifacts}
    spilled = {name for name, used in resources.items() if used.spill_bytes or used.local_bytes}
    assert spilled == set()
    assert [artifact.name for artifact in artifacts if artifact.serialised] == []


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("kernel", cases.FORMATS, ids=short)
def test_no_format_is_decoded_or_scaled_wrongly(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.SCHEDULES, ids=short)
def test_no_schedule_loses_a_product_or_a_tile(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@pytest.mark.parametrize("shape", [*FEW, SHAPES["single"]], ids=str)
@pytest.mark.parametrize("kernel", cases.EPILOGUES, ids=short)
def test_no_epilogue_is_out_of_order_or_misplaced(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.NORMS, ids=short)
def test_no_row_has_the_mean_of_squares_of_another(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@over_shapes
@pytest.mark.parametrize("kernel", cases.GATED, ids=short)
def test_no_gate_multiplies_the_up_of_another_column(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@pytest.mark.parametrize("shape", FEW, ids=str)
@pytest.mark.parametrize("kernel", cases.OUTPUTS, ids=short)
def test_no_output_type_is_rounded_or_saturated_wrongly(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    verify(kernel, shape)


@pytest.mark.parametrize("name", ["few", "some", "many", "split", "shared", "ahead"])
def test_every_number_of_rows_to_300_is_right_and_no_other_row_is_written(name: str) -> None:
    kernel = SIMPLE[name]
    made = arena.call(kernel, *cases.fitting((300, 136, 640), kernel))
    exact, bound = arena.bound(made, (), made.d.view.dtype)
    wrong = torch.zeros(301, dtype=torch.bool, device="cuda")
    for m in range(1, 301):
        d = made.rows(m)
        wrong[m] |= ~((d.double() - exact[:m]).abs() <= bound[:m]).all()
        wrong[m] |= ~(made.d.view[m:].view(torch.int16) == -1).all()
        wrong[m] |= ~(made.d.room[~made.d.inside] == -1).all()
    assert wrong.nonzero().flatten().tolist() == []


@pytest.mark.parametrize(
    ("kernel", "shape"),
    cases.CHOSEN,
    ids=lambda one: short(one) if isinstance(one, KernelSpec) else str(one),
)
def test_the_table_chooses_a_kernel_that_is_right(
    kernel: KernelSpec, shape: tuple[int, int, int]
) -> None:
    made = arena.call(kernel, *shape)
    a, packed = made.a.view, made.weight.packed
    d = warploom.mixed_gemm(a, packed)
    assert_within(d, *arena.bound(made, (), d.dtype))
    assert warploom.explain(warploom.mixed_gemm, a, packed).kernel == kernel.name


def test_a_weight_that_was_quantised_is_the_one_that_is_multiplied() -> None:
    """From end to end, against a product by torch with the weight that the codes stand for."""
    torch.manual_seed(0)
    weight = torch.randn(712, 1024, device="cuda").bfloat16()
    a = torch.randn(43, 1024, device="cuda").bfloat16()
    packed = warploom.quantization.quantize(weight, "int4", group=128)
    d = warploom.mixed_gemm(a, packed)
    assert reference.error_share(d, a, packed) <= 1
    wanted = a.double() @ packed.dequantize(torch.float64).t()
    assert ((d.double() - wanted).abs() <= 2.0**-6 * wanted.abs().max()).all()


@pytest.mark.parametrize("name", ["few", "some", "split", "shared", "ahead"])
def test_a_kernel_is_bit_equal_over_300_runs_beside_another_kernel(name: str) -> None:
    made = arena.call(SIMPLE[name], 61, 1032, 2048)
    first = arena.verify(made).clone()
    assert_repeats(lambda: [made.run()], [first], [made.d], runs=300)
