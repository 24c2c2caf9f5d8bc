"""Every code, scale and zero point lies where the layout says, and comes back."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_places import SCALE_BYTES, Places
from packed_samples import KINDS, Kind, as_bytes, drawn, packed, same

from warploom.generator.formats import FORMATS, REGISTERS, STEPS, WeightFormat
from warploom.generator.slabs import position
from warploom.quantization import PackedWeight, slabs

SHAPES = [(64, 128), (1, 32), (65, 160), (130, 352)]


def of(kind: Kind, n: int, k: int) -> tuple[int, int]:
    """The shape, with k grown to a multiple of the group."""
    return n, -(-k // (kind[1] or 1)) * (kind[1] or 1)


def found(memory: bytes, places: Places, n: int, k: int) -> int:
    """The bits of code (n, k)."""
    bits = enumerate(places.code(n, k))
    return sum((memory[byte] >> at & 1) << bit for bit, (byte, at) in bits)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_scale_and_zero_point_lies_where_the_layout_says(
    kind: Kind,
) -> None:
    """A kernel that reads by the same text would multiply other weights."""
    format, group, scale, activations = kind
    n, k = of(kind, 66, 161)
    codes, scales, zeros = drawn(format, group, scale, n, k)
    made = PackedWeight.from_codes(
        codes, scales, zeros, format=format, group=group, activations=activations
    )
    memory = bytes(made.data.flatten().numpy())
    places = Places(format, group, scale, activations, k)
    assert len(memory) == 2 * -(-k // 128) * places.slab_bytes
    values = (codes if codes.dtype == torch.int8 else as_bytes(codes)).tolist()
    wrong = [
        (row, deep)
        for row in range(n)
        for deep in range(k)
        if found(memory, places, row, deep) != places.stored(values[row][deep])
    ]
    assert wrong == []
    if group is None:
        assert made.channel_scales is not None
        assert same(made.channel_scales[:n, None], scales)
        assert made.channel_scales[n:].tolist() == [1] * (128 - n)
        return
    width = SCALE_BYTES[scale]
    lines = as_bytes(scales).tolist()
    for row in range(n):
        for one in range(k // group):
            byte = places.scale_byte(row, one * group)
            assert [*memory[byte : byte + width]] == lines[row][one * width : (one + 1) * width]
            if zeros is not None:
                assert memory[places.zero_byte(row, one * group)] == zeros[row, one]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_what_was_packed_is_unpacked(kind: Kind, n: int, k: int) -> None:
    n, k = of(kind, n, k)
    given = drawn(*kind[:3], n, k)
    found = packed(*kind, n, k).unpack()
    assert all(map(same, found, given))


@pytest.mark.parametrize("kind", KINDS)
def test_padding_stands_for_zero(kind: Kind) -> None:
    """A kernel computes it like the rest: NaN or a number there would reach D, or a sum of it."""
    format, group, _, activations = kind
    n, k = of(kind, 3, 40)
    made = packed(*kind, n, k)
    places = Places(format, group, kind[2], activations, k)
    memory = bytes(made.data.flatten().numpy())
    for row in range(64):
        for deep in range(128 if row >= n else k, 128):
            assert found(memory, places, row, deep) == places.stored(0)
    everything = made.metadata.slab
    if group is not None:
        part = made.metadata.scale_dtype
        scales, zeros = slabs.read_scales(made.data, everything, 64, 128 // group, part)
        outside = torch.ones(scales.shape, dtype=torch.bool)
        outside[:n, : k // group] = False
        # By more than 0.5 decoding of mxfp8 by 16 bits makes infinity, and NaN of a code of 0.
        one = 0.5 if (format, activations) == ("mxfp8", "16-bit") else 1.0
        assert scales.float()[outside].unique().tolist() == [one]
        assert zeros is None or not zeros[outside].any()


@settings(max_examples=40)
@given(
    st.sampled_from(KINDS),
    st.integers(1, 140),
    st.integers(1, 300),
    st.integers(0, 5),
)
def test_a_weight_is_packed_alike_in_one_range_of_rows_and_in_many(
    kind: Kind, n: int, k: int, seed: int
) -> None:
    n, k = of(kind, n, k)
    whole = packed(*kind, n, k, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slabs, "RANGE", 1)
        parts = packed(*kind, n, k, seed)
        again = whole.unpack()
    assert all(map(same, parts.tensors().values(), whole.tensors().values()))
    assert all(map(same, again, drawn(*kind[:3], n, k, seed)))


def test_codes_may_lie_in_any_order_in_memory() -> None:
    codes, scales, _ = drawn("int4", 32, "bf16", 70, 96)
    turned = PackedWeight.from_codes(
        codes.t().contiguous().t(),
        scales.repeat_interleave(2, 1)[:, ::2],
        format="int4",
        group=32,
    )
    assert same(turned.data, packed("int4", 32, "bf16", "16-bit", 70, 96).data)


def test_codes_may_be_integers_of_any_type() -> None:
    for format, group, scale, activations in KINDS:
        codes, scales, zeros = drawn(format, group, scale, 3, 128)
        wide = codes.view(torch.uint8) if format in ("e4m3", "mxfp8") else codes
        if zeros is not None:
            zeros = zeros.long()
        made = PackedWeight.from_codes(
            wide.to(torch.int64),
            scales,
            zeros,
            format=format,
            group=group,
            activations=activations,
        )
        assert all(map(same, made.unpack(), drawn(format, group, scale, 3, 128)))


ORDERS = [(row, activations) for row in FORMATS.values() for activations in row.orders]


@pytest.mark.parametrize(("row", "activations"), ORDERS, ids=lambda one: getattr(one, "name", one))
def test_words_of_a_step_hold_every_bit_once(row: WeightFormat, activations: str) -> None:
    places = Places(row.name, None, row.scales[0], activations, 1)
    order, elements = row.orders[activations], STEPS[activations] // 8
    each = [*product(range(REGISTERS), range(elements), range(row.bits), range(order.steps))]
    assert [order.place(*one) for one in each] == [places.in_step(*one) for one in each]
    assert sorted(order.place(*one) for one in each) == [*range(32 * order.words)]


def test_scales_of_rows_8_apart_are_side_by_side() -> None:
    assert [position(row) for row in range(64)] == [Places.position(row) for row in range(64)]
    assert [position(row + 8) - position(row) for row in range(8)] == [1] * 8
    assert sorted(map(position, range(64))) == [*range(64)]
