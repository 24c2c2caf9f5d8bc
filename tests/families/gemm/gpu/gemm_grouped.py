"""Kernels of grouped GEMMs, their calls, and mutants: `gemm_grouped.py NAME`.

A mutant is run until a result is wrong. Exit status 0: one was, as it must be.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from typing import Any, cast

import gemm_mutants
import torch
from product_arena import assert_within, fill, guarded
from rooms import Guarded

import warploom
from warploom.generator.elements import element
from warploom.generator.epilogue import (
    Bias,
    EpilogueStep,
    Gate,
    Residual,
    Scale,
    Scatter,
    columns,
)
from warploom.generator.families.gemm import GemmOperation, complete
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families.gemm.grouped_call import GroupedCall
from warploom.runtime.families.gemm.samples import along_rows


def spec(
    tile: tuple[int, int] = (128, 128),
    groups: str = "rows",
    *,
    a: str = "bf16",
    d: str = "bf16",
    layout_b: str = "col",
    epilogue: tuple[EpilogueStep, ...] = (),
    accumulation: str = "fast",
    scales: str = "",
    **schedule: Any,
) -> KernelSpec:
    """Return a kernel; what is not given is the plainest. `scales` are A's of blocks, if any."""
    blocks: dict[str, Any] = {}
    if scales:
        a, accumulation = "e4m3", "promoted"
        scaling = "row_row" if groups == "k" else "row_block"
        blocks = {"block_scales": scaling, "block_scale_a": scales}
    by_k = groups == "k" and element(a).bits == 16
    layouts = ("col", "row") if by_k else ("row", layout_b)
    operation = GemmOperation(
        *(a, a, d, *layouts, epilogue, accumulation),  # type: ignore[arg-type]
        batched=True,
        groups=groups,  # type: ignore[arg-type]
        **blocks,
    )
    fields = {"tile": (*tile, 1024 // element(a).bits), **schedule}
    return KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))


PINGPONG = {"kernel_schedule": "pingpong"}
SWAPPED = {"swap_ab": True}
BIAS, ROW, COLUMN = Bias("bf16"), Scale("row"), Scale("column")
ROWS = [
    spec((128, 256), cluster=(2, 1)),
    spec((128, 256), cluster=(1, 2), layout_b="row"),
    spec((128, 128), **PINGPONG),
    spec((128, 192), raster="along_n", swizzle_size=3),
    spec((256, 128), a="fp16", d="fp16"),
    spec((64, 64), consumers=1, store="direct"),
    spec((16, 128), **SWAPPED),
    spec((32, 128), layout_b="row", **SWAPPED),
    spec((96, 128), **SWAPPED),
    spec((64, 64), consumers=1, store="direct", **SWAPPED),
    spec((64, 128), **PINGPONG, **SWAPPED),
    spec((128, 128), d="fp32", epilogue=(BIAS,)),
    spec((128, 128), epilogue=(BIAS, Gate("silu"), ROW)),
    spec((64, 128), epilogue=(BIAS, Gate("swiglu_oai", "interleaved"), ROW), **SWAPPED),
    spec((128, 256), a="e4m3"),
    spec((128, 128), a="e4m3", epilogue=(ROW, COLUMN, BIAS, Gate("silu"))),
    spec((128, 128), a="e4m3", accumulation="promoted", epilogue=(ROW, COLUMN)),
    spec((32, 128), a="e4m3", **SWAPPED),
    spec((128, 128), a="int8", d="int32"),
    spec((128, 128), epilogue=(BIAS, Gate("silu"), ROW, Residual("bf16"))),
    spec((32, 128), epilogue=(Residual("fp32"),), **SWAPPED),
]
BLOCKS = [
    spec((128, 128), scales="fp32"),
    spec((128, 128), scales="fp32", cluster=(2, 1), raster="along_n"),
    spec((256, 128), scales="fp32"),
    spec((64, 64), scales="fp32", consumers=1),
    spec((64, 128), scales="fp32", **PINGPONG),
    spec((128, 128), scales="fp32", epilogue=(BIAS, Gate("silu"), ROW)),
    spec((128, 128), scales="e8m0"),
    spec((32, 128), scales="fp32", **SWAPPED),
    spec((16, 64), scales="e8m0", consumers=1, **SWAPPED),
    spec((64, 128), scales="fp32", epilogue=(BIAS, Gate("silu")), **SWAPPED),
    spec((64, 64), scales="fp32", consumers=1, store="direct"),
]
MASKED = [
    spec((128, 256), "masked", cluster=(2, 1)),
    spec((64, 64), "masked", consumers=1, store="direct"),
    spec((32, 128), "masked", **SWAPPED),
    spec((128, 128), "masked", epilogue=(BIAS, Gate("silu"), ROW)),
    spec((128, 128), "masked", scales="fp32"),
    spec((32, 128), "masked", scales="fp32", **SWAPPED),
    spec((64, 64), "masked", consumers=1, epilogue=(Residual("bf16"),)),
]
BY_K = [
    spec((128, 256), "k", cluster=(2, 1)),
    spec((128, 256), "k", cluster=(1, 2), d="fp32"),
    spec((128, 128), "k", **PINGPONG),
    spec((64, 64), "k", consumers=1, store="direct", a="fp16", d="fp16"),
]
# Groups of k in 8 bits, which have whole k tiles.
WHOLE_K = [
    spec((128, 256), "k", a="e4m3", cluster=(2, 1)),
    spec((128, 128), "k", a="e4m3", d="fp32", **PINGPONG),
    spec((128, 128), "k", a="e4m3", accumulation="promoted", epilogue=(ROW, COLUMN)),
    spec((64, 64), "k", a="int8", d="int32", consumers=1, store="direct"),
    spec((64, 128), "k", a="e4m3", **SWAPPED),
]
BLOCKS_OF_K = [
    spec((128, 128), "k", scales="fp32", d="fp32"),
    spec((256, 128), "k", scales="fp32"),
    spec((64, 128), "k", scales="fp32", **PINGPONG),
    spec((64, 64), "k", scales="e8m0", consumers=1),
    spec((64, 128), "k", scales="fp32", **SWAPPED),
    spec((64, 64), "k", scales="fp32", d="fp32", consumers=1, store="direct"),
]
KERNELS = [*ROWS, *BLOCKS, *MASKED, *BY_K, *WHOLE_K, *BLOCKS_OF_K]


