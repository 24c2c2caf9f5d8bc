"""What the gpu tests draw can be made here: their tables, their shapes and their weights."""

from __future__ import annotations

import mixed_arena as arena
import mixed_cases as cases
import pytest
import torch

from warploom.generator.families.mixed_gemm import MixedGemmOperation
from warploom.quantization import Metadata

OPERATIONS = {(one.operation.b, one.operation.activations): one.operation for one in cases.FORMATS}  # type: ignore[attr-defined]


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=lambda o: f"{o.a} {o.b}")
def test_a_drawn_weight_has_every_code_and_scales_of_either_sign(
    operation: MixedGemmOperation,
) -> None:
    group = operation.group or None
    metadata = Metadata(operation.b, group, operation.scale, operation.activations, 70, 384)
    packed = arena.draw(metadata, torch.Generator().manual_seed(1))
    codes, scales, zeros = packed.unpack()
    row = operation.weight
    bits = codes.view(torch.uint8) if row.nans else codes.to(torch.int16)
    assert bits.unique().numel() == row.highest - row.lowest + 1 - len(row.nans)
    assert packed.dequantize(torch.float64).isfinite().all()
    if operation.scale != "e8m0":
        wide = scales.float()  # torch compares no 8 bits
        assert (wide < 0).any() and (wide > 0).any()
    if zeros is not None and group is not None:
        assert int(zeros.min()) == 0 and int(zeros.max()) == row.highest_zero


def test_every_kernel_of_the_tables_can_store_every_shape() -> None:
    for kernel in cases.ALL:
        of = kernel.operation
        assert isinstance(of, MixedGemmOperation)
        for shape in cases.SHAPES.values():
            _, n, k = cases.fitting(shape, kernel)
            assert Metadata(of.b, of.group or None, of.scale, of.activations, n, k).nbytes > 0
