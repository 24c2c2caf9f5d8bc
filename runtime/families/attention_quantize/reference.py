"""The same function in plain torch: the same bits, but for sums in another order."""

from __future__ import annotations

import torch

from warploom.generator.families.attention_quantize.schedule import CHUNK, TILE
from warploom.runtime.elements import LARGEST, unit_roundoff
from warploom.runtime.families.attention_forward.values import dim_major
from warploom.runtime.families.cast.reference import factors

E4M3 = torch.float8_e4m3fn
# q, k, v, q_descale, k_descale, v_descale, k_mean, score_shift
Results = tuple[
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
    torch.Tensor | None,
]


def scales(peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of each factor; NaN where int8 does not show that values are not finite."""
    found = torch.ones_like(peaks) / factors(peaks, dtype, pow2=False)
    return found if dtype == E4M3 else torch.where(peaks < torch.inf, found, torch.nan)


def coded(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values in 8 bits; the largest of what is beyond, and in e4m3 NaN of infinity."""
    scaled = values * factor
    if dtype == torch.int8:
        return scaled.nan_to_num(nan=0.0).clamp(-128, 127).round().to(dtype)
    return torch.where(values.isinf(), torch.nan, scaled.clamp(-LARGEST[dtype], LARGEST[dtype])).to(
        dtype
    )


def mean_of(k: torch.Tensor) -> torch.Tensor:
    """The mean of each head's keys [batch, kv_heads, dim], fp32; zeros of no keys."""
    return k.float().sum(2) / max(k.shape[2], 1)


def _peaks_of_tiles(values: torch.Tensor) -> torch.Tensor:
    """The largest magnitude of each 128 keys [batch, kv_heads, tiles]."""
    batch, heads, keys, _ = values.shape
    padded = torch.nn.functional.pad(values.abs().amax(-1), (0, -keys % TILE))
    return padded.view(batch, heads, -(-keys // TILE), TILE).amax(-1)


def quantized(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dtype: torch.dtype,
    mean: torch.Tensor | None,
) -> Results:
    """All results, of the mean that is subtracted from k, where one is."""
    q, k, v = q.float(), k.float(), v.float()
    peaks_q = q.abs().amax(-1)
    q_coded = coded(q, factors(peaks_q, dtype, pow2=False)[..., None], dtype)
    shift = None
    if mean is not None:
        k = k - mean[:, :, None]
        shared = mean.repeat_interleave(q.shape[1] // max(mean.shape[1], 1), 1)
        shift = (q * shared[:, :, None]).sum(-1)
    peaks_k = _peaks_of_tiles(k)
    each = factors(peaks_k, dtype, pow2=False).repeat_interleave(TILE, 2)[:, :, : k.shape[2], None]
    peaks_v = v.abs().amax((2, 3)) if v.shape[2] else v.new_zeros(v.shape[:2])
    v_coded = coded(v, factors(peaks_v, E4M3, pow2=False)[..., None, None], E4M3)
    return (
        q_coded,
        coded(k, each, dtype),
        dim_major(v_coded),
        scales(peaks_q, dtype),
        scales(peaks_k, dtype),
        scales(peaks_v, E4M3),
        mean,
        shift,
    )


def mean_bound(k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The mean in float64, and how far off a kernel's may be.

    No chain of additions is longer than 96 and one of each chunk's; a division rounds once more.
    """
    wide = k.double()
    steps = 97 + k.shape[2] // CHUNK
    tiny = torch.finfo(torch.float32).smallest_normal
    return wide.mean(2), steps * unit_roundoff(torch.float32) * wide.abs().mean(2) + tiny


def shift_bound(q: torch.Tensor, mean: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of rows of q and the mean in float64, and how far off a kernel's may be."""
    wide = q.double()
    shared = mean.double().repeat_interleave(q.shape[1] // mean.shape[1], 1)[:, :, None]
    tiny = torch.finfo(torch.float32).smallest_normal
    most = (wide.abs() * shared.abs()).sum(-1)
    bound = (q.shape[-1] + 4) * unit_roundoff(torch.float32) * most + tiny
    return (wide * shared).sum(-1), bound
