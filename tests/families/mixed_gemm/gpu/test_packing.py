"""Weights packed on a GPU: the CPU's bits, whose tests hold those, and the same refusals."""

from __future__ import annotations

import pytest
import torch

from warploom.errors import ProblemError
from warploom.generator.formats import FORMATS, Activations
from warploom.quantization import PackedWeight, quantize, slabs

pytestmark = pytest.mark.gpu
ROWS, K = 328, 2048
CASES = [
    (row.name, group, to) for row in FORMATS.values() for to in row.orders for group in row.groups
]


def drawn(dtype: torch.dtype) -> torch.Tensor:
    """Rows between 2^-12 and 2, a row of zeros, and groups of them."""
    generator = torch.Generator().manual_seed(ROWS)
    weight = torch.randn(ROWS, K, generator=generator)
    weight *= 2.0 ** torch.randint(-12, 2, (ROWS, 1), generator=generator)
    weight[3], weight[5, 128:256] = 0, 0
    return weight.to(dtype)


def assert_same(made: PackedWeight, expected: PackedWeight) -> None:
    """Bit for bit, whatever their types."""
    for name, tensor in expected.tensors().items():
        assert torch.equal(made.tensors()[name].cpu().view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("format", "group", "activations"), CASES)
def test_a_gpu_packs_the_bits_of_a_cpu(
    format: str,
    group: int | None,
    activations: Activations,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Divisions that a GPU rounds otherwise, or codes that it moves elsewhere, would differ."""
    weight = drawn(dtype)
    expected = quantize(weight, format, group=group, activations=activations)
    for codes in (slabs.RANGE_OF_GPU, 1 << 18):  # all rows at once, and in ranges
        monkeypatch.setattr(slabs, "RANGE_OF_GPU", codes)
        made = quantize(weight.cuda(), format, group=group, activations=activations)
        assert_same(made, expected)
        whole = made.channel_scales[:ROWS] if FORMATS[format].scaled_twice else None
        again = PackedWeight.from_codes(
            *made.unpack(),
            format=format,
            group=group,
            activations=activations,
            global_scale=whole,
        )
        assert_same(again, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_a_fault_in_the_last_range_of_rows_is_named(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is waited for once, at the end: a range that is looked at no more would pass."""
    monkeypatch.setattr(slabs, "RANGE_OF_GPU", 1 << 18)
    weight = drawn(torch.bfloat16).cuda()
    weight[ROWS - 1, 7] = torch.nan
    with pytest.raises(ProblemError, match=rf"weight nan of row {ROWS - 1}, k 7: must be finite"):
        quantize(weight, format)
