"""DeepGEMM's functions in torch: they refuse operands that its kernels would read otherwise."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.peers.libraries.deep_gemm import PADDED, Scaled
from warploom.runtime.families.gemm.block_scales import dequantised

Operand = torch.Tensor | Scaled


def _laid_out(scales: torch.Tensor) -> torch.Tensor:
    assert scales.is_contiguous() and scales.dtype == torch.float32
    return scales.mT.contiguous().mT


def _wide(a: Operand, b: Operand) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return a.float(), b.float()  # type: ignore[union-attr]
    assert a[1].stride(-2) == 1 and b[1].is_contiguous()
    return dequantised(*a, torch.float32), dequantised(*b, torch.float32)


def _dense(a: Operand, b: Operand, out: torch.Tensor) -> None:
    left, weight = _wide(a, b)
    out.copy_(left @ weight.mT)


def _contiguous(a: Operand, b: Operand, d: torch.Tensor, indices: torch.Tensor) -> None:
    left, weights = _wide(a, b)
    assert indices.dtype == torch.int32 and len(indices) == len(d) and len(d) % PADDED == 0
    for at in range(0, len(d), PADDED):
        (group,) = set(indices[at : at + PADDED].tolist())
        d[at : at + PADDED] = left[at : at + PADDED] @ weights[group].mT


def _masked(a: Operand, b: Operand, d: torch.Tensor, counts: torch.Tensor, expected: int) -> None:
    left, weights = _wide(a, b)
    assert counts.dtype == torch.int32 and expected > 0
    for group, count in enumerate(counts.tolist()):
        d[group, :count] = (left[group] @ weights[group].mT)[:count]


def _by_k(
    a: Scaled,
    b: Scaled,
    d: torch.Tensor,
    sizes: list[int],
    of_device: torch.Tensor,
    c: torch.Tensor,
) -> None:
    assert c is d and d.dtype == torch.float32 and of_device.dtype == torch.int32
    assert of_device.tolist() == sizes and not any(size % PADDED for size in sizes)
    _, m, n = d.shape
    start = 0
    for group, size in enumerate(sizes):
        sides = []
        for (flat, scale), rows in ((a, m), (b, n)):
            assert flat.numel() == rows * sum(sizes) and scale.shape == (rows, sum(sizes) // PADDED)
            matrix = flat[start * rows : (start + size) * rows].view(rows, size)
            blocks = scale[:, start // PADDED : (start + size) // PADDED]
            sides.append(matrix.float() * blocks.repeat_interleave(PADDED, 1))
        d[group] += sides[0] @ sides[1].mT
        start += size


def imported(library: str, module: str) -> SimpleNamespace:
    """In the place of `benchmarks.peers.libraries.imported`."""
    assert library == "deep_gemm"
    if module == "deep_gemm.utils.layout":
        return SimpleNamespace(get_mn_major_tma_aligned_tensor=_laid_out)
    kinds = {"contiguous": _contiguous, "masked": _masked}
    grouped = {
        f"m_grouped_{type}_gemm_nt_{kind}": function
        for kind, function in kinds.items()
        for type in ("bf16", "fp8")
    }
    grouped["k_grouped_fp8_gemm_nt_contiguous"] = _by_k
    return SimpleNamespace(fp8_gemm_nt=_dense, **grouped)
