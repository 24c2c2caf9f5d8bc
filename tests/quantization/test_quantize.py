"""A quantised weight has the scales that its format says, and for these the nearest codes."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nearest import e4m3, nearest
from packed_samples import same
from torch import Tensor

from warploom.errors import ProblemError
from warploom.generator.formats import FORMATS, Activations
from warploom.quantization import PackedWeight, quantize, slabs


def drawn(n: int, k: int, seed: int = 0) -> Tensor:
    """Gaussian weights, with some rows far larger and smaller than others."""
    chance = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-12, 2, (n, 1), generator=chance)
    return torch.randn(n, k, generator=chance) * sizes


# What takes scales of any size, in each format; a row of 32 is one group.
UNLIMITED: dict[str, dict[str, Any]] = {
    "int4": {"format": "int4", "group": 32, "activations": "int8"},
    "uint4": {"format": "uint4", "group": None},
    "int8": {"format": "int8", "group": 32, "activations": "int8"},
    "e4m3": {"format": "e4m3", "group": None},
    "mxfp4": {"format": "mxfp4", "activations": "e4m3"},
    "mxfp8": {"format": "mxfp8", "activations": "e4m3"},
    "nvfp4": {"format": "nvfp4"},
    "int2": {"format": "int2", "group": 32, "activations": "int8"},
    "ternary": {"format": "ternary", "group": 32, "activations": "int8"},
}


def group_of(format: str) -> int:
    return 16 if format == "nvfp4" else 32


def unpacked(weight: PackedWeight) -> tuple[list[list[int]], Tensor, Tensor | None]:
    codes, scales, zeros = weight.unpack()
    if codes.dtype == torch.float8_e4m3fn:
        codes = codes.view(torch.uint8)
    return codes.tolist(), scales, zeros


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_code_is_the_nearest(format: str, scale_dtype: torch.dtype) -> None:
    """Ties and what is off by less than fp32 rounds may go either way."""
    mx, size = format in ("mxfp4", "mxfp8", "nvfp4"), group_of(format)
    w = drawn(4, 96)
    made = quantize(w, format, size, scale_dtype=None if mx else scale_dtype)
    codes, scales, zeros = unpacked(made)
    assert mx or scales.dtype == scale_dtype
    whole = made.global_scale(0, 4)
    exact_scales = scales.double() * (1 if whole is None else whole.double())
    factors, points = exact_scales.tolist(), None if zeros is None else zeros.tolist()
    for row, line in enumerate(w.tolist()):
        for k, weight in enumerate(line):
            zero = 0 if points is None else points[row][k // size]
            exact = Fraction(weight) / Fraction(factors[row][k // size])
            slack = abs(exact) / 2**22
            allowed = nearest(format, exact - slack, zero) | nearest(format, exact + slack, zero)
            code = codes[row][k]
            positive = (
                0
                if (format, code) in {("mxfp4", 8), ("nvfp4", 8), ("e4m3", 128), ("mxfp8", 128)}
                else code
            )
            assert positive in allowed, (row, k)


@pytest.mark.parametrize(("format", "lowest"), [("int4", -8), ("int8", -128), ("int2", -2)])
def test_the_scale_is_the_largest_weight_with_its_sign_by_the_lowest_code(
    format: str, lowest: int
) -> None:
    w = torch.zeros(4, 64)
    w[0, 5], w[0, 7] = 3.0, -2.5
    w[1, 5], w[1, 7] = 2.5, -3.0
    w[2, 5], w[2, 7] = 3.0, -3.0
    w[3, 40] = 1.0
    codes, scales, _ = unpacked(quantize(w, format, 32, scale_dtype=torch.float32))
    third = -3.0 / lowest
    assert scales.tolist() == [[-third, 1], [third, 1], [third, 1], [1, 1 / lowest]]
    assert [codes[0][5], codes[1][7], codes[2][7], codes[3][40]] == [lowest] * 4
    assert codes[2][5] == -lowest - 1


def test_ternary_has_the_mean_size_of_the_whole_weight_as_models_of_bitnet_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the formula of b1.58: clip(round(w / mean |w|)), one mean, and a half goes to the even."""
    w = torch.tensor([[3.0, -3.0, 0.5, 0.0], [1.5, -1.0, 0.25, 2.75]])
    monkeypatch.setattr(slabs, "RANGE", 1)
    w = torch.cat((w[:1].expand(64, 4), w[1:].expand(64, 4)))  # two ranges of rows
    codes, scales, _ = unpacked(quantize(w, "ternary", scale_dtype=torch.float32))
    assert scales.unique().tolist() == [1.5]
    assert codes[0] == [1, -1, 0, 0] and codes[64] == [1, -1, 0, 1]
    codes, scales, _ = unpacked(quantize(drawn(3, 64), "ternary", 32))
    means = drawn(3, 64).view(3, 2, 32).abs().double().mean(2).float().bfloat16()
    assert torch.equal(scales, means)
    assert {code for row in codes for code in row} == {-1, 0, 1}


