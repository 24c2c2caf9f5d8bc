"""What others have quantised is taken whole, or refused by the value that does not fit."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from packed_samples import KINDS, Kind, as_bytes, drawn, packed, same
from torch import Tensor

from warploom.errors import ProblemError
from warploom.quantization import PackedWeight

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def e4m3(bits: int) -> float:
    exponent, mantissa = bits >> 3 & 15, bits & 7
    size = 2.0 ** (exponent - 7) * (1 + mantissa / 8) if exponent else mantissa * 2.0**-9
    return -size if bits >> 7 else size


def number(format: str, code: int) -> float:
    """What a code stands for, before zero point and scale; `code` as an unsigned byte."""
    if format in ("e4m3", "mxfp8"):
        return e4m3(code)
    if format in ("mxfp4", "nvfp4"):
        return -E2M1[code - 8] if code >= 8 else E2M1[code]
    return code if format == "uint4" or code < 128 else code - 256


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_scale_times_code_less_zero_point(
    kind: Kind,
) -> None:
    format, group, scale, activations = kind
    n, k = 3, 256
    codes, scales, zeros = drawn(format, group, scale, n, k)
    weight = PackedWeight.from_codes(
        codes, scales, zeros, format=format, group=group, activations=activations
    )
    factors = scales.double().tolist()
    lines = as_bytes(codes).tolist()
    points = [[0] * len(line) for line in factors] if zeros is None else zeros.tolist()
    size = group or k
    expected = [
        [
            factors[row][deep // size]
            * (number(format, lines[row][deep]) - points[row][deep // size])
            for deep in range(k)
        ]
        for row in range(n)
    ]
    exact = torch.tensor(expected, dtype=torch.float64)
    assert torch.equal(weight.dequantize(torch.float64), exact)
    assert torch.equal(weight.dequantize(torch.float32), exact.float())
    assert torch.equal(weight.dequantize(), exact.float().bfloat16())


def test_scales_of_powers_of_two_may_be_bytes() -> None:
    codes, scales, _ = drawn("mxfp4", 32, "e8m0", 5, 64)
    made = PackedWeight.from_codes(codes, scales.view(torch.uint8), format="mxfp4", group=32)
    assert same(made.data, packed("mxfp4", 32, "e8m0", "16-bit", 5, 64).data)


@pytest.mark.parametrize("format", ["int4", "uint4", "int8"])
def test_lazily_negated_numbers_are_resolved(format: str) -> None:
    """Torch refuses to view them as bytes, with an error of its own."""
    codes, scales, zeros = drawn(format, None, "bf16", 3, 64)
    signed = codes.to(torch.int16), scales, None if zeros is None else zeros.to(torch.int16)
    lazy = [None if one is None else torch._neg_view(-one) for one in signed]
    found = PackedWeight.from_codes(*lazy, format=format, group=None)  # type: ignore[arg-type]
    made = PackedWeight.from_codes(codes, scales, zeros, format=format, group=None)
    assert all(map(same, found.tensors().values(), made.tensors().values()))


def test_numbers_that_torch_cannot_negate_are_refused() -> None:
    """Torch makes such a view of e4m3 and then has no kernel for its values."""
    codes, scales, _ = drawn("e4m3", None, "bf16", 3, 64)
    with pytest.raises(ProblemError, match=r"codes of torch.float8_e4m3fn .*negated lazily"):
        PackedWeight.from_codes(torch._neg_view(codes), scales, format="e4m3", group=None)


def test_zero_points_reach_16_and_scales_may_be_negative() -> None:
    """GPTQ's files have zero points less one, so 16 is among them; scales of some are negative."""
    codes = torch.full((1, 32), 15)
    scales, zeros = torch.tensor([[-2.0]]), torch.tensor([[16]])
    made = PackedWeight.from_codes(codes, scales, zeros, format="uint4", group=32)
    assert made.dequantize().unique().tolist() == [2.0]


CODES = torch.zeros(2, 256, dtype=torch.int8)
BYTES = torch.zeros(2, 256, dtype=torch.uint8)
SCALES = torch.ones(2, 2)
ZEROS = torch.zeros(2, 2, dtype=torch.uint8)


def with_value(tensor: Tensor, value: float, row: int = 1, column: int = 1) -> Tensor:
    changed = tensor.clone()
    changed[row, column] = value
    return changed


