"""DeepGEMM: GEMMs of fp8 with block scales, and grouped ones of bf16 as well.

What its kernels read is laid out here, as its users do before: scales of rows along m, groups of
rows at multiples of 128, groups of k one behind the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.peers import _routing
from benchmarks.peers._products import prepared_baseline
from benchmarks.peers.libraries import imported
from warploom.generator.families.gemm import GemmOperation
from warploom.runtime.contest import Contender
from warploom.runtime.families.gemm.samples import Operands

PADDED = 128  # rows that contiguous groups begin at multiples of

Scaled = tuple[torch.Tensor, torch.Tensor]  # values in e4m3, and their block scales
Ready = tuple[Callable[[], object], torch.Tensor, torch.Tensor]
"""A call, where it stores, and the rows of that which the results are in."""


def _library() -> Any:  # noqa: ANN401 (no dependency)
    return imported("deep_gemm", "deep_gemm")  # it loads compilers that may be missing


def laid_out(scales: torch.Tensor) -> torch.Tensor:
    """Scales of rows [.., M, K/128] as its kernels read them."""
    layout = imported("deep_gemm", "deep_gemm.utils.layout")
    found: torch.Tensor = layout.get_mn_major_tma_aligned_tensor(scales.contiguous())
    return found


def multiply(a: Scaled, b: Scaled, out: torch.Tensor) -> None:
    """A [M, K] by B [N, K] into `out` [M, N]: scales of A are laid out, those of B contiguous."""
    _library().fp8_gemm_nt(a, b, out)


def deep_gemm(operation: GemmOperation, given: Sequence[Operands]) -> Contender:
    """Its GEMM of e4m3 with scales of 1x128 of A and of 128x128 of B."""

    def prepare(one: Operands, out: torch.Tensor) -> Callable[[], object]:
        if operation.block_scales != "row_block":
            raise RuntimeError("deep_gemm: 1x128 by 1x128 adds to fp32, which is not timed here")
        (_, scale_a), (_, scale_b) = one.listed[:2]
        a, b = (one.a, laid_out(scale_a)), (one.b.t(), scale_b.contiguous())
        return partial(multiply, a, b, out)

    outs = [torch.empty_like(one.out) for one in given]
    return prepared_baseline("deep_gemm", operation, given, prepare, outs)


# ---- Groups of rows ------------------------------------------------------------------------------


def contiguous(one: Operands) -> Ready:
    """Rows are padded so that groups begin at multiples of 128."""
    library = _library()
    assert one.offs is not None  # noqa: S101 (for type checkers)
    place, padded = _routing.padded(one.offs, one.a.shape[0], PADDED)
    total = int(padded.sum())

    def spread(rows: torch.Tensor) -> torch.Tensor:
        found = rows.new_zeros(total, rows.shape[1])
        found[place] = rows
        return found

    indices = torch.repeat_interleave(
        torch.arange(len(padded), device=place.device, dtype=torch.int32), padded
    )
    d = one.out.new_empty(total, one.b.shape[2])
    scales = _scales(one)
    if scales is None:
        operands: Any = spread(one.a), one.b.mT
        kernel = library.m_grouped_bf16_gemm_nt_contiguous
    else:
        eight = spread(one.a.view(torch.uint8)).view(one.a.dtype)
        operands = (eight, laid_out(spread(scales[0]))), (one.b.mT, scales[1])
        kernel = library.m_grouped_fp8_gemm_nt_contiguous
    return partial(kernel, *operands, d, indices), d, place


def masked(one: Operands) -> Ready:
    """Batches of rows, of each of which the first ones count."""
    library = _library()
    assert one.offs is not None and one.expected_m is not None  # noqa: S101 (for type checkers)
    groups = len(one.offs)
    a, d = one.a.view(groups, -1, one.a.shape[1]), torch.empty_like(one.out)
    scales = _scales(one)
    if scales is None:
        operands: Any = a, one.b.mT
        kernel = library.m_grouped_bf16_gemm_nt_masked
    else:
        of_a = laid_out(scales[0].reshape(groups, -1, scales[0].shape[1]))
        operands = (a, of_a), (one.b.mT, scales[1])
        kernel = library.m_grouped_fp8_gemm_nt_masked
    into = d.view(groups, -1, d.shape[1])
    every = torch.arange(d.shape[0], device=d.device)
    return partial(kernel, *operands, into, one.offs, one.expected_m), d, every


def by_k(one: Operands) -> Ready:
    """Each group of k is a matrix of its own, of whose k the host knows the size; the result is
    added to fp32.
    """
    library, scales = _library(), _scales(one)
    assert one.offs is not None and scales is not None  # noqa: S101 (for type checkers)
    ends = one.offs.tolist()
    sizes = one.offs.diff(prepend=one.offs.new_zeros(1))

    def laid_out_of(values: torch.Tensor, scale: torch.Tensor) -> Scaled:
        ranges = zip([0, *ends], ends, strict=False)
        eight = values.view(torch.uint8)
        flat = torch.cat([eight[:, begin:end].reshape(-1) for begin, end in ranges])
        flat = flat.view(values.dtype)
        return flat, laid_out(scale[:, : ends[-1] // PADDED])

    d = torch.zeros(one.out.shape, dtype=torch.float32, device=one.out.device)
    call = partial(
        library.k_grouped_fp8_gemm_nt_contiguous,
        *(laid_out_of(one.a, scales[0]), laid_out_of(one.b.t(), scales[1])),
        *(d, sizes.tolist(), sizes, d),
    )
    return call, d, torch.arange(len(ends), device=d.device)


def _scales(one: Operands) -> Scaled | None:
    """The block scales of A and B, if there are some."""
    found = {item[0]: item[1] for item in one.listed}
    return (found["scale_a"], found["scale_b"]) if "scale_a" in found else None