def test_zero_points_put_the_range_of_a_group_and_0_on_the_codes() -> None:
    w = torch.zeros(4, 32)
    w[0, :2] = torch.tensor([-5.0, 10.0])
    w[1, :2] = torch.tensor([3.0, 15.0])  # 0 stays exact: padding and pruned weights are
    w[2, :] = -1.5
    codes, scales, zeros = unpacked(quantize(w, "uint4", 32))
    assert zeros is not None
    assert scales.float().flatten().tolist() == [1, 1, torch.tensor(0.1).bfloat16(), 1]
    assert zeros.flatten().tolist() == [5, 0, 15, 0]
    assert [codes[0][:3], codes[1][:3], codes[2][:1], codes[3][:1]] == [
        [0, 15, 5],
        [3, 15, 0],
        [0],
        [0],
    ]


def test_e4m3_has_448_for_the_largest_of_a_group() -> None:
    w = drawn(5, 64, 3)
    codes, scales, _ = unpacked(quantize(w, "e4m3", 64, scale_dtype=torch.float32))
    for row, line in enumerate(w.abs().tolist()):
        assert scales[row, 0].item() == (torch.tensor(max(line)) / torch.tensor(448.0)).item()
        assert abs(e4m3(codes[row][line.index(max(line))])) == 448


def mx(line: list[float]) -> tuple[int, list[int]]:
    """A block as OCP's MX has it: E8M0's bits, and e2m1's bits of each."""
    largest = max(map(abs, line))
    if largest == 0:
        return 127, [8 * (math.copysign(1, x) < 0) for x in line]
    exponent = max(math.frexp(largest)[1] - 1 - 2, -127)
    codes = []
    for x in line:
        near = nearest("mxfp4", abs(Fraction(x)) / Fraction(2) ** exponent)
        even = [code for code in near if len(near) == 1 or code % 2 == 0]
        codes.append(even[0] + 8 * (math.copysign(1, x) < 0))
    return exponent + 127, codes


def test_mxfp4_is_as_its_standard_says_to_the_bit() -> None:
    """Half way between two numbers it is the even one; above 6 it is 6; any exponent fits."""
    quarters = torch.arange(-32, 32) / 4.0  # all numbers, all that is half way, and what saturates
    rows = [quarters[:32], quarters[32:], torch.zeros(32), -torch.zeros(32)]
    rows += [torch.randn(32, generator=torch.Generator().manual_seed(s)) for s in range(4)]
    rows += [quarters[32:] * 2.0**e for e in (-149, -130, -126, 100, 124)]
    rows += [torch.full((32,), 2.0**-149), torch.full((32,), torch.finfo(torch.float32).max)]
    w = torch.stack(rows)
    codes, scales, _ = unpacked(quantize(w, "mxfp4", activations="e4m3"))
    expected = [mx(line) for line in w.tolist()]
    assert scales.view(torch.uint8).flatten().tolist() == [bits for bits, _ in expected]
    assert codes == [block for _, block in expected]


