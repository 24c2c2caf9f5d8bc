"""The same function in plain torch: the same bits, but for sums in another order."""

from __future__ import annotations

import torch

from warploom.generator.families.attention_quantize.schedule import CHUNK, TILE
from warploom.runtime.elements import unit_roundoff

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
_KEYS = 16  # whose slots are mixed
_ORDER = [u // 2 * 8 + 2 * t + u % 2 for t in range(4) for u in range(4)]  # the key of each slot
_MOST = torch.finfo(torch.float32).max

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


def factors(peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What values are multiplied by, of their largest magnitudes, as `cast` has it."""
    found = (torch.full_like(peaks, LARGEST[dtype]) / peaks).clamp(max=_MOST)
    return torch.where((peaks > 0) & (peaks < torch.inf), found, 1.0)


def scales(peaks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The inverse of each factor; NaN where int8 does not show that values are not finite."""
    found = torch.ones_like(peaks) / factors(peaks, dtype)
    return found if dtype == E4M3 else torch.where(peaks < torch.inf, found, torch.nan)


def coded(values: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """fp32 values in 8 bits; the largest of what is beyond, and in e4m3 NaN of infinity."""
    scaled = values * factor
    if dtype == torch.int8:
        return scaled.nan_to_num(nan=0.0).clamp(-128, 127).round().to(dtype)
    return torch.where(values.isinf(), torch.nan, scaled.clamp(-448.0, 448.0)).to(dtype)


def mean_of(k: torch.Tensor) -> torch.Tensor:
    """The mean of each head's keys [batch, kv_heads, dim], fp32; zeros of no keys."""
    return k.float().sum(2) / max(k.shape[2], 1)


def transposed(v: torch.Tensor) -> torch.Tensor:
    """e4m3 v [batch, kv_heads, keys, dim] as kernels of attention read it.

    It is [batch, kv_heads, dim, keys to the next multiple of 128], zeros past the last key. In each
    16 keys, slot 4 t + u has key u / 2 * 8 + 2 t + u % 2.
    """
    batch, heads, keys, dim = v.shape
    count = -(-keys // TILE) * (TILE // _KEYS)
    padded = torch.nn.functional.pad(v.view(torch.uint8), (0, 0, 0, -keys % TILE))
    groups = padded.view(batch, heads, count, _KEYS, dim)
    order = torch.tensor(_ORDER, device=v.device)
    return groups.index_select(3, order).flatten(2, 3).mT.contiguous().view(v.dtype)


def untransposed(v: torch.Tensor, keys: int) -> torch.Tensor:
    """The inverse of `transposed`, of so many keys."""
    batch, heads, dim, padded = v.shape
    slots = v.view(torch.uint8).mT.reshape(batch, heads, padded // _KEYS, _KEYS, dim)
    order = torch.tensor(_ORDER, device=v.device).argsort()
    found = slots.index_select(3, order).flatten(2, 3)
    return found[:, :, :keys].contiguous().view(v.dtype)


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
    q_coded = coded(q, factors(peaks_q, dtype)[..., None], dtype)
    shift = None
    if mean is not None:
        k = k - mean[:, :, None]
        shared = mean.repeat_interleave(q.shape[1] // max(mean.shape[1], 1), 1)
        shift = (q * shared[:, :, None]).sum(-1)
    peaks_k = _peaks_of_tiles(k)
    each = factors(peaks_k, dtype).repeat_interleave(TILE, 2)[:, :, : k.shape[2], None]
    peaks_v = v.abs().amax((2, 3)) if v.shape[2] else v.new_zeros(v.shape[:2])
    v_coded = coded(v, factors(peaks_v, E4M3)[..., None, None], E4M3)
    return (
        q_coded,
        coded(k, each, dtype),
        transposed(v_coded),
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
