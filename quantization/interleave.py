"""Two quantized weights as one whose rows alternate, which gates in a kernel need; and back again.

Codes and scales are moved, never computed: both ways give the same bytes on every device.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

import torch
from torch import Tensor

from warploom.quantization import slabs
from warploom.quantization.packed_weight import PackedWeight

_PADDING = {"channel_scales": 1, "channel_zeros": 0}  # of rows past the last


def interleave(first: PackedWeight, second: PackedWeight) -> PackedWeight:
    """Return the weight [2 N, K] with the rows of two weights [N, K] in turn.

    Args:
        first: The weight of the even rows.
        second: That of the odd rows, with the metadata of the first and on its device.

    Returns:
        A weight with memory of its own.
    """
    kind = first.metadata
    both = PackedWeight.empty(replace(kind, n=2 * kind.n), first.device)
    for begin, end in slabs.row_ranges(kind, first.device):
        parts = zip(_rows(first, begin, end), _rows(second, begin, end), strict=True)
        _write(both, 2 * begin, 2 * end, *starmap(_in_turn, parts))
    for name, tensor in _channels(both).items():
        tensor[: 2 * kind.n] = _in_turn(*(getattr(one, name)[: kind.n] for one in (first, second)))
    return both


def every_other(both: PackedWeight, offset: int) -> PackedWeight:
    """Return one of the two weights [N, K] that `interleave` was given.

    Args:
        both: What it returned, [2 N, K].
        offset: 0 for the first, 1 for the second.

    Returns:
        A weight with memory of its own.
    """
    kind = replace(both.metadata, n=both.metadata.n // 2)
    one = PackedWeight.empty(kind, both.device)
    for begin, end in slabs.row_ranges(kind, both.device):
        parts = _rows(both, 2 * begin, 2 * end)
        _write(one, begin, end, *[part[offset::2] for part in parts])
    for name, tensor in _channels(one).items():
        tensor[: kind.n] = getattr(both, name)[offset : 2 * kind.n : 2]
    return one


def _in_turn(first: Tensor, second: Tensor) -> Tensor:
    return torch.stack((first, second), 1).flatten(0, 1)


def _rows(weight: PackedWeight, begin: int, end: int) -> list[Tensor]:
    """Codes as they are stored, and scales and zero points where slabs have them, all as bits."""
    kind = weight.metadata
    part, count = slabs.of_rows(weight.slabs, begin, end), end - begin
    codes = slabs.read(part, kind.slab, count, kind.k)
    if kind.group is None:
        return [codes]
    bits = torch.uint8 if kind.slab.scale_type.bytes == 1 else kind.scale_dtype
    scales, zeros = slabs.read_scales(part, kind.slab, count, kind.groups, bits)
    return [codes, scales] if zeros is None else [codes, scales, zeros]


def _write(
    weight: PackedWeight,
    begin: int,
    end: int,
    codes: Tensor,
    scales: Tensor | None = None,
    zeros: Tensor | None = None,
) -> None:
    # Scales of channels are no part of slabs, and are not looked at.
    given = codes if scales is None else scales
    slabs.write(slabs.of_rows(weight.slabs, begin, end), weight.metadata.slab, codes, given, zeros)


def _channels(weight: PackedWeight) -> dict[str, Tensor]:
    """The scales and zero points of channels, as for rows of padding, of a weight being made."""
    found = {name: one for name, one in weight.tensors().items() if name in _PADDING}
    for name, tensor in found.items():
        tensor.fill_(_PADDING[name])
    return found