@pytest.mark.parametrize(
    ("format", "activations"), [(row.name, to) for row in FORMATS.values() for to in row.orders]
)
def test_groups_of_zeros_have_a_scale_that_kernels_take(
    format: str, activations: Activations
) -> None:
    """Of mxfp8 by 16 bits 1 is too large."""
    w = drawn(3, 64)
    w[1], w[2, 32:] = 0, 0
    made = quantize(w, format, group_of(format), activations=activations)
    assert not made.dequantize()[w == 0].any()
    codes, scales, zeros = made.unpack()
    whole = made.channel_scales if format == "nvfp4" else None
    again = PackedWeight.from_codes(
        codes,
        scales,
        zeros,
        format=format,
        group=group_of(format),
        activations=activations,
        global_scale=None if whole is None else whole[:3],
    )
    assert same(again.data, made.data)


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_of_any_range_that_is_not_finite_is_named_before_a_scale(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scales that ternary shares are NaN in all ranges; the first also has one too large."""
    monkeypatch.setattr(slabs, "RANGE", 1)
    w = drawn(200, 256)
    w[1, 3], w[199, 7] = 1e30, math.nan
    with pytest.raises(ProblemError, match=r"^weight nan of row 199, k 7: must be finite"):
        quantize(w, format)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [0.0, 1e-45, 1e-40, 1e-30, 1e30, 3.4e38])
def test_weights_of_any_size_come_back_about_as_they_were(format: str, size: float) -> None:
    """A scale of 0 made NaN of a group of zeros, and inf of one that is nearly so."""
    w = torch.full((4, 32), size)
    w[2:] *= -1
    w[3] = 0
    # The scale of ternary is as large as weights, which bf16 rounds up to infinity.
    types = {"mxfp4": [None], "mxfp8": [None], "nvfp4": [None], "ternary": [torch.float32]}
    for scale_dtype in types.get(format, [torch.bfloat16, torch.float32]):
        back = quantize(w, scale_dtype=scale_dtype, **UNLIMITED[format]).dequantize(torch.float64)
        assert torch.isfinite(back).all()
        # In mxfp4 what is above 6 becomes 6. The least scales there are have large steps.
        least = 2.0**-129 if format.startswith("mx") else 448 * 2.0**-149
        assert (back - w.double()).abs().max() <= 0.25 * size + least
        assert not back[3].any()


@settings(max_examples=40)
@given(
    st.sampled_from([*FORMATS]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=32),
)
def test_no_finite_weight_comes_back_infinite_or_further_off_than_a_step(
    format: str, dtype: torch.dtype, values: list[float]
) -> None:
    w = torch.zeros(1, 32)
    w[0, : len(values)] = torch.tensor(values)
    w = w.to(dtype).nan_to_num()
    wide = torch.float32 if format == "ternary" else None
    back = quantize(w, scale_dtype=wide, **UNLIMITED[format]).dequantize(torch.float64)
    largest = w.double().abs().max()
    steps = {"int4": 8, "uint4": 7.5, "int8": 128, "e4m3": 14, "mxfp4": 4}
    steps |= {
        "int2": 2,
        "nvfp4": 4,
        "mxfp8": 8,
        "ternary": 1,
    }  # what is larger than the mean becomes that
    least = 2.0**-127 if format.startswith("mx") else 448 * torch.finfo(torch.bfloat16).tiny / 128
    assert (back - w.double()).abs().max() <= 1.01 * largest / steps[format] + least


def test_tiny_weights_keep_what_their_scales_can_say() -> None:
    """fp16 has steps of 6e-8: scales below become one step, and codes fewer."""
    w = torch.full((1, 32), 1e-7)
    back = quantize(w, "int4", 32, scale_dtype=torch.float16).dequantize(torch.float64)
    assert (back - w).abs().max() <= 2.0**-25


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_and_of_any_strides_are_those_in_fp32(
    format: str, dtype: torch.dtype
) -> None:
    w = torch.randn(70, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = quantize(w.float(), format, group_of(format))
    wide = torch.zeros(96, 140, dtype=dtype).t()
    wide[::2] = w
    for view in (w, w.t().contiguous().t(), wide[::2], torch.nn.Parameter(w)):
        made = quantize(view, format, group_of(format))
        assert same(made.data, expected.data)
        assert not made.data.requires_grad


@pytest.mark.parametrize("format", FORMATS)
def test_a_weight_is_quantised_alike_in_one_range_of_rows_and_in_many(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = drawn(200, 160)
    whole = quantize(w, format, group_of(format))
    monkeypatch.setattr(slabs, "RANGE", 1)
    parts = quantize(w, format, group_of(format))
    assert same(parts.data, whole.data)
    assert parts.error(w) == whole.error(w)
    assert torch.equal(parts.dequantize(), whole.dequantize())


@pytest.mark.parametrize(
    ("format", "group", "percent"),
    [
        ("int4", 32, 8.7),
        ("int4", 128, 10.4),
        ("int4", None, 13.9),
        ("uint4", 128, 10.2),
        ("int8", 128, 0.66),
        ("e4m3", 128, 2.7),
        ("mxfp4", 32, 11.6),
        ("nvfp4", 16, 9.6),
        ("mxfp8", 32, 3.0),
        ("int2", 32, 36.4),
        ("int2", 128, 42.7),
        ("ternary", None, 51.5),
    ],
)
def test_the_error_of_gaussian_weights_is_what_the_format_is_worth(
    format: str, group: int | None, percent: float
) -> None:
    """int4 of 128 with the plain scale, largest / 7, is at 11.7."""
    w = torch.randn(256, 4096, generator=torch.Generator().manual_seed(5))
    report = quantize(w, format, group).error(w)
    assert percent - 0.4 < 100 * report.relative < percent


def test_the_report_says_how_far_and_where() -> None:
    w = drawn(130, 64)
    made = quantize(w, "int4", 32)
    report = made.error(w)
    gap = made.dequantize(torch.float64) - w.double()
    rows = gap.norm(dim=1) / w.double().norm(dim=1)
    assert math.isclose(report.relative, float(gap.norm() / w.double().norm()))
    assert report.largest == float(gap.abs().max())
    assert report.worst_row == int(rows.argmax())
    assert math.isclose(report.worst_relative, float(rows.max()))
    assert f"row {report.worst_row}" in str(report)
    nothing = torch.zeros(2, 64)
    exact = quantize(nothing, "int4", 32).error(nothing)
    assert (exact.relative, exact.largest, exact.worst_relative) == (0, 0, 0)
    with pytest.raises(ProblemError, match=r"^weight \[129, 64\]: must be \[130, 64\]"):
        made.error(w[:-1])


W = torch.ones(3, 256)


def with_value(value: float) -> Tensor:
    changed = W.clone()
    changed[2, 130] = value
    return changed


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"weight": W.double()}, r"weight torch.float64: must be one of float32, bfloat16, float16"),
    ({"weight": W[0]}, r"weight \[256\]: must be \[N, K\], and not empty"),
    ({"weight": W[:, :0]}, r"weight \[3, 0\]: must be \[N, K\], and not empty"),
    ({"weight": None}, r"weight None: must be a tensor"),
    ({"weight": W.to("meta")}, r"weight on the device meta: must have contents"),
    ({"weight": with_value(math.nan)}, r"weight nan of row 2, k 130: must be finite"),
    ({"weight": with_value(-math.inf)}, r"weight -inf of row 2, k 130: must be finite"),
    (
        {"weight": with_value(1e6), "scale_dtype": torch.float16, "activations": "int8"},
        r"scale -125000.0 of row 2, group 1: must be at most 65504 in size, .* take scale_",
    ),
    (
        {"weight": with_value(9e3)},
        r"scale -1125.0 of row 2, group 1: must be at most 1024 in size in groups of int4 by .*: d",
    ),
    (
        {"weight": with_value(16), "format": "mxfp4"},
        r"scale 4.0 of row 2, group 4: must be at most 2 in size in groups of mxfp4 by .*: divide",
    ),
    ({"format": "nvfp5"}, r"weight format 'nvfp5': must be one of int4, uint4, int8, e4m3, mxfp4"),
    ({"group": 16}, r"group 16 of format int4: must be one of 128, 64, 32, None"),
    ({"group": "none"}, r"group 'none' of format int4: must be one of"),
    (
        {"weight": W[:, :200]},
        r"group 128: must divide k, which is 200: groups of int4 that do: None",
    ),
    ({"symmetric": False}, r"symmetric False of format int4: must be True, .* take format uint4"),
    (
        {"format": "uint4", "symmetric": True},
        r"symmetric True of format uint4: must be False, .* take format int4 or int8",
    ),
    ({"scale_dtype": torch.float64}, r"scales torch.float64: must be one of bfloat16, float16"),
    (
        {"format": "mxfp4", "scale_dtype": torch.bfloat16},
        r"scales torch.bfloat16: must be one of float8_e8m0fnu",
    ),
    (
        {"format": "mxfp4", "activations": "int8"},
        r"activations 'int8' of format mxfp4: must be one of 16-bit, e4m3",
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[text for _, text in REFUSED])
def test_what_cannot_be_quantised_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProblemError) as raised:
        quantize(**({"weight": W} | changes))
    assert re.match(message, str(raised.value)), str(raised.value)
