"""What stands in for DeepGEMM: its functions in torch, which refuse operands that are laid out
otherwise than its kernels read them.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from benchmarks.peers.libraries.deep_gemm import PADDED
from warploom.runtime.families.gemm.block_scales import dequantised

Scaled = tuple[torch.Tensor, torch.Tensor]


def _laid_out(scales: torch.Tensor) -> torch.Tensor:
    assert scales.is_contiguous() and scales.dtype == torch.float32
    return scales.mT.contiguous().mT


def _wide(a: torch.Tensor | Scaled, *, of_rows: bool) -> torch.Tensor:
    if isinstance(a, torch.Tensor):
        return a.float()
    _, scales = a
    assert scales.stride(-2) == 1 if of_rows else scales.is_contiguous()
    return dequantised(*a, torch.float32)


def _dense(a: Scaled, b: Scaled, out: torch.Tensor) -> None:
    out.copy_(_wide(a, of_rows=True) @ _wide(b, of_rows=False).mT)


def _contiguous(
    a: torch.Tensor | Scaled, b: torch.Tensor | Scaled, d: torch.Tensor, indices: torch.Tensor
) -> None:
    assert indices.dtype == torch.int32 and len(indices) == len(d) and len(d) % PADDED == 0
    weights, left = _wide(b, of_rows=False), _wide(a, of_rows=True)
    for at in range(0, len(d), PADDED):
        (group,) = set(indices[at : at + PADDED].tolist())
        d[at : at + PADDED] = left[at : at + PADDED] @ weights[group].mT


def _masked(
    a: torch.Tensor | Scaled,
    b: torch.Tensor | Scaled,
    d: torch.Tensor,
    counts: torch.Tensor,
    expected_m: int,
) -> None:
    assert counts.dtype == torch.int32 and expected_m > 0
    left, weights = _wide(a, of_rows=True), _wide(b, of_rows=False)
    for group, count in enumerate(counts.tolist()):
        d[group, :count] = (left[group] @ weights[group].mT)[:count]


_LIBRARY = SimpleNamespace(
    fp8_gemm_nt=_dense,
    m_grouped_bf16_gemm_nt_contiguous=_contiguous,
    m_grouped_fp8_gemm_nt_contiguous=_contiguous,
    m_grouped_bf16_gemm_nt_masked=_masked,
    m_grouped_fp8_gemm_nt_masked=_masked,
)
_LAYOUT = SimpleNamespace(get_mn_major_tma_aligned_tensor=_laid_out)


def imported(library: str, module: str) -> SimpleNamespace:
    """In the place of `benchmarks.peers.libraries.imported`."""
    assert library == "deep_gemm"
    return {"deep_gemm": _LIBRARY, "deep_gemm.utils.layout": _LAYOUT}[module]