@dataclass(frozen=True)
class Routing:
    """How many rows (or k) there are, how many groups, and how they are divided."""

    size: int
    groups: int
    how: str  # even, skewed, or one: a group has all
    left_out: int = 13  # at the end, that belong to no group
    drawn: int = 0  # rows that count at most, where groups have one size

    def offsets(self, generator: torch.Generator) -> torch.Tensor:
        """Draw where groups end, int32 on the GPU."""
        weights = torch.ones(self.groups, device="cuda")
        if self.how == "skewed":
            order = torch.randperm(self.groups, generator=generator, device="cuda")
            weights = 1 / (order + 1.0)
        if self.how == "one":
            weights = (torch.arange(self.groups, device="cuda") == self.groups // 2).float()
        ids = torch.multinomial(weights, self.size, replacement=True, generator=generator)
        ends = torch.bincount(ids, minlength=self.groups).cumsum(0)
        return ends.clamp(max=max(self.size - self.left_out, 1)).to(torch.int32)

    @property
    def masked(self) -> Routing:
        """The same where groups have one size, of which some rows count."""
        each = 2 * self.size // self.groups + 1
        return replace(self, size=each * self.groups, drawn=self.size)

    def lengths(self, generator: torch.Generator) -> torch.Tensor:
        """Draw how many rows of each group count, int32 on the GPU."""
        ends = replace(self, size=self.drawn).offsets(generator)
        counts = ends.diff(prepend=ends.new_zeros(1))
        return counts.clamp(max=self.size // self.groups)


ROUTINGS = {
    "a row": Routing(1, 1, "even"),
    "ragged": Routing(701, 9, "even"),
    "skewed": Routing(1531, 33, "skewed"),
    "one group has all": Routing(307, 5, "one"),
    "most are empty": Routing(61, 128, "even"),
    "as many groups as there may be": Routing(2111, 1024, "skewed"),
    "more tiles than multiprocessors": Routing(9001, 24, "even"),
    "whole tiles": Routing(2048, 1, "one", 0),
}
SIDES = {"rows": (264, 392), "k": (136, 264)}  # n and k, or m and n


@dataclass
class Call:
    """Everything that one call of a kernel is given."""

    kernel: KernelSpec
    a: Guarded
    b: Guarded
    d: Guarded
    offs: torch.Tensor
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def groups(self) -> str:
        """Of the operation."""
        return cast("GemmOperation", self.kernel.operation).groups

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        if self.groups == "masked":
            by_group = {
                name: one.unflatten(0, (len(self.offs), -1)) if name in _OF_ROWS else one
                for name, one in self.keywords.items()
            }
            d = warploom.grouped_gemm(
                *(self.a.view.unflatten(0, (len(self.offs), -1)), self.b.view),
                lengths=self.offs,
                out=self.d.view.unflatten(0, (len(self.offs), -1)),
                out_dtype=self.d.view.dtype,
                spec=self.kernel,
                **by_group,
            )
            return d.flatten(0, 1)
        return warploom.grouped_gemm(
            *(self.a.view, self.b.view),
            offs=self.offs,
            out=self.d.view,
            out_dtype=self.d.view.dtype,
            spec=self.kernel,
            **self.keywords,
        )

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, NaN in rows of no group, and how far a kernel's may be off."""
        return self.call.bound()

    @property
    def call(self) -> GroupedCall:
        """The call, of which groups of one size are rows that follow each other."""
        operation = cast("GemmOperation", self.kernel.operation)
        return GroupedCall(
            *(self.a.view, self.b.view, self.offs),
            use_fast_accum=operation.accumulation == "fast",
            expected_m=0 if self.groups == "masked" else None,
            out=self.d.view,
            out_dtype=self.d.view.dtype,
            **self.keywords,
        )


_OF_ROWS = ("scale_a", "row_scale", "residual")  # keywords that have a row for each of A's


def poison(view: torch.Tensor) -> None:
    """Fill with bytes of 0xff: NaN in every float type, -1 in int8."""
    view.view({1: torch.int8, 2: torch.int16}[view.dtype.itemsize]).fill_(-1)


def call(
    kernel: KernelSpec, routing: Routing, *, seed: int = 0, k: int = 0, along_k: bool = False
) -> Call:
    """Make a call on random data; rows of no group and matrices of empty ones are poisoned.

    Block scales of A are side by side along its rows, or `along_k`.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    operation = cast("GemmOperation", kernel.operation)
    masked, odd = operation.groups == "masked", kernel.schedule.store == "direct"  # type: ignore[attr-defined]
    routing = routing.masked if masked else routing
    offs = routing.lengths(generator) if masked else routing.offsets(generator)
    kind, d_kind = TORCH[operation.a], TORCH[operation.d]
    if operation.groups == "k" and element(operation.a).bits == 8:
        return _whole_k(kernel, routing, offs, generator, along_k=along_k)
    ends = offs.tolist()
    counts = ends if masked else [b - a for a, b in zip([0, *ends], ends, strict=False)]
    if operation.groups == "k":
        m, n = SIDES["k"]
        a, b = guarded(m, routing.size, kind, "col"), guarded(routing.size, n, kind)
        d = guarded(m, n + odd, d_kind, odd=odd, batches=(routing.groups,)) if odd else None
        b = guarded(routing.size, n + odd, kind) if odd else b
        d = d or guarded(m, n, d_kind, batches=(routing.groups,))
        fill(a.view, generator)
        fill(b.view, generator)
        for view in (a.view.t(), b.view):
            poison(view[ends[-1] :])
        for group in range(0, routing.groups, 3):  # whose neighbours must not see it
            poison(a.view.t()[ends[group] - counts[group] : ends[group]])
        return Call(kernel, a, b, d, offs)
    n, shared = SIDES["rows"]
    n += odd and not operation.epilogue
    k = k or (shared if element(operation.a).bits == 16 else 400)
    gated = any(isinstance(step, Gate) for step in operation.epilogue)
    if gated:  # 16 of gate and up; with block scales whole blocks of both
        n = n + 8 if operation.block_scales == "none" else 256
    a = guarded(routing.size, k, kind)
    b = guarded(k, n, kind, operation.layout_b, batches=(routing.groups,))
    d = guarded(routing.size, n // 2 if gated else n, d_kind, odd=odd)
    fill(a.view, generator)
    fill(b.view, generator)
    for group, count in enumerate(counts):
        if count == 0:
            poison(b.view[group].t() if operation.layout_b == "col" else b.view[group])
    keywords = _epilogue(operation, routing, n, generator)
    if operation.block_scales != "none":
        keywords |= _block_scales(operation, routing, n, k, generator, along_k=along_k)
    made = Call(kernel, a, b, d, offs, keywords)
    uncounted = ~made.call.counted()
    a.view.view(torch.int8 if a.view.dtype.itemsize == 1 else torch.int16)[uncounted] = -1
    if operation.block_scales != "none":
        scale = keywords["scale_a"]
        scale.view(torch.uint8 if scale.dtype.itemsize == 1 else scale.dtype)[uncounted] = (
            255 if scale.dtype.itemsize == 1 else torch.nan
        )
    return made


EACH = 8  # times as many of k as a routing has, so that few groups are empty


def _whole_k(
    kernel: KernelSpec,
    routing: Routing,
    offs: torch.Tensor,
    generator: torch.Generator,
    *,
    along_k: bool,
) -> Call:
    """A call with groups of k that begin at multiples of 128."""
    operation = cast("GemmOperation", kernel.operation)
    kind, d_kind = TORCH[operation.a], TORCH[operation.d]
    odd = kernel.schedule.store == "direct"  # type: ignore[attr-defined]
    offs = (offs * EACH + 127) // 128 * 128
    ends, blocks = offs.tolist(), (routing.size * EACH + 127) // 128
    (m, n), k = SIDES["k"], 128 * blocks
    n += odd
    a, b = guarded(m, k, kind), guarded(k, n, kind, "col")
    d = guarded(m, n, d_kind, odd=odd, batches=(routing.groups,))
    for matrix in (a.view, b.view.t()):
        fill(matrix, generator)
        for group in range(0, routing.groups, 3):  # whose neighbours must not see it
            poison(matrix[:, 0 if group == 0 else ends[group - 1] : ends[group]])
        poison(matrix[:, ends[-1] :])
    keywords: dict[str, Any] = {}
    if operation.block_scales != "none":
        for name, rows, type_ in (
            ("scale_a", m, operation.block_scale_a),
            ("scale_b", n, operation.block_scale_b),
        ):
            scale = drawn(generator, rows, blocks)
            scale[:, ends[-1] // 128 :] = torch.nan
            if type_ == "e8m0":
                scale = (124 + 4 * scale.nan_to_num(nan=32.75)).to(torch.uint8)
                scale = scale.view(torch.float8_e8m0fnu)
            keywords[name] = scale if along_k else along_rows(scale)
    elif operation.epilogue:
        keywords = {"scale_a": drawn(generator, m), "scale_b": drawn(generator, n)}
    return Call(kernel, a, b, d, offs, keywords)


def drawn(generator: torch.Generator, *extents: int) -> torch.Tensor:
    """Draw scales."""
    return torch.rand(extents, generator=generator, device="cuda") + 0.5


def _block_scales(
    operation: GemmOperation,
    routing: Routing,
    n: int,
    k: int,
    generator: torch.Generator,
    *,
    along_k: bool,
) -> dict[str, Any]:
    """Scales of 1x128 of A and of 128x128 of B."""
    blocks = -(-k // 128)

    scale_a = drawn(generator, routing.size, blocks)
    if operation.block_scale_a == "e8m0":
        scale_a = (124 + 4 * scale_a).to(torch.uint8).view(torch.float8_e8m0fnu)
    scale_a = scale_a if along_k else along_rows(scale_a)
    return {"scale_a": scale_a, "scale_b": drawn(generator, routing.groups, -(-n // 128), blocks)}


def _epilogue(
    operation: GemmOperation, routing: Routing, n: int, generator: torch.Generator
) -> dict[str, Any]:
    """The keywords that ask for the steps of an operation."""

    found: dict[str, Any] = {}
    for index, step in enumerate(operation.epilogue):
        if isinstance(step, Gate):
            found |= {"gate": step.function, "gate_layout": step.layout}
        elif isinstance(step, Bias):
            found["bias"] = drawn(generator, routing.groups, n).to(TORCH[step.element])
        elif step == ROW:
            found["scale_a" if index == 0 else "row_scale"] = drawn(generator, routing.size)
        elif isinstance(step, Residual):
            width = columns(operation.epilogue, n)
            residual = drawn(generator, routing.size, width)
            found["residual"] = residual.to(TORCH[step.element])
        elif not isinstance(step, Scatter):  # whose indices gemm_scatter.py has
            found["scale_b"] = drawn(generator, routing.groups, n)
    return found


def verify(made: Call) -> None:
    """Run a call: D is right in every row of a group, and nothing is written beside these."""
    made.d.room.fill_(-1)
    d = made.run()
    assert made.d.untouched_outside()
    exact, bound = made.exact()
    if made.b.view.dim() == 3:
        counted = made.call.counted()
        rest = d[~counted]
        integers = {2: torch.int16, 4: torch.int32}[rest.dtype.itemsize]
        assert (rest.view(integers) == -1).all(), "a row of no group was written"
        d, exact, bound = d[counted], exact[counted], bound[counted]
    else:  # groups that are poisoned are NaN, as their sums are; others must not be
        poisoned = exact.isnan()
        assert d[poisoned].isnan().all()
        d, exact = d.masked_fill(poisoned, 0), exact.masked_fill(poisoned, 0)
        bound = bound.masked_fill(poisoned, 0)
    assert_within(d, exact, bound)


@dataclass(frozen=True)
class Mutant(gemm_mutants.Mutant):
    """And how rows are divided."""

    routing: Routing = ROUTINGS["ragged"]


_SHAPE = (1, 1, 1)  # a routing says it
MUTANTS = {
    "rows of the neighbour are stored": Mutant(
        ROWS[0], r"max\(0, min\(64, at\.m_end - row\)\)", _SHAPE, "64"
    ),
    "a tile has the matrix of the group before": Mutant(
        ROWS[2],
        r", group, table\.ends\[group \+ 1\]\};",
        _SHAPE,
        ", max(group - 1, 0), table.ends[group + 1]};",
    ),
    "the first tile of a group is of the one before": Mutant(
        ROWS[2], r"table\.tiles\[middle\] <= tiles_row", _SHAPE, "table.tiles[middle] < tiles_row"
    ),
    "a group ends a row too early": Mutant(
        ROWS[6],
        r"ends\[group \+ 1\] = start = end;",
        _SHAPE,
        "ends[group + 1] = (start = end) - 1;",
    ),
    "rows of the neighbour are stored one by one": Mutant(
        ROWS[5], r"place\.row\[i\] >= at\.m_end", _SHAPE, "place.row[i] >= p.m"
    ),
    "a group has the bias of the first": Mutant(
        ROWS[11], r"batch \* p\.bias_0_batch", _SHAPE, "0 * p.bias_0_batch"
    ),
    "rows have the block scales of the rows before": Mutant(
        BLOCKS[0], r"int row = before \+ first", _SHAPE, "int row = first"
    ),
    "columns have the block scales of the rows before": Mutant(
        BLOCKS[7], r"int column = before \+ threadIdx", _SHAPE, "int column = threadIdx"
    ),
    "a group has the block scales of the first": Mutant(
        BLOCKS[0], r"at\.batch \* p\.b_scales_batch_pitch", _SHAPE, "0 * p.b_scales_batch_pitch"
    ),
    "rows that do not count are stored": Mutant(
        MASKED[0], r"max\(0, min\(p\.offsets\[group\], rows\)\)", _SHAPE, "rows"
    ),
    "a batch begins where the one before ends": Mutant(
        MASKED[2], r"\{group \* rows_of_group \+", _SHAPE, "{table.ends[group] +"
    ),
    "the last k tile of a group has rows of the next": Mutant(
        BY_K[0], r"end = min\(full_end, at\.k_end\)", _SHAPE, "end = full_end"
    ),
    "a group of whole k tiles begins where the one before does": Mutant(
        WHOLE_K[0],
        r"place\.k_begin = table\.ends\[place\.batch\]",
        _SHAPE,
        "place.k_begin = table.ends[max(place.batch - 1, 0)]",
    ),
    "a group of k has the block scales of the first": Mutant(
        BLOCKS_OF_K[0],
        r"at\.m \+ \(first \+ k_tile\) \* p\.a_scales_k",
        _SHAPE,
        "at.m + k_tile * p.a_scales_k",
    ),
}


if __name__ == "__main__":
    chosen = MUTANTS[sys.argv[1]]
    gemm_mutants.judge(chosen, lambda seed: verify(call(chosen.kernel, chosen.routing, seed=seed)))
