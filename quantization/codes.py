"""Codes in three forms: as they are given, as they are stored, and the numbers they stand for."""

from __future__ import annotations

import torch
from torch import Tensor

from warploom.generator.formats import WeightFormat
from warploom.generator.slabs import SlabLayout
from warploom.quantization.metadata import dtype_of

# What the bits of e2m1 stand for: two of exponent, of bias 1, and one of mantissa, below a sign.
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def stored(codes: Tensor, layout: SlabLayout) -> Tensor:
    """Return codes, any integers or e4m3, as they are stored: uint8. All are in range."""
    row, order = layout.row, layout.order
    if codes.dtype.itemsize > 1:
        codes = codes.to(torch.int16).to(torch.uint8)  # modulo 256, on every device
    if order.sign_lowest:
        signed = codes.view(torch.int8)
        return (signed << 1).bitwise_xor_(signed >> 7).view(torch.uint8)
    plain = codes.view(torch.uint8)
    if order.offset:
        return plain + order.offset
    return plain & 2**row.bits - 1 if row.lowest < 0 else plain


def from_stored(stored: Tensor, layout: SlabLayout) -> Tensor:
    """Return stored codes as they are given, of the type that the format has for them."""
    row, order = layout.row, layout.order
    if order.sign_lowest:
        signed = stored.view(torch.int8)
        return (signed >> 1).bitwise_xor_(-(signed & 1))
    if order.offset:
        stored = stored - order.offset
    elif row.lowest < 0:
        sign = 1 << row.bits - 1
        stored = (stored ^ sign) - sign
    return stored.view(dtype_of(row.codes))


def numbers(codes: Tensor, row: WeightFormat, dtype: torch.dtype) -> Tensor:
    """Return what codes of the format's own type stand for, before zero points and scales."""
    if row.name not in ("mxfp4", "nvfp4"):
        return codes.to(dtype)
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=dtype, device=codes.device)
    return table[codes.to(torch.int32)]
