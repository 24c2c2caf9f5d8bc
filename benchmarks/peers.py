"""The operands of a GEMM cell, and the two calls on them: Warploom's and its peer's in torch.

The peers are torch.mm (cuBLAS), torch._scaled_mm with fast accumulation and torch._int_mm. Data is
random. Layouts are those of warploom: a `col` operand is the transposed view of a row-major one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch

import warploom
from benchmarks.cells import Shape
from benchmarks.protocol import Contender, gemm_bytes
from warploom.generator.elements import element
from warploom.generator.epilogue import EpilogueStep, Scale
from warploom.generator.families.gemm import Accumulation, GemmOperation, Layout
from warploom.generator.families.gemm.schedule import Input, Output
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families.gemm.epilogue import Item
from warploom.runtime.measure import Call, error_share
from warploom.runtime.trial import buffer_sets

_SCALES: dict[str, tuple[EpilogueStep, ...]] = {
    "none": (),
    "tensor": (Scale("device"), Scale("device")),
    "row_column": (Scale("row"), Scale("column")),
}


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of GEMM: its elements, its scaling, and the function of torch that is its peer."""

    a: Input  # of b too
    d: Output
    peer: str
    scaling: Literal["none", "tensor", "row_column"] = "none"

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of an input and of an output element."""
        return element(self.a).bits, element(self.d).bits

    def operation(self, layout_a: Layout = "row", layout_b: Layout = "col") -> GemmOperation:
        """The operation that Warploom is asked for."""
        epilogue = _SCALES[self.scaling]
        return GemmOperation(self.a, self.a, self.d, layout_a, layout_b, epilogue)


KINDS = {
    "bf16": Kind("bf16", "bf16", "torch.mm"),
    "e4m3": Kind("e4m3", "bf16", "torch._scaled_mm", "tensor"),
    "e4m3_row_column": Kind("e4m3", "bf16", "torch._scaled_mm", "row_column"),
    "int8": Kind("int8", "int32", "torch._int_mm"),
}


@dataclass(frozen=True, slots=True)
class Operands:
    """One set of buffers: a [m, k], b [k, n], and the fp32 scales of both where there are any.

    Scales are one element each, or [m, 1] and [1, n].
    """

    a: torch.Tensor
    b: torch.Tensor
    scales: tuple[torch.Tensor, ...]

    @property
    def listed(self) -> tuple[Item, ...]:
        """The scales as an epilogue of Warploom's."""
        if not self.scales:
            return ()
        kinds = ("scale",) * 2 if self.scales[0].dim() == 1 else ("scale_row", "scale_column")
        return tuple((kind, s.flatten()) for kind, s in zip(kinds, self.scales, strict=True))


def operands(
    kind: Kind,
    m: int,
    n: int,
    k: int,
    device: str,
    layout_a: Layout = "row",
    layout_b: Layout = "col",
) -> Operands:
    """Make random operands; bf16 and e4m3 are normal, int8 uniform, scales in [0.5, 1.5)."""
    dtype = TORCH[kind.a]

    def matrix(rows: int, columns: int) -> torch.Tensor:
        if dtype == torch.int8:
            return torch.randint(-127, 128, (rows, columns), device=device, dtype=dtype)
        return torch.randn(rows, columns, device=device).to(dtype)

    a = matrix(m, k) if layout_a == "row" else matrix(k, m).t()
    b = matrix(k, n) if layout_b == "row" else matrix(n, k).t()
    shapes: dict[str, list[tuple[int, ...]]] = {
        "none": [],
        "tensor": [(1,), (1,)],
        "row_column": [(m, 1), (1, n)],
    }
    scales = (torch.rand(shape, device=device) + 0.5 for shape in shapes[kind.scaling])
    return Operands(a, b, tuple(scales))


def operand_sets(
    kind: Kind,
    shape: Shape,
    device: str = "cuda",
    layout_a: Layout = "row",
    layout_b: Layout = "col",
) -> list[Operands]:
    """Make as many sets of operands as outlast the GPU's L2 cache when used in turn."""
    count = 1
    if device == "cuda":
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
        count = buffer_sets(gemm_bytes(*shape, *kind.bits), l2_bytes)
    return [operands(kind, *shape, device, layout_a, layout_b) for _ in range(count)]


def ours(
    kind: Kind,
    sets: Sequence[Operands],
    spec: KernelSpec | None = None,
    name: str = "warploom",
    *,
    listed: Sequence[Item] | None = None,
    accumulation: Accumulation = "fast",
) -> Contender:
    """Warploom on each set of operands: as dispatched, or by one kernel.

    The epilogue is `listed`, or the scales of the operands.
    """
    outs = [_out(kind, one) for one in sets]
    epilogues = [one.listed if listed is None else listed for one in sets]
    options: Any = {"accumulation": accumulation, "spec": spec}
    calls = [
        partial(warploom.gemm, one.a, one.b, out=out, epilogue=epilogue, **options)
        for one, out, epilogue in zip(sets, outs, epilogues, strict=True)
    ]

    def kernel() -> str:
        one = sets[0]
        keywords = {"out": outs[0], "epilogue": epilogues[0], **options}
        return warploom.explain(one.a, one.b, **keywords).kernel

    return Contender(name, calls, partial(_worst, sets, outs, epilogues, accumulation), kernel)


def peer(kind: Kind, sets: Sequence[Operands]) -> Contender:
    """The peer on each set of operands."""
    outs = [_out(kind, one) for one in sets]
    calls = [peer_call(kind, one, out) for one, out in zip(sets, outs, strict=True)]
    return Contender(kind.peer, calls, partial(_worst, sets, outs, [one.listed for one in sets]))


def peer_call(kind: Kind, one: Operands, out: torch.Tensor) -> Call:
    """The peer's call on one set of operands, writing to `out`."""
    if kind.peer == "torch._scaled_mm":
        scale_a, scale_b = one.scales
        return lambda: torch._scaled_mm(
            one.a,
            one.b,
            scale_a=scale_a,
            scale_b=scale_b,
            out_dtype=out.dtype,
            use_fast_accum=True,
            out=out,
        )
    function = torch._int_mm if kind.peer == "torch._int_mm" else torch.mm
    return lambda: function(one.a, one.b, out=out)


def _out(kind: Kind, one: Operands) -> torch.Tensor:
    """An output full of what no right result is full of."""
    dtype = TORCH[kind.d]
    wrong = math.nan if dtype.is_floating_point else torch.iinfo(dtype).min
    return torch.full((one.a.shape[0], one.b.shape[1]), wrong, device=one.a.device).to(dtype)


def _worst(
    sets: Sequence[Operands],
    outs: Sequence[torch.Tensor],
    epilogues: Sequence[Sequence[Item]],
    accumulation: Accumulation = "fast",
) -> float:
    calls = zip(sets, outs, epilogues, strict=True)
    return max(error_share(out, one.a, one.b, listed, accumulation) for one, out, listed in calls)
