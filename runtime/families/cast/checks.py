"""What the arguments of a call must be, whatever the contents of tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, get_args

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import Function
from warploom.generator.families._product.groups import refuse_groups
from warploom.generator.families.cast.schedule import COLUMNS, Block, Rounding
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.rounding import check_rounding, check_state
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families.cast.call import Cast

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
GATES = get_args(Function)
LAYOUTS = ("column_major", "row_major")
BLOCKS: Mapping[Any, Block] = {
    **{name: name for name in get_args(Block)},
    **{tuple(map(int, name.split("x"))): name for name in get_args(Block) if "x" in name},
}


def require_words(call: Cast) -> None:
    """Raise ProblemError for an unknown block, rounding, layout or gate."""
    block: Any = call.block
    if not isinstance(block, str | tuple) or block not in BLOCKS:
        raise ProblemError(
            f"block {shown(block)}",
            rule='must be "tensor", "row", (1, 128), (128, 128) or (1, 32)',
            fix="use one of them",
        )
    words = [("rounding", get_args(Rounding)), ("scale_layout", LAYOUTS)]
    for name, known in [*words, ("gate", GATES)] if call.gate is not None else words:
        value = getattr(call, name)
        if not isinstance(value, str) or value not in known:
            raise ProblemError(
                f"{name} {shown(value)}",
                rule=f"must be one of {', '.join(known)}",
                fix="use one of them",
            )


def check(call: Cast) -> None:
    """Raise ProblemError for arguments that do not fit each other."""
    x = call.x
    if x.dim() == 0:
        raise ProblemError(
            "x of no dimensions", rule="must be [.., m, n] or [n]", fix="give it a dimension"
        )
    if x.dtype not in FLOATS:
        raise ProblemError(
            f"x {shown(x.dtype)}",
            rule="must be float16, bfloat16 or float32",
            fix="convert it",
        )
    _check_gate(call)
    _check_options(call)
    _check_offsets(call)
    _check_scale(call)
    check_rounding(call.rounding, call.rounding_state)
    if call.rounding_state is not None:
        check_state(call.rounding_state)
    amax = call.amax
    if amax is not None and (amax.numel() != 1 or amax.dtype != torch.float32):
        raise ProblemError(
            f"amax {list(amax.shape)} {shown(amax.dtype)}",
            rule="must have one element of torch.float32",
            fix="torch.zeros(1, device=x.device) makes one",
        )
    for name, one in call.written():
        refuse_repeated(name, one)


def _check_gate(call: Cast) -> None:
    """Raise ProblemError for a gate that no kernel has."""
    gate, gradient, x = call.gate, call.gradient, call.x
    if gate is None:
        if gradient is not None:
            raise ProblemError(
                "gradient without a gate",
                rule="must be of a gate's result",
                fix='pass gate="silu", for instance, or leave gradient out',
            )
        return
    if not call.transpose:
        raise ProblemError(
            "a gate without transpose",
            rule="must be with transpose=True: kernels have both orientations of it",
            fix='let the GEMM of gate and up have it: warploom.gemm(x, w.t(), gate="silu")',
        )
    if x.dtype == torch.float32:
        raise ProblemError(
            f"x of {x.dtype} with a gate",
            rule="must be bfloat16 or float16",
            fix="compute gate and up in one of them",
        )
    width = COLUMNS if gradient is not None else 1
    if x.shape[-1] % (2 * width):
        raise ProblemError(
            f"x {list(x.shape)} of gate and up",
            rule=f"must have a last dimension that is a multiple of {2 * width}",
            fix="pad the weights of gate and up",
        )
    if gradient is None:
        return
    like = (*x.shape[:-1], x.shape[-1] // 2), x.dtype
    if (tuple(gradient.shape), gradient.dtype) != like:
        raise ProblemError(
            f"gradient {list(gradient.shape)} of {gradient.dtype}",
            rule=f"must be {list(like[0])} of {like[1]}, as the result of the gate of x is",
            fix="convert or reshape it",
        )


def _check_offsets(call: Cast) -> None:
    """Raise ProblemError for groups of rows that no kernel casts."""
    offsets, x = call.offsets, call.x
    if offsets is None:
        return
    if offsets.dtype != torch.int32 or offsets.dim() != 1 or not offsets.is_contiguous():
        raise ProblemError(
            f"offsets {list(offsets.shape)} of {offsets.dtype} with strides "
            f"{list(offsets.stride())}",
            rule="must be contiguous int32 [G]: where each group of rows ends",
            fix="use counts.cumsum(0, dtype=torch.int32)",
        )
    refuse_groups(offsets.shape[0])
    refused: list[tuple[bool, str, str, str]] = [
        (
            x.dim() != 2,
            f"x {list(x.shape)} with offsets",
            "must be [m, n], whose rows are in groups",
            "use x.flatten(0, -2)",
        ),
        (
            not call.transpose,
            "offsets without transpose",
            "must be with transpose=True: groups have gaps in x.T alone",
            "leave offsets out: rows of x are cast alike in whatever group they are",
        ),
        (
            call.blocks not in ("tensor", "row", "1x128"),
            f"offsets with block {shown(call.block)}",
            'must have a block of "tensor", "row" or (1, 128), which grouped GEMMs read',
            "use (1, 128)",
        ),
    ]
    for is_refused, value, rule, fix in refused:
        if is_refused:
            raise ProblemError(value, rule=rule, fix=fix)


def _check_options(call: Cast) -> None:
    """Raise ProblemError for options that no kernel has together."""
    block, name = call.blocks, f"block {shown(call.block)}"
    refused: list[tuple[bool, str, str, str]] = [
        (
            call.scale_t is not None and not call.transpose,
            "scale_t without transpose",
            "must be with transpose=True: its scales are those of x.T",
            "pass transpose=True, or leave scale_t out",
        ),
        (
            call.scale_t is not None and block in ("tensor", "128x128"),
            f"scale_t with {name}",
            "must be left out: x.T has the scales of x",
            "leave it out",
        ),
        (
            call.scale_t is not None and block == "1x32",
            f"scale_t with {name}",
            "must be left out: e8m0 scales are computed",
            "leave it out",
        ),
        (
            block == "1x32" and call.dtype == torch.int8,
            f"dtype torch.int8 with {name}",
            "must be torch.float8_e4m3fn or torch.float8_e5m2, as mxfp8 has them",
            "use one of them, or a block of (1, 128)",
        ),
        (
            block == "1x32" and call.scale is not None,
            f"scale with {name}",
            "must be left out: e8m0 scales are computed",
            "leave it out",
        ),
        (
            block == "1x32" and call.pow2,
            f"pow2 with {name}",
            "must be False: e8m0 scales are powers of two",
            "leave it out",
        ),
        (
            call.pow2 and call.scale is not None,
            "pow2 and scale",
            "must be False with scale, which is used as it is",
            "leave one of them out",
        ),
        (
            call.amax is not None and block != "tensor",
            f"amax with {name}",
            'must have a block of "tensor"',
            "leave amax out, or take the largest of what the scales say",
        ),
        (
            call.transposes_scales and call.scale is not None and call.scale_t is None,
            f"transpose and scale with {name}",
            "must be with scale_t: blocks of x and of x.T have scales of their own",
            "pass scale_t=, the scales of x.T as a call without scale= returns them",
        ),
        (
            call.scale_t is not None and call.scale is None,
            "scale_t without scale",
            "must be with scale: scales of x and of x.T are both given, or both computed",
            "pass scale=, or leave scale_t out",
        ),
    ]
    for is_refused, value, rule, fix in refused:
        if is_refused:
            raise ProblemError(value, rule=rule, fix=fix)


def _check_scale(call: Cast) -> None:
    """Raise ProblemError for given scales of another type or shape than computed ones."""
    groups = "" if call.offsets is None else f" in {call.groups} groups"
    for name, scale, shape_of, whose in (
        ("scale", call.scale, scale_shape, ""),
        ("scale_t", call.scale_t, scale_t_shape, groups),
    ):
        if scale is None:
            continue
        shape = shape_of(call)
        of_one = call.blocks == "tensor" and scale.numel() == 1
        if scale.dtype != torch.float32 or not (of_one or scale.shape == shape):
            fits = "one element" if call.blocks == "tensor" else f"the shape {list(shape)}"
            raise ProblemError(
                f"{name} {list(scale.shape)} {shown(scale.dtype)}",
                rule=f"must be torch.float32 with {fits}, for x {list(call.x.shape)}{whose} "
                f"and block {shown(call.block)}",
                fix="convert, reshape or expand it",
            )


def scale_shape(call: Cast) -> torch.Size:
    """The shape of the scales of x."""
    m, n = call.extents
    rows, parts = call.x.shape[:-1], -(-n // COLUMNS)
    shapes: dict[Block, tuple[int, ...]] = {
        "tensor": (),
        "row": (*rows, 1),
        "1x128": (*rows, parts),
        "128x128": (-(-m // COLUMNS), parts),
        "1x32": (*rows, -(-n // 32)),
    }
    return torch.Size(shapes[call.blocks])


def scale_t_shape(call: Cast) -> torch.Size:
    """The shape of the scales of x.T, where it has its own."""
    (_, n), columns = call.extents, call.columns_t
    across = {"row": 1, "1x128": -(-columns // COLUMNS), "1x32": -(-columns // 32)}
    return torch.Size((n, across[call.blocks]))


def pitch(tensor: torch.Tensor) -> int | None:
    """Elements from row to row through all leading dimensions; None where that varies."""
    rows, last = tensor.shape[:-1].numel(), tensor.shape[-1]
    try:
        step: int = tensor.view(rows, last).stride(0)
    except RuntimeError:  # the rows are not one pitch apart
        return None
    return step if rows > 1 else last


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether elements of a row follow each other, so that kernels read it where it lies."""
    return (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1) and pitch(tensor) is not None
