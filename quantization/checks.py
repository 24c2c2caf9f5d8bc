"""What `from_codes` may be given: each function raises ProblemError with the value, or returns.

Contents are looked at, range of rows by range of rows; a GPU is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from warploom.arguments import shown
from warploom.errors import ProblemError, WarploomError
from warploom.generator.formats import SCALE_TYPES, WeightFormat, weight_format
from warploom.quantization import slabs
from warploom.quantization.metadata import Metadata, dtype_of, e8m0

INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_NAN_E8M0 = 255
_SMALLER = "divide the weight by a power of two, and give that to its products as scale_a"


def metadata_of(
    codes: Tensor, scales: Tensor, format: str, group: int | None, activations: str
) -> Metadata:
    """Return what the packed weight will be; names, types and shapes of codes and scales fit it."""
    row = known(format)
    for name, tensor in (("codes", codes), ("scales", scales)):
        require_tensor(name, tensor)
    own = dtype_of(row.codes)
    able = INTEGERS if own in INTEGERS else (*INTEGERS, own)
    if codes.dtype not in able:
        raise ProblemError(
            f"codes {codes.dtype}", rule=f"must be one of {listed(able)} for format {format}"
        )
    if codes.dim() != 2 or 0 in codes.shape:
        raise ProblemError(f"codes {list(codes.shape)}", rule="must be [N, K], and not empty")
    n, k = codes.shape
    metadata = Metadata(format, group, scale_name(scales.dtype, row), activations, n, k)
    expected = (n, metadata.groups)
    if tuple(scales.shape) != expected:
        of_group = "a row" if group is None else f"a row and {group} of k"
        raise ProblemError(
            f"scales {list(scales.shape)}",
            rule=f"must be {list(expected)}: one for {of_group} of codes {[n, k]}",
        )
    require_device("scales", scales, codes)
    return metadata


def known(format: str) -> WeightFormat:
    """Return the row of a format's name."""
    try:
        return weight_format(format)
    except WarploomError as error:
        raise ProblemError(error.value, rule=error.rule, fix=error.fix) from None


def require_tensor(name: str, value: object) -> None:
    """Raise for what is no tensor with contents."""
    if not isinstance(value, Tensor):
        raise ProblemError(f"{name} {value!r:.80}", rule="must be a tensor")
    if value.device.type == "meta":
        raise ProblemError(f"{name} on the device meta", rule="must have contents")


