"""The parameter block: where each field lies, and what bytes a launch is given."""

from __future__ import annotations

import struct

import pytest

from warploom.generator.elements import element
from warploom.generator.launches import Address, Argument
from warploom.generator.parameters import block, int32, int64, pointer, scalar, tensor_map
from warploom.generator.tensor_maps import TensorMap

MAP = TensorMap("a", element("fp16"), (64, 64), (128,), (64, 64), 128)


def given(at: int) -> int:
    return at


BLOCK = block(
    [
        scalar("beta", ""),
        int32("m", "", given),
        pointer("bias", "cutlass::half_t", "", tensor="row"),
        int64("pitch", "", lambda at: 2 * at),
        tensor_map("a_map", "", lambda at: MAP),
        int32("n", "", lambda at: at + 1),
        tensor_map("b_map", "", lambda at: MAP),
    ]
)


def test_fields_lie_by_kind_and_in_the_order_given_within_a_kind() -> None:
    assert BLOCK.offsets == {
        "a_map": 0,
        "b_map": 128,
        "bias": 256,
        "pitch": 264,
        "m": 272,
        "n": 276,
        "beta": 280,
    }
    assert BLOCK.size == 384  # 284, rounded up to the alignment of a tensor map


def test_a_launch_has_the_value_that_each_field_is_declared_with() -> None:
    assert BLOCK.values(7) == {
        "a_map": MAP,
        "b_map": MAP,
        "bias": Address("row"),
        "pitch": 14,
        "m": 7,
        "n": 8,
        "beta": Argument("beta"),
    }


def test_bytes_are_the_values_at_their_offsets_and_zeros_between() -> None:
    maps = {"a_map": b"\xaa" * 128, "b_map": b"\xbb" * 128}
    packed = BLOCK.pack({**maps, "bias": 2**63 + 1, "pitch": -5, "m": 7, "n": -1, "beta": 0.5})
    assert packed[:256] == maps["a_map"] + maps["b_map"]
    assert struct.unpack("<QqiIf", packed[256:284]) == (2**63 + 1, -5, 7, 2**32 - 1, 0.5)
    assert packed[284:] == bytes(100)


def test_a_value_that_is_missing_or_does_not_fit_is_an_error() -> None:
    small = block([int32("m", "", given)])
    with pytest.raises(KeyError, match="m"):
        small.pack({})
    with pytest.raises(struct.error):
        small.pack({"m": 2**31})
    assert small.pack({"m": 2**31 - 1})[:4] == b"\xff\xff\xff\x7f"


def test_a_name_given_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match="parameter names repeat"):
        block([int32("m", "", given), scalar("m", "")])


def test_a_pointer_is_declared_with_its_star_and_a_value_without() -> None:
    declarations = {field.name: field.declaration for field in BLOCK.fields}
    assert declarations["bias"] == "cutlass::half_t* bias"
    assert declarations["m"] == "int32_t m"
