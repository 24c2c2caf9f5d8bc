"""Kernels that scatter rows, and their calls, on indices that are no permutation.

D has more rows than A. Some rows of A have an index that is no row of D, and most rows of D have no
index: they must keep what they hold. Indices lie between others that name a row of D which nothing
may be written to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import gemm_arena as arena
import gemm_cases as cases
import gemm_grouped as grouped
import torch
from product_arena import assert_within, guarded
from rooms import Guarded

import warploom
from warploom.generator.epilogue import Amax, Bias, Gate, Residual, Scatter, columns
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._product.steps.scatter import written

TO, TO_LONG = Scatter("int32"), Scatter("int64")
BIAS, ROW, COLUMN = grouped.BIAS, grouped.ROW, grouped.COLUMN
PINGPONG, SWAPPED = grouped.PINGPONG, grouped.SWAPPED
PLAIN = [
    cases.spec((128, 128), epilogue=(TO,), **PINGPONG),
    cases.spec((128, 256), epilogue=(Bias("bf16"), TO_LONG), cluster=(2, 1)),
    cases.spec((128, 192), epilogue=(TO,), raster="along_n", swizzle_size=3),
    cases.spec((256, 96), a="fp16", epilogue=(TO_LONG,)),
    cases.spec((128, 176), epilogue=(Residual("fp32"), TO)),
    cases.spec((64, 8), epilogue=(TO,), consumers=1),
    cases.spec((64, 64), epilogue=(TO_LONG,), consumers=1, store="direct"),
    cases.spec((64, 64), epilogue=(Bias("fp32"), Residual("bf16"), TO), consumers=1, split_k=4),
    cases.spec((64, 64), epilogue=(TO,), consumers=1, cluster_split_k=2),
    cases.spec((128, 128), epilogue=(Residual("bf16"), TO), stream_k=True),
    cases.spec((128, 128), d="fp32", epilogue=(TO,)),
    cases.spec((128, 128), epilogue=(Bias("bf16"), Gate("silu"), TO), **PINGPONG),
    cases.spec((128, 256), epilogue=(Gate("gelu_tanh", "interleaved"), TO)),
    cases.spec((16, 128), epilogue=(TO,), **SWAPPED),
    cases.spec((96, 128), epilogue=(Bias("bf16"), TO_LONG), **SWAPPED),
    cases.spec((64, 128), epilogue=(TO,), **PINGPONG, **SWAPPED),
    cases.spec((8, 64), epilogue=(TO,), consumers=1, store="direct", **SWAPPED),
    cases.spec((32, 64), epilogue=(TO,), consumers=1, split_k=4, **SWAPPED),
    cases.spec((32, 128), epilogue=(Gate("silu"), TO), **SWAPPED),
    cases.spec((128, 256), a="e4m3", epilogue=(COLUMN, TO)),
    cases.spec((128, 128), a="e4m3", d="e4m3", epilogue=(Amax(), TO)),
    cases.spec((128, 128), a="int8", d="int8", epilogue=(ROW, TO)),
    cases.spec((128, 128), a="e4m3", scales=("row_block", "fp32", "fp32"), epilogue=(TO,)),
]
GROUPED = [
    grouped.spec((128, 256), epilogue=(TO,), cluster=(2, 1)),
    grouped.spec((128, 128), epilogue=(BIAS, TO_LONG), **PINGPONG),
    grouped.spec((64, 64), epilogue=(TO,), consumers=1, store="direct"),
    grouped.spec((16, 128), epilogue=(TO_LONG,), **SWAPPED),
    grouped.spec((32, 128), epilogue=(BIAS, TO), **SWAPPED),
    grouped.spec((64, 64), epilogue=(TO,), consumers=1, store="direct", **SWAPPED),
    grouped.spec((128, 128), epilogue=(BIAS, Gate("silu"), ROW, Residual("bf16"), TO)),
    grouped.spec((64, 128), epilogue=(BIAS, Gate("swiglu_oai", "interleaved"), ROW, TO), **SWAPPED),
    grouped.spec((128, 128), a="e4m3", epilogue=(ROW, COLUMN, BIAS, ROW, TO)),
    grouped.spec((128, 128), scales="fp32", epilogue=(BIAS, ROW, TO)),
    grouped.spec((32, 128), scales="fp32", epilogue=(TO,), **SWAPPED),
]
KERNELS = [*PLAIN, *GROUPED]
SHAPES = [(1, 264, 136), (63, 264, 193), (257, 520, 136), (701, 136, 1160)]

SPARE = 41  # indices before the first and behind the last
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def indices(rows: int, rows_d: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Draw the row of D [rows_d, n] for each of some rows: each at most once, and for some none.

    Row 0 of D has no index but those beside the result, which no kernel may read.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    room = torch.zeros(rows + 2 * SPARE, dtype=dtype, device="cuda")
    order = torch.randperm(rows_d - 1, generator=generator, device="cuda")[:rows] + 1
    view = room[SPARE : SPARE + rows]
    view.copy_(order)
    none = [-1, rows_d, -(2**31), 2**31 - 1]
    if dtype == torch.int64:  # whose lower half is a row
        none += [2**32, 2**32 + rows_d // 2, -(2**63), 2**63 - 1, -(2**32)]
    if rows > 2 * len(none):
        places = torch.randperm(rows, generator=generator, device="cuda")[: len(none)]
        view[places] = torch.tensor(none, dtype=dtype, device="cuda")
    return view


@dataclass
class Call:
    """A call whose rows are scattered: of gemm, or of groups."""

    made: arena.Call | grouped.Call
    index: torch.Tensor
    d: Guarded

    def run(self) -> torch.Tensor:
        """Run the kernel and return D."""
        return self.made.run()

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """D in float64, NaN in rows that must keep what they hold, and how far off it may be."""
        if isinstance(self.made, grouped.Call):
            return self.made.exact()
        exact, bound = arena.bound(self.made, self.made.listed[:-1], self.d.view.dtype)
        room = torch.full(self.d.view.shape, torch.nan, dtype=torch.float64, device="cuda")
        return written(room, exact, self.index), written(torch.zeros_like(room), bound, self.index)


def call(kernel: KernelSpec, m: int, n: int, k: int, *, seed: int = 0) -> Call:
    """Make a call of gemm on random data, whose D has about twice as many rows as A."""
    operation = cast("GemmOperation", kernel.operation)
    m, n, k = cases.fitting((m, n, k), kernel)
    made = arena.call(kernel, m, n, k, seed=seed)
    n, odd = columns(operation.epilogue, n), not cases.stored_by_tma(kernel)
    made.d = guarded(2 * m + 3, n, made.d.view.dtype, odd=odd)
    dtype = made.listed[-1][1].dtype
    index = indices(m, 2 * m + 3, dtype, seed)
    made.listed[-1] = ("scatter", index)
    return Call(made, index, made.d)


def grouped_call(kernel: KernelSpec, routing: grouped.Routing, *, seed: int = 0) -> Call:
    """The same of groups of rows."""
    operation = cast("GemmOperation", kernel.operation)
    made = grouped.call(kernel, routing, seed=seed)
    (rows, n), odd = made.d.view.shape, kernel.schedule.store == "direct"  # type: ignore[attr-defined]
    made.d = guarded(2 * rows + 3, n, made.d.view.dtype, odd=odd)
    dtype = torch.int32 if operation.epilogue[-1] == TO else torch.int64
    index = indices(rows, 2 * rows + 3, dtype, seed)
    made.keywords["scatter"] = index
    return Call(made, index, made.d)


def verify(made: Call) -> torch.Tensor:
    """Run a call: D is right in rows that an index names, and nothing else is written."""
    made.d.room.fill_(-1)
    if isinstance(made.made, arena.Call):
        arena.clear(made.made)
    before, copies = made.index.clone(), warploom.counters.copies
    d = made.run()
    assert d is made.d.view
    assert torch.equal(made.index, before)
    assert warploom.counters.copies == copies
    assert_right(made)
    return d


def assert_right(made: Call) -> None:
    """Assert that D, whose room was full of 0xff bytes, is what it must be."""
    d = made.d.view
    assert made.d.untouched_outside()
    exact, bound = made.exact()
    kept = exact.isnan().all(1)
    assert (d[kept].view(_BITS[d.dtype.itemsize]) == -1).all(), "a row without an index was written"
    assert_within(d[~kept], exact[~kept], bound[~kept])
