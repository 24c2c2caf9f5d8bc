"""Every bit of W against torch, of all formats, of sizes that no slab divides."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import dequantize_cases as cases
import pytest
import torch
from dequantize_cases import short

import warploom
from warploom.generator.artifact import Artifact
from warploom.generator.families.dequantize import DequantizeShape
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.dequantize.family import FAMILY, experts

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("built")]
BY_CHANNEL = [one for one, kind in cases.KINDS.items() if kind[1] is None]
ANY = [*cases.SOME, *cases.ROWS]


@pytest.mark.parametrize("kernel", cases.KERNELS, ids=short)
def test_no_kernel_spills(kernel: KernelSpec, built: dict[str, Artifact]) -> None:
    assert all(one.clean for one in built[kernel.name].resources.values())


@pytest.mark.parametrize("size", [(1, 1, 128), (3, 70, 384), (2, 129, 1408)], ids=str)
@pytest.mark.parametrize("kernel", cases.KERNELS, ids=short)
def test_every_bit_is_right(kernel: KernelSpec, size: tuple[int, int, int]) -> None:
    cases.made(kernel, *size).verify()


@pytest.mark.parametrize("k", [1, 7, 8, 131, 1000])
@pytest.mark.parametrize("kernel", [*BY_CHANNEL, *cases.ROWS], ids=short)
def test_columns_of_any_number_end_where_they_should(kernel: KernelSpec, k: int) -> None:
    cases.made(kernel, 2, 37, k).verify()


@pytest.mark.parametrize("kernel", ANY, ids=short)
def test_rows_and_experts_of_any_stride_and_address_are_written_in_place(
    kernel: KernelSpec,
) -> None:
    for pad, shift in (((8, 64), 8), ((8, 3), 0), ((1, 0), 0), ((0, 0), 3), ((37, 5), 1)):
        cases.made(kernel, 3, 70, 256, pad=pad, shift=shift).verify()


@pytest.mark.parametrize("kernel", ANY, ids=short)
def test_large_weights(kernel: KernelSpec) -> None:
    """Against torch on the GPU, of quantized normal weights."""
    operation: Any = kernel.operation
    shape = DequantizeShape(3, 5760, 2944 if operation.group == 128 else 2880)
    call = replace(FAMILY.draw(operation, shape, "cuda", None), spec=kernel)
    (found,) = plan.run(call)
    assert FAMILY.share([found], FAMILY.expected(call)) == 0


def test_results_of_more_than_32_bits_count() -> None:
    """0.6 GB of codes, and more than 2^31 elements of W: the last expert is right."""
    packed = experts(*cases.large(), "cuda", None)
    found = warploom.dequantize(packed)
    assert found.numel() > 2**31
    for expert in (0, 15, 31, 32):
        assert torch.equal(found[expert], packed[expert].dequantize())


@pytest.mark.parametrize("kernel", cases.SOME, ids=short)
def test_experts_of_a_range_are_those_of_all(kernel: KernelSpec) -> None:
    call: Any = cases.made(kernel, 5, 70, 256).call
    packed = warploom.PackedExperts(
        call.data, call.metadata, call.channel_scales, call.channel_zeros
    )
    whole = warploom.dequantize(packed, call.dtype)
    for first, end in ((0, 1), (2, 5), (4, 4), (1, 4)):
        found = warploom.dequantize(packed, call.dtype, first=first, end=end)
        assert torch.equal(found, whole[first:end])
        if end > first:
            assert torch.equal(warploom.dequantize(packed[first], call.dtype), whole[first])


def test_every_schedule_has_the_same_bits() -> None:
    for kernel in cases.IN_EVERY_SCHEDULE:
        cases.made(kernel, 2, 200, 1424).verify()


def test_draws_of_the_tuner_are_right() -> None:
    for kernel in ANY:
        trial = FAMILY.trial(kernel.operation, DequantizeShape(5, 200, 512), "cuda", 1)  # type: ignore[arg-type]
        assert trial.error_share(kernel) == 0
