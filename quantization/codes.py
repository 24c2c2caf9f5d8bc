"""Codes in three forms: as they are given, as they are stored, and the numbers they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.generator.formats import WeightFormat
from warploom.quantization.metadata import dtype_of

# What the bits of e2m1 stand for: two of exponent, of bias 1, and one of mantissa, below a sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored(codes: Tensor, row: WeightFormat) -> Tensor:
    """Return codes, any integers or e4m3, as they are stored; all are in range."""
    if codes.dtype.itemsize > 1:
        codes = codes.to(torch.int16).to(torch.uint8)  # modulo 256, on every device
    raised = codes.view(torch.uint8) + row.offset
    return raised.bitwise_and(2**row.bits - 1)


def from_stored(stored: Tensor, row: WeightFormat) -> Tensor:
    """Return stored codes as they are given, of the type that the format has for them."""
    return (stored - row.offset if row.offset else stored).view(dtype_of(row.codes))


def numbers(codes: Tensor, row: WeightFormat, dtype: torch.dtype) -> Tensor:
    """Return what codes of the format's own type stand for, before zero points and scales."""
    if row.name != "mxfp4":
        return codes.to(dtype)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=codes.device)
    return table[codes.to(torch.int32)]
