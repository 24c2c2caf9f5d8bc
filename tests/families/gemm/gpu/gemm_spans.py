"""Two GEMMs of pieces, of which one computes D, and kernels that are wrong there."""

from __future__ import annotations

from typing import Any

import torch
from mutants import Checked

from warploom.generator.epilogue import Scale
from warploom.generator.families.gemm import GemmOperation, GemmSchedule
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.fp32_pieces.api import split
from warploom.runtime.families.gemm.pieces import SpannedPiecesCall

SCALES = (Scale("row"), Scale("column"), Scale("row"))
SPANS = {  # of A and of B, k being 192, and whether fp16 pieces hold these
    ((0, 0), (0, 0)): True,
    ((192, 0), (192, 0)): True,  # no value lost bits
    ((100, 1), (92, 1)): True,
    ((100, 1), (93, 0)): False,
    ((1, 1), (193, 0)): False,
    ((193, 0), (1, 1)): False,
}


def spec(spans: str, **schedule: Any) -> KernelSpec:
    """A kernel."""
    element, terms = ("fp16", 3) if spans == "narrow" else ("bf16", 6)
    operation = GemmOperation(
        *(element, element, "fp32"),  # type: ignore[arg-type]
        epilogue=SCALES,
        accumulation="promoted",
        terms=terms,  # type: ignore[arg-type]
        spans=spans,  # type: ignore[arg-type]
    )
    return KernelSpec("sm_90a", operation, GemmSchedule(**schedule))


NARROW = spec("narrow", tile=(128, 128, 64), stages=3)
WIDE = spec("wide", tile=(128, 128, 64), stages=2, cluster=(2, 1))
NARROW_PARTS, WIDE_PARTS = (
    spec(one, tile=(32, 64, 64), stages=4, consumers=1, swap_ab=True, split_k=3, store="direct")
    for one in ("narrow", "wide")
)
EVERY = [NARROW, WIDE, NARROW_PARTS, WIDE_PARTS]


def verify(kernel: KernelSpec, seed: int) -> None:
    """Assert that a kernel computes D where it is to, and writes nothing elsewhere."""
    torch.manual_seed(seed)
    operation: Any = kernel.operation
    m, n, k = 200, 304, 192
    a, weight = torch.randn(m, k, device="cuda"), torch.randn(n, k, device="cuda")
    exact, sizes = a.double() @ weight.double().t(), a.double().abs() @ weight.double().abs().t()
    dtype, count = (torch.float16, 2) if operation.spans == "narrow" else (torch.bfloat16, 3)
    left, right = split(a, dtype, count), split(weight, dtype, count)
    one, other = torch.ones(m, device="cuda"), torch.ones(n, device="cuda")
    scales = (
        (left.scale[0], right.scale[2], left.scale[1])
        if left.scale is not None and (right.scale is not None)
        else (one, other, one)
    )
    kinds = ("scale_row", "scale_column", "scale_row")
    for (of_a, of_b), holds in SPANS.items():
        words = [torch.tensor([*of, k, 0], dtype=torch.int32, device="cuda") for of in (of_a, of_b)]
        d = torch.full((m, n), 7.0, device="cuda")
        call = SpannedPiecesCall(
            *(left.q, right.q.mT, [*zip(kinds, scales, strict=True)], d, torch.float32),
            spec=kernel,
            terms=operation.terms,
            span_a=words[0],
            span_b=words[1],
            spans=operation.spans,
        )
        plan.run(call)
        if holds == (operation.spans == "narrow"):
            assert ((d - exact).abs() <= 2.0**-20 * sizes).all(), (of_a, of_b)
        else:
            assert (d == 7).all(), (of_a, of_b)


GUARD = "  if (!computes_d(p)) return;\n"  # the line by which a kernel leaves


def leaving(kernel: KernelSpec, behind: str) -> Checked:
    """A kernel that does not leave where this comes behind the line by which it does."""
    return Checked(GUARD + behind, behind, verify, kernel)


MAIN, REDUCTION = "  if (warpgroup == 0) {", "  Store store"
MUTANTS = {
    "fp16 pieces are multiplied though they do not hold the values": leaving(NARROW, MAIN),
    "bf16 pieces are multiplied though fp16 pieces hold": leaving(WIDE, MAIN),
    "parts of fp16 pieces are added up though they do not hold": leaving(NARROW_PARTS, REDUCTION),
    "parts of bf16 pieces are added up though fp16 pieces hold": leaving(WIDE_PARTS, REDUCTION),
    "what B spans does not count": Checked(
        "uint64_t(a.x) + b.x <= a.z", "a.x <= a.z", verify, NARROW
    ),
    "lost values of B do not count": Checked("(a.y | b.y) == 0", "a.y == 0", verify, WIDE),
    "lost values of A do not count": Checked("(a.y | b.y) == 0", "b.y == 0", verify, WIDE),
}
