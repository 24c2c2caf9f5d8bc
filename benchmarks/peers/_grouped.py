"""Grouped GEMMs, whose groups end at offsets on the device, compared with torch's and DeepGEMM's.

Rows are those that experts of language models get, drawn evenly or by Zipf's law; groups of k are
the gradients of the same weights. In fp8 their operands come from `warploom.cast`, untimed. Of
masked batches the same number of rows counts in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import get_args

import torch

from benchmarks.families import Asked, Case
from benchmarks.peers import _routing
from benchmarks.peers._checked import kernels_of
from benchmarks.peers._routing import Routed
from benchmarks.peers.libraries import deep_gemm
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.elements import element
from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation, GemmShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.gemm.samples import GemmData, Operands, grouped_call
from warploom.runtime.measure import largest_share
from warploom.runtime.plan import run
from warploom.runtime.tensors import normal
from warploom.runtime.trial import wrong

Sizes = tuple[int, int, int, int]  # groups, n, k, rows in all
BY_ROWS = GemmOperation("bf16", "bf16", "bf16", batched=True, groups="rows")
BLOCKS = replace(BY_ROWS, a="e4m3", b="e4m3", accumulation="promoted", block_scales="row_block")
BY_K = replace(BY_ROWS, layout_a="col", layout_b="row", groups="k")
_FP8 = GemmOperation("e4m3", "e4m3", "bf16", batched=True, groups="k")
BY_K_FP8 = {  # by the blocks of scales that `cast` has
    "1x128": replace(_FP8, accumulation="promoted", block_scales="row_row"),
    "row": replace(_FP8, epilogue=(Scale("row"), Scale("column"))),
}
ZERO = torch.zeros(1, dtype=torch.int32)


def grouped(_asked: Asked) -> Iterator[Case]:
    """The listed experts, of rows drawn evenly and by Zipf's law, in bf16 and in fp8 with block
    scales; gradients of weights; and masked batches.
    """
    listed = cells()["gemm"]["grouped_gemm"]
    for operation, name in ((BY_ROWS, "rows"), (BLOCKS, "blocks"), (BY_K, "k")):
        for shape in listed[name]:
            for routed in ("even", "zipf"):
                yield _case(operation, tuple(shape), routed)
    for block, operation in BY_K_FP8.items():
        for shape in listed["k_fp8"]:
            for routed in get_args(Routed):
                yield _case(operation, tuple(shape), routed, f", scales of {block}")
    for operation in (BY_ROWS, BLOCKS):
        for groups, n, k, rows in listed["masked"]:
            yield _case(replace(operation, groups="masked"), (groups, n, k, rows * groups), "even")


def few(_asked: Asked) -> Iterator[Case]:
    """The listed experts, of the rows of a few tokens: most have none."""
    for shape in cells()["gemm"]["grouped_gemm"]["few"]:
        yield _case(BY_ROWS, tuple(shape), "even")


def _total(rows: int, groups: int) -> int:
    """The rows that are drawn: as many for each group, where there are enough of them."""
    return rows // groups * groups or rows


def _case(operation: GemmOperation, shape: Sizes, routed: Routed, scales: str = "") -> Case:
    """So many rows in all of A [rows, k], and weights [n, k]; of gradients k is their rows."""
    groups, n, k, rows = shape
    kind, size = operation.a, element(operation.a)
    problem = {
        "m": rows if operation.by_rows else n,
        "n": n if operation.by_rows else k,
        "k": k if operation.by_rows else rows,
        "type": kind,
        "epilogue": f"{groups} groups of {operation.groups}, {routed}{scales}",
    }
    told = f"{groups} groups of {operation.groups} {routed}, {rows} rows, {n}x{k}{scales}"
    floor = Floor.of(2 * rows * n * k, _moved(operation, shape, routed), size.bits)
    name = told if kind == "bf16" else f"{kind} {told}"
    contenders = _contenders if operation not in BY_K_FP8.values() else _contenders_by_k
    return Case(name, problem, floor, partial(contenders, operation, shape, routed))


def _moved(operation: GemmOperation, shape: Sizes, routed: Routed) -> int:
    """Bytes, without the weights of groups that have no row; gradients of these are zeros."""
    groups, n, k, rows = shape
    if operation.groups == "rows":
        ends = _routing.ends(_total(rows, groups), groups, routed, 0)
        groups = int((ends.diff(prepend=ZERO) > 0).sum())
    size = element(operation.a).bytes
    if operation.by_rows:
        return size * (rows * k + groups * n * k) + 2 * rows * n
    return size * rows * (n + k) + 2 * groups * n * k


def _contenders(
    operation: GemmOperation, shape: Sizes, routed: Routed, asked: Asked
) -> list[Contender]:
    groups, n, k, rows = shape
    total, masked = _total(rows, groups), operation.groups == "masked"
    each = -(-total // groups)
    extents = (each, n, k) if operation.by_rows else (n, k, each)
    data = GemmData(operation, GemmShape(*extents, groups), asked.device, 0)
    seeds = iter(range(1 << 20))

    def drawn() -> Operands:
        one = data.operands()
        if masked:
            assert one.offs is not None  # noqa: S101 (for type checkers)
            return replace(one, offs=torch.full_like(one.offs, rows // groups))
        if total < groups:
            one = replace(one, a=one.a[:total], out=one.out[:total])
        ends = _routing.ends(total, groups, routed, next(seeds))
        return replace(one, offs=ends.to(asked.device))

    given = rotated(drawn, _moved(operation, shape, routed), asked.device)
    ours = _contender("warploom", operation, given, partial(_ours, operation), peer=False)
    found = [replace(ours, told=partial(kernels_of, ours.calls[0]))]
    if operation.a == "bf16" and not masked and _is_asked("torch", asked):
        found.append(_contender("torch._grouped_mm", operation, given, _torch, peer=True))
    if operation.by_rows and _is_asked("deep_gemm", asked):
        found.append(_deep_gemm(operation, given))
    for spec in asked.specs:
        if spec.operation == operation:
            call = partial(_ours, operation, spec=spec)
            found.append(_contender(spec.name, operation, given, call, peer=False))
    return found


def _is_asked(peer: str, asked: Asked) -> bool:
    return not asked.peers or peer in asked.peers


def _contender(
    name: str,
    operation: GemmOperation,
    given: Sequence[Operands],
    call: Callable[[Operands], torch.Tensor],
    *,
    peer: bool,
) -> Contender:
    outs = [replace(one, out=wrong(torch.empty_like(one.out))) for one in given]
    share = partial(_share, operation, outs[0], lambda: call(outs[0]))
    return Contender(name, [partial(call, one) for one in outs], share, peer=peer)


def _share(operation: GemmOperation, one: Operands, call: Callable[[], torch.Tensor]) -> float:
    """The largest error of what a call returns, in the rows that count, as a share of its bound."""
    made = grouped_call(operation, one)
    d, (exact, bound) = call(), made.bound()
    counted = made.counted() if operation.groups == "masked" else slice(None)
    return largest_share(d[counted], exact[counted], bound[counted])


def _ours(operation: GemmOperation, one: Operands, spec: KernelSpec | None = None) -> torch.Tensor:
    return run(grouped_call(operation, one, spec))[0]


def _torch(one: Operands) -> torch.Tensor:
    return torch._grouped_mm(one.a, one.b, offs=one.offs)


# ---- Groups of k in fp8 --------------------------------------------------------------------------


def _contenders_by_k(
    operation: GemmOperation, shape: Sizes, routed: Routed, asked: Asked
) -> list[Contender]:
    """The gradients of weights in fp8, and in bf16 of the same rows."""
    groups, n, k, rows = shape
    rows, seeds = rows // groups * groups, iter(range(1 << 20))

    def drawn() -> tuple[Operands, Operands]:
        dy, x = (normal((rows, size), None, asked.device).bfloat16() for size in (n, k))
        offs = _routing.ends(rows, groups, routed, next(seeds)).to(asked.device)
        out = x.new_empty(groups, n, k)
        return _quantized(operation, dy, x, offs, out), Operands(dy.t(), x, (), out, offs=offs)

    moved = _moved(operation, shape, routed)
    narrow, wide = zip(*rotated(drawn, moved, asked.device), strict=True)
    ours = _contender("warploom", operation, narrow, partial(_ours, operation), peer=False)
    found = [replace(ours, told=partial(kernels_of, ours.calls[0]))]
    found.append(_contender("warploom, bf16", BY_K, wide, partial(_ours, BY_K), peer=False))
    if _is_asked("torch", asked):
        if operation.block_scales == "none":
            name = "torch._scaled_grouped_mm"
            found.append(_contender(name, operation, narrow, _torch_scaled(narrow), peer=True))
        found.append(_contender("torch._grouped_mm, bf16", BY_K, wide, _torch, peer=True))
    if operation.block_scales != "none" and _is_asked("deep_gemm", asked):
        found.append(_deep_gemm(operation, narrow))
    return found


def _quantized(
    operation: GemmOperation,
    dy: torch.Tensor,
    x: torch.Tensor,
    offs: torch.Tensor,
    out: torch.Tensor,
) -> Operands:
    """dy.T and x in e4m3, in which each group begins at a multiple of 128, with their scales."""
    of_blocks = operation.block_scales != "none"
    found, ends = list[torch.Tensor](), offs
    for one in (dy, x):
        block: str | tuple[int, int] = (1, 128) if of_blocks else "row"
        _, _, values, scales, ends = cast(
            one, torch.float8_e4m3fn, block=block, transpose=True, offsets=offs
        )
        found += [values, scales if of_blocks else scales.reshape(-1)]
    names = ("scale_a", "scale_b") if of_blocks else ("scale_row", "scale_column")
    listed = tuple(zip(names, found[1::2], strict=True))
    return Operands(found[0], found[2].t(), listed, out, offs=ends)


def _torch_scaled(given: Sequence[Operands]) -> Callable[[Operands], torch.Tensor]:
    """torch's GEMM takes a scale for each row of every group: here all groups have the same."""
    scales = {
        id(one.offs): [item[1].repeat(one.out.shape[0]) for item in one.listed] for one in given
    }

    def call(one: Operands) -> torch.Tensor:
        first, second = scales[id(one.offs)]
        return torch._scaled_grouped_mm(
            one.a,
            one.b,
            first,
            second,
            offs=one.offs,
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )

    return call


# ---- DeepGEMM ------------------------------------------------------------------------------------


def _deep_gemm(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """DeepGEMM's kernel for such groups; how operands are laid out for it is not timed."""
    name, prepare = {
        "rows": ("deep_gemm, rows padded before", deep_gemm.contiguous),
        "masked": ("deep_gemm", deep_gemm.masked),
        "k": ("deep_gemm, adds to fp32", deep_gemm.by_k),
    }[operation.groups]
    ready: dict[int, deep_gemm.Ready] = {}

    def call(one: Operands) -> torch.Tensor:
        if id(one) not in ready:
            ready[id(one)] = prepare(one)
        multiply, d, _ = ready[id(one)]
        multiply()
        return d

    def placed() -> torch.Tensor:
        call(given[0])
        _, d, places = ready[id(given[0])]
        d.zero_()  # what timed calls added up, or is to be overwritten
        return call(given[0])[places]

    calls = [partial(call, one) for one in given]
    share = partial(_share, operation, given[0], placed)
    return Contender(name, calls, share, peer=True)