NVFP4: dict[str, Any] = {
    "format": "nvfp4",
    "group": 16,
    "codes": BYTES % 16,
    "scales": torch.ones(2, 16).to(torch.float8_e4m3fn),
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"format": "int5"}, r"weight format 'int5': must be one of int4, uint4"),
    ({"codes": [[1]]}, r"codes \[\[1\]\]: must be a tensor"),
    ({"codes": CODES.float()}, r"codes torch.float32: must be one of int8, .* for format int4"),
    ({"codes": CODES.view(torch.float8_e4m3fn)}, r"codes torch.float8_e4m3fn: must be one of"),
    ({"codes": CODES[0]}, r"codes \[256\]: must be \[N, K\]"),
    ({"codes": CODES[:0]}, r"codes \[0, 256\]: must be \[N, K\], and not empty"),
    ({"codes": CODES.to("meta")}, r"codes on the device meta: must have contents"),
    ({"codes": with_value(CODES, 8)}, r"code 8 of row 1, k 1: must be from -8 to 7 for .*int4"),
    ({"codes": with_value(CODES, -9)}, r"code -9 of row 1, k 1: must be from -8 to 7"),
    (
        {"codes": with_value(CODES.long(), 2**40)},
        r"code 1099511627776 of row 1, k 1: must be from -8",
    ),
    (
        {"format": "int8", "codes": with_value(CODES.int(), 128)},
        r"code 128 of row 1, k 1: must be from -128 to 127",
    ),
    (
        {"format": "uint4", "zeros": ZEROS, "codes": with_value(BYTES, 16)},
        r"code 16 of row 1, k 1: must be from 0 to 15",
    ),
    (
        {"format": "mxfp4", "codes": with_value(BYTES, 200), "group": 32, "scales": BYTES[:, :8]},
        r"code 200 of row 1, k 1: must be from 0 to 15",
    ),
    (
        {"format": "e4m3", "codes": with_value(BYTES, 0x7F).view(torch.float8_e4m3fn)},
        r"code 127 of row 1, k 1: must not be 127, which is NaN as e4m3",
    ),
    (
        {"format": "e4m3", "codes": with_value(BYTES, 0xFF)},
        r"code 255 of row 1, k 1: must not be 255, which is NaN as e4m3",
    ),
    ({"group": 48}, r"group 48 of format int4: must be one of 128, 64, 32, None"),
    ({"group": True}, r"group True of format int4: must be"),
    (
        {"codes": CODES[:, :160], "scales": SCALES[:, :1]},
        r"group 128: must divide k, which is 160: groups of int4 that do: 32, None",
    ),
    ({"format": "mxfp4", "scales": ZEROS}, r"group 128 of format mxfp4: must be one of 32"),
    (
        {"activations": "bf16"},
        r"activations 'bf16' of format int4: must be one of 16-bit, e4m3, int8",
    ),
    ({"scales": SCALES.double()}, r"scales torch.float64: must be one of bfloat16, float16, floa"),
    (
        {"format": "mxfp4", "group": 32},
        r"scales torch.float32: must be one of float8_e8m0fnu, uint8 for format mxfp4",
    ),
    ({"scales": SCALES.t()[:1]}, r"scales \[1, 2\]: must be \[2, 2\]: one for a row and 128 of k"),
    (
        {"scales": SCALES[:, 0], "group": None},
        r"scales \[2\]: must be \[2, 1\]: one for a row of codes \[2, 256\]",
    ),
    ({"scales": with_value(SCALES, float("nan"))}, r"scale nan of row 1, group 1: must be finite"),
    (
        {"scales": with_value(SCALES.half(), float("-inf"))},
        r"scale -inf of row 1, group 1: must be finite",
    ),
    (
        {"format": "mxfp4", "group": 32, "scales": with_value(BYTES[:, :8], 255)},
        r"scale 255 of row 1, group 1: must be below 255, which is NaN as e8m0",
    ),
    (
        {"scales": with_value(SCALES, -1025)},
        r"scale -1025.0 of row 1, group 1: must be at most 1024 in size in groups of int4 by acti",
    ),
    (
        {"format": "int8", "scales": with_value(SCALES.half(), 128)},
        r"scale 128.0 of row 1, group 1: must be at most 127 in size in groups of int8 .*: divide",
    ),
    (
        {"format": "mxfp4", "group": 32, "scales": with_value(BYTES[:, :8], 129)},
        r"scale 129 of row 1, group 1: must be at most 2 in size in groups of mxfp4 .* \(128\): di",
    ),
    ({"zeros": ZEROS}, r"zero points for format int4: must be None: uint4 has zero points"),
    (
        {"format": "uint4"},
        r"no zero points for format uint4: must be \[2, 2\] integers from 0 to 16: where all are 8",
    ),
    (
        {"format": "uint4", "zeros": with_value(ZEROS, 17)},
        r"zero point 17 of row 1, group 1: must be from 0 to 16",
    ),
    (
        {"format": "uint4", "zeros": with_value(ZEROS.char(), -1)},
        r"zero point -1 of row 1, group 1: must be from 0 to 16",
    ),
    (
        {"format": "uint4", "zeros": ZEROS.float()},
        r"zero points torch.float32 \[2, 2\]: must be integers \[2, 2\]",
    ),
    (
        {"format": "uint4", "zeros": ZEROS[:1]},
        r"zero points torch.uint8 \[1, 2\]: must be integers \[2, 2\]",
    ),
    ({"global_scale": torch.ones(())}, r"a global scale for format int4: must be None: nvfp4 has"),
    (
        {**NVFP4, "global_scale": torch.ones(3)},
        r"global scale torch.float32 \[3\]: must be float32, \[\] or \[2\]",
    ),
    ({**NVFP4, "global_scale": torch.zeros(())}, r"global scale 0: must be finite, and not be 0"),
    (
        {**NVFP4, "global_scale": torch.tensor([1.0, float("inf")])},
        r"global scale inf: must be finite, and not be 0",
    ),
    ({**NVFP4, "activations": "e4m3"}, r"activations 'e4m3' of format nvfp4: must be one of 16-b"),
    ({"format": "ternary", "codes": with_value(CODES, -2)}, r"code -2 of row 1, k 1: must be from"),
]


def test_scales_that_no_kernel_multiplies_into_weights_may_be_of_any_size() -> None:
    """Per channel, and by activations of 8 bits."""
    large = torch.full((2, 2), 1e30)
    PackedWeight.from_codes(CODES, large[:, :1], format="int4", group=None)
    made = PackedWeight.from_codes(CODES, large, format="int8", group=128, activations="int8")
    assert same(made.unpack()[1], large)
    bits = BYTES[:, :8] + 254
    PackedWeight.from_codes(BYTES, bits, format="mxfp4", group=32, activations="e4m3")


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_does_not_fit_is_refused_before_anything_is_made(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = {"codes": CODES, "scales": SCALES, "format": "int4", "group": 128} | changes
    monkeypatch.setattr(PackedWeight, "empty", None)
    with pytest.raises(ProblemError) as raised:
        PackedWeight.from_codes(**arguments)
    assert re.match(message, str(raised.value)), str(raised.value)