def resolved(name: str, tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy where torch has negated it lazily: its bits are read."""
    if not tensor.is_neg():
        return tensor
    try:
        return tensor.resolve_neg()
    except NotImplementedError:
        raise ProblemError(
            f"{name} of {tensor.dtype} that torch has negated lazily (is_neg())",
            rule="must be of a type that torch negates",
            fix="convert the tensor that it is a view of",
        ) from None


def require_device(name: str, tensor: Tensor, codes: Tensor) -> None:
    """Raise for a tensor that lies elsewhere than the codes."""
    if tensor.device != codes.device:
        raise ProblemError(
            f"{name} on {tensor.device}", rule=f"must be on {codes.device}, where the codes are"
        )


def scales_of(scales: Tensor, metadata: Metadata) -> Tensor:
    """Return the scales in their own type (e8m0 may come as uint8); kernels take all of them."""
    largest, rule, _ = largest_scale(metadata)
    if metadata.scale == "e8m0":
        bits = scales.contiguous().view(torch.uint8)
        refuse(bits == _NAN_E8M0, bits, "scale", "be below 255, which is NaN as e8m0")
        refuse(bits > e8m0(largest), bits, "scale", f"{rule} ({e8m0(largest)})", fix=_SMALLER)
        return bits.view(metadata.scale_dtype)
    wide = scales.float() if scales.dtype.itemsize == 1 else scales  # torch compares no 8 bits
    wrong = ~(wide.abs() <= largest)
    if bool(wrong.any()):
        refuse(~torch.isfinite(wide), wide, "scale", "be finite")
        refuse(wrong, scales, "scale", rule, fix=_SMALLER)
    return scales.detach()


def require_fp8_scales(name: str, scales: Tensor) -> None:
    """Raise for a scale of an fp8 weight, of any shape, that is NaN, infinite or negative."""
    if scales.device.type == "meta":
        return
    wide = scales.detach().float()  # torch compares no 8 bits
    wrong = ~((wide >= 0) & (wide < torch.inf))
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        raise ProblemError(
            f"{name} {wide[tuple(place)].item():g} at {place}",
            rule="must be finite and not negative: it multiplies a block of the weight",
            fix="load the checkpoint again, or quantize its weight again",
        )


def global_scale_of(given: Tensor | None, codes: Tensor, metadata: Metadata) -> Tensor | None:
    """Return the global scale, [] or [N] of fp32, that a format has; 1 where none is given."""
    if not metadata.slab.row.scaled_twice:
        if given is not None:
            raise ProblemError(
                f"a global scale for format {metadata.format}",
                rule="must be None",
                fix="nvfp4 has one; multiply it into the scales",
            )
        return None
    if given is None:
        return torch.ones((), device=codes.device)
    require_tensor("global scale", given)
    require_device("global scale", given, codes)
    if given.dtype != torch.float32 or tuple(given.shape) not in ((), (metadata.n,)):
        raise ProblemError(
            f"global scale {given.dtype} {list(given.shape)}",
            rule=f"must be float32, [] or [{metadata.n}]",
        )
    wrong = ~torch.isfinite(given) | (given == 0)
    if bool(wrong.any()):
        value = given.reshape(-1)[wrong.reshape(-1)][0].item()
        raise ProblemError(f"global scale {value:g}", rule="must be finite, and not be 0")
    return given.detach()


def largest_scale(metadata: Metadata) -> tuple[float, str, str]:
    """Return the largest size of a scale, and the rule and the fix where one is larger."""
    slab, dtype = metadata.slab, metadata.scale_dtype
    most = 2.0**127 if slab.scale == "e8m0" else torch.finfo(dtype).max
    if slab.largest_scale is None or slab.largest_scale >= most:
        rule = f"be at most {most:g} in size, the largest of {dtype}"
        return most, rule, "take scale_dtype=torch.bfloat16"
    what = f"groups of {slab.format} by activations {slab.activations!r}"
    return slab.largest_scale, f"be at most {slab.largest_scale:g} in size in {what}", _SMALLER


def require_zeros(zeros: Tensor | None, scales: Tensor, metadata: Metadata) -> None:
    """Raise for zero points that are missing, not asked for, of another shape, or out of range."""
    row = metadata.slab.row
    if row.highest_zero is None:
        if zeros is not None:
            raise ProblemError(
                f"zero points for format {row.name}",
                rule="must be None",
                fix="uint4 has zero points",
            )
        return
    if zeros is None:
        raise ProblemError(
            f"no zero points for format {row.name}",
            rule=f"must be {list(scales.shape)} integers from 0 to {row.highest_zero}",
            fix="where all are 8, take format int4, and codes less 8",
        )
    require_tensor("zero points", zeros)
    if zeros.dtype not in INTEGERS or zeros.shape != scales.shape:
        raise ProblemError(
            f"zero points {zeros.dtype} {list(zeros.shape)}",
            rule=f"must be integers {list(scales.shape)}, as the scales",
        )
    require_device("zero points", zeros, scales)
    outside = (zeros < 0) | (zeros > row.highest_zero)
    refuse(outside, zeros, "zero point", f"be from 0 to {row.highest_zero}")


def require_codes(codes: Tensor, metadata: Metadata) -> None:
    """Raise for a code that the format does not have, or that stands for no number."""
    row = metadata.slab.row
    if codes.dtype.is_floating_point:
        codes = codes.view(torch.uint8)
    kind, ranges = torch.iinfo(codes.dtype), [*slabs.row_ranges(metadata, codes.device)]
    wrong = []  # for each range; a GPU is waited for once
    for first, end in ranges:
        part = codes[first:end]
        if kind.min < row.lowest or kind.max > row.highest:
            low, high = torch.aminmax(part)
            wrong.append((low < row.lowest) | (high > row.highest))
        wrong += [(part == nan).any() for nan in row.nans]
    if not wrong or not bool(torch.stack(wrong).any()):
        return
    for first, end in ranges:
        part = codes[first:end]
        outside = (part < row.lowest) | (part > row.highest)
        rule = f"be from {row.lowest} to {row.highest} for format {row.name}"
        refuse(outside, part, "code", rule, first)
        for nan in row.nans:
            refuse(part == nan, part, "code", f"not be {nan}, which is NaN as {row.name}", first)


def refuse(
    wrong: Tensor, values: Tensor, name: str, rule: str, first: int = 0, fix: str = ""
) -> None:
    """Raise for the first value that is `wrong`; rows count from `first`."""
    if bool(wrong.any()):
        row, column = (int(i) for i in wrong.nonzero()[0])
        value = values[row, column].item()
        where = f"row {first + row}, {'k' if name in ('code', 'weight') else 'group'} {column}"
        raise ProblemError(f"{name} {value} of {where}", rule=f"must {rule}", fix=fix)


def scale_name(dtype: torch.dtype, row: WeightFormat) -> str:
    """Return what the table calls a type of scales that the format takes."""
    able = {dtype_of(SCALE_TYPES[name].torch): name for name in row.scales}
    if "e8m0" in row.scales:
        able[torch.uint8] = "e8m0"
    if not isinstance(dtype, torch.dtype) or dtype not in able:
        raise ProblemError(
            f"scales {shown(dtype)}", rule=f"must be one of {listed(able)} for format {row.name}"
        )
    return able[dtype]


def listed(values: Iterable[torch.dtype]) -> str:
    """Types by their names in torch, for a message."""
    return ", ".join(str(value).removeprefix("torch.") for value in values)
