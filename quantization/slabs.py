"""Codes to slabs and back: the layout of generator/slabs.py, by a few operations on whole tensors.

Codes are here as they are stored, `bits` bits in a byte each. All of it runs on any device, gives
the same bytes on each, and needs little more memory than these bytes of a range of rows; callers
go through a weight by `row_ranges`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, product

import torch
from torch import Tensor

from warploom.generator.formats import FORMATS, STEPS, WORD_BITS, WeightFormat
from warploom.generator.slabs import DEPTH, ROWS, SlabLayout
from warploom.quantization.metadata import Metadata, e8m0

RANGE = 1 << 23  # codes that are converted at a time: little memory
RANGE_OF_GPU = 1 << 27  # few launches: 10 bytes each, 1.3 GB, at most
_WARPS, _LANES, _QUADS, _HALVES = 4, 8, 4, 2

# What a row and a k are made of, outermost first; and what lies in memory up to the codes that a
# thread gives one wgmma, in registers (a half of k, and the upper or the lower row) and elements,
# or gives the two that share their words.
_ROW_AND_K = (
    *("block", "warp", "lower", "lane"),
    *("slab", "brick", "piece", "step", "second", "half", "quad", "element"),
)
_MEMORY = ("block", "slab", "brick", "piece", "warp", "lane", "quad", "step")


def row_ranges(metadata: Metadata, device: torch.device | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, end) of ranges of rows; each begins a row block. They are larger on a GPU."""
    codes = RANGE_OF_GPU if device is not None and device.type == "cuda" else RANGE
    rows = max(1, codes // (metadata.slabs_of_k * DEPTH * ROWS)) * ROWS
    for first in range(0, metadata.n, rows):
        yield first, min(first + rows, metadata.n)


def of_rows(data: Tensor, first: int, end: int) -> Tensor:
    """Return the slabs of rows `first` to `end`, of one of `row_ranges`."""
    return data[first // ROWS : -(-end // ROWS)]


def write(
    slabs: Tensor, layout: SlabLayout, stored: Tensor, scales: Tensor, zeros: Tensor | None
) -> None:
    """Fill `slabs` [blocks, slabs of k, bytes] with a range of rows.

    `stored` is uint8 [rows, K]; `scales` [rows, groups] and `zeros`, uint8 likewise, are not looked
    at where they are per channel.
    """
    blocks, deep = slabs.shape[:2]
    whole = _padded(stored, blocks * ROWS, deep * DEPTH, layout.order.offset)
    codes = whole.view(blocks, _WARPS, _HALVES, _LANES, -1)
    if layout.row.bits < 8:  # the lower row above
        codes = torch.add(codes[:, :, :1], codes[:, :, 1:], alpha=1 << layout.row.bits)
    if layout.row.bits == 2:  # and the second half of k of each step above that
        halves = codes.view(*codes.shape[:-1], -1, _HALVES, layout.step // _HALVES)
        codes = torch.add(halves[..., 0, :], halves[..., 1, :], alpha=16)
    arranged = _ARRANGED[layout.format, layout.activations]
    part = slabs[..., : layout.codes_bytes]
    memory, ordered = (
        arranged.axes(part, blocks, deep),
        arranged.axes(codes, blocks, deep, rows=True),
    )
    memory.copy_(ordered)
    if arranged.moved:
        words = part.view(torch.int32)
        _moved(words, arranged.moved, out=words)
    if layout.group is not None:
        begin, end = layout.codes_bytes, layout.codes_bytes + layout.scales_bytes
        # torch fills few types of 8 bits, so their padding is given by its bits.
        padding = layout.scale_of_zeros
        padding = {"e8m0": e8m0(padding), "e4m3": 0x38}.get(layout.scale, padding)
        values = scales.view(torch.uint8) if layout.scale_type.bytes == 1 else scales
        slabs[..., begin:end] = _by_position(values, blocks, layout, padding)
        if zeros is not None:
            slabs[..., end:] = _by_position(zeros, blocks, layout, 0)


def read(slabs: Tensor, layout: SlabLayout, rows: int, k: int) -> Tensor:
    """Return the stored codes [rows, k] that `write` was given."""
    blocks, deep = slabs.shape[:2]
    part = _dense(slabs[..., : layout.codes_bytes])
    arranged = _ARRANGED[layout.format, layout.activations]
    if arranged.back:
        part = _moved(part.view(torch.int32), arranged.back).view(torch.uint8)
    bits = layout.row.bits
    lower, halves = 1 if bits < 8 else _HALVES, _HALVES if bits == 2 else 1
    codes = slabs.new_empty(blocks, _WARPS, lower, _LANES, deep * DEPTH // halves)
    arranged.axes(codes, blocks, deep, rows=True).copy_(arranged.axes(part, blocks, deep))
    if bits == 2:
        steps = codes.view(*codes.shape[:-1], -1, layout.step // _HALVES)
        codes = torch.stack((steps & 15, steps >> 4), -2).flatten(-3)
    if bits < 8:
        codes = torch.cat((codes & (1 << bits) - 1, codes >> bits), 2)
    return codes.view(blocks * ROWS, -1)[:rows, :k]


def read_scales(
    slabs: Tensor, layout: SlabLayout, rows: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return the scales [rows, groups], of type `dtype`, and the zero points that slabs have."""
    begin, end = layout.codes_bytes, layout.codes_bytes + layout.scales_bytes
    scales = _by_row(slabs[..., begin:end], layout, dtype)[:rows, :groups]
    if not layout.row.has_zeros:
        return scales, None
    return scales, _by_row(slabs[..., end:], layout, torch.uint8)[:rows, :groups]


def _dense(part: Tensor) -> Tensor:
    """A copy of a part of slabs that can be viewed in a wider type.

    `.contiguous()` leaves the strides of dimensions of size 1 as they are, which torch asks to be
    multiples of the wider type's size.
    """
    return part.clone(memory_format=torch.contiguous_format)


def _padded(values: Tensor, rows: int, columns: int, padding: float) -> Tensor:
    if values.shape == (rows, columns):
        return values.contiguous()
    padded = torch.full((rows, columns), padding, dtype=values.dtype, device=values.device)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded


# ---- Codes ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Arrangement:
    """How whole codes lie, and how bits are moved then.

    Two rows share a byte where codes have 4 bits, and two halves of k as well where they have 2.

    `field` are the axes of the codes that a thread gives one wgmma, outermost first. `moved` and
    `back` are for _moved; empty where all bits stay.
    """

    row: WeightFormat
    activations: str
    field: tuple[str, ...]
    moved: tuple[int, ...]
    back: tuple[int, ...]

    def axes(self, tensor: Tensor, blocks: int, deep: int, *, rows: bool = False) -> Tensor:
        """Return bytes of slabs, or of rows of codes, by the axes of memory.

        Elements that lie side by side in both are one integer: fewer, wider loads and stores.
        """
        sizes = {"block": blocks, "slab": deep} | _sizes(self.row, self.activations)
        memory = (*_MEMORY, *self.field)
        seen = [axis for axis in _ROW_AND_K if axis in memory] if rows else memory
        if self.field[-1] == "element":
            wide = torch.int16 if sizes["element"] == 2 else torch.int32
            tensor, sizes["element"] = tensor.view(wide), 1
        tensor = tensor.view([sizes[axis] for axis in seen])
        return tensor.permute([seen.index(axis) for axis in memory])


def _sizes(row: WeightFormat, activations: str) -> dict[str, int]:
    """Return the extents of the axes that all slabs have, in bytes of whole codes."""
    step, order = STEPS[activations], row.orders[activations]
    layout = SlabLayout(row.name, row.groups[0], row.scales[0], activations)
    return {
        "warp": _WARPS,
        "lower": _HALVES if row.bits == 8 else 1,
        "lane": _LANES,
        "brick": DEPTH // layout.brick_k,
        "piece": layout.pieces,
        "step": layout.brick_k // step // layout.pieces // order.steps,
        "second": order.steps,
        "half": 1 if row.bits == 2 else _HALVES,
        "quad": _QUADS,
        "element": step // (_HALVES * _QUADS),
    }


def _arrangement(row: WeightFormat, activations: str) -> _Arrangement:
    """Return the arrangement after which no bit has to move, or none out of its word.

    Codes of 4 bits lie above those 8 rows higher, in the same byte, and of 2 those of the second
    half of k above both.
    """
    beside = {8: (), 4: ("lower",), 2: ("half", "lower")}[row.bits]
    inner = [axis for axis in ("half", "lower", "second", "element") if axis not in beside]
    if row.orders[activations].steps == 1:
        inner.remove("second")
        beside = ("second", *beside)
    found = []
    for field in permutations(inner):
        places = _places(row, activations, (*field, *beside))
        word = places[:WORD_BITS]  # all words are alike
        axes = (*beside, *field)
        if places == sorted(places):
            return _Arrangement(row, activations, axes, (), ())
        if max(word) < WORD_BITS:
            back = [word.index(bit) for bit in range(WORD_BITS)]
            found.append(_Arrangement(row, activations, axes, _added(word), _added(back)))
    return found[0]


def _places(row: WeightFormat, activations: str, field: tuple[str, ...]) -> list[int]:
    """Return where each bit belongs that whole codes have in a step's words, in that order."""
    sizes = _sizes(row, activations) | {"lower": _HALVES, "half": _HALVES}
    places = []
    for at in product(*(range(sizes[axis]) for axis in field)):
        of = dict(zip(field, at, strict=True))
        for bit in range(row.bits):
            register = 2 * of["half"] + of["lower"]
            order = row.orders[activations]
            places.append(order.place(register, of["element"], bit, of["second"]))
    return places


def _added(places: Sequence[int]) -> tuple[int, ...]:
    """Return what each value of each byte of a word adds to one whose bit b is at places[b]."""
    added = [
        sum(1 << places[8 * byte + bit] for bit in range(8) if value >> bit & 1)
        for byte in range(4)
        for value in range(256)
    ]
    return tuple(word - (word >> 31 << 32) for word in added)  # as int32 has it


_ARRANGED = {
    (row.name, activations): _arrangement(row, activations)
    for row in FORMATS.values()
    for activations in row.orders
}


def _moved(words: Tensor, added: tuple[int, ...], out: Tensor | None = None) -> Tensor:
    """Return int32 `words` with their bits moved: what each half adds is looked up (see _added)."""
    table = torch.tensor(added, dtype=torch.int32).to(words.device, non_blocking=True).view(4, 256)
    # A half counts from -32768 on, so that its upper byte does from 128 on.
    above, below = table[1::2].roll(128, 1)[..., None], table[::2, None]
    halves = words.view(torch.int16).view(*words.shape, 2)
    first = torch.tensor((1 << 15, 3 << 15), dtype=torch.int32)
    index = halves + first.to(words.device, non_blocking=True)
    found = torch.index_select((above + below).view(-1), 0, index.view(-1)).view(*words.shape, 2)
    return torch.add(found[..., 0], found[..., 1], out=out)


# ---- Scales and zero points ----------------------------------------------------------------------


def _by_position(values: Tensor, blocks: int, layout: SlabLayout, padding: float) -> Tensor:
    """Values [rows, groups] as bytes [blocks, slabs, bytes]: rows r and r + 8 side by side."""
    deep = -(-values.shape[1] // layout.groups)
    whole = _padded(values, blocks * ROWS, deep * layout.groups, padding)
    seen = whole.view(blocks, _WARPS, _HALVES, _LANES, deep, layout.groups)
    return seen.permute(0, 4, 5, 1, 3, 2).contiguous().view(torch.uint8).reshape(blocks, deep, -1)


def _by_row(slabs: Tensor, layout: SlabLayout, dtype: torch.dtype) -> Tensor:
    """Return the inverse of `_by_position`, with padding."""
    values = _dense(slabs).view(dtype)
    seen = values.view(*values.shape[:2], layout.groups, _WARPS, _LANES, _HALVES)
    return seen.permute(0, 3, 5, 4, 1, 2).reshape(values.shape[0] * ROWS, -1)
