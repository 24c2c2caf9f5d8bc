"""How v of 8 bits lies where kernels read it: dim-major, its keys permuted within 16.

wgmma reads operands of 8 bits along the sum alone, which is that over keys. Of each 16 keys the
place 4 t + u has key (u // 2) * 8 + 2 t + u % 2: the scores of a thread are then the weights that
it hands to wgmma, as they lie.
"""

from __future__ import annotations

import torch

from warploom.generator.families.attention_forward.launch import padded_total
from warploom.generator.families.attention_forward.rules import KEYS_OF_A_SCALE

GROUP = 16  # keys that are permuted among each other


def dim_major(v: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
    """Lay e4m3 v out as kernels of 8 bits read it.

    Args:
        v: [batch, kv_heads, keys, dim], or packed [total, kv_heads, dim].
        cu_seqlens: Where packed sequences begin, and the end.

    Returns:
        [batch, kv_heads, dim, keys to the next multiple of 128], zeros past the last key. Packed
        [kv_heads, dim, all keys]: sequence i begins at cu_seqlens[i] + 127 i, rounded down to a
        multiple of 128.
    """
    codes = v.view(torch.uint8)
    if cu_seqlens is not None:
        return _packed(codes, cu_seqlens).view(v.dtype)
    keys, dim = v.shape[-2:]
    out = codes.new_zeros if keys % KEYS_OF_A_SCALE else codes.new_empty
    found = out((*v.shape[:-2], dim, -(-keys // KEYS_OF_A_SCALE) * KEYS_OF_A_SCALE))
    whole = keys // GROUP * GROUP
    _permuted(found[..., :whole]).copy_(_grouped(codes[..., :whole, :]))
    if whole < keys:
        rest = torch.nn.functional.pad(codes[..., whole:, :], (0, 0, 0, GROUP - keys + whole))
        _permuted(found[..., whole : whole + GROUP]).copy_(_grouped(rest))
    return found.view(v.dtype)


def by_keys(v: torch.Tensor, keys: int) -> torch.Tensor:
    """A dim-major v of one length [.., dim, padded] as [.., keys, dim]."""
    groups = -(-keys // GROUP)
    grouped = _permuted(v.view(torch.uint8)[..., : groups * GROUP])
    rows = grouped.flatten(-4, -1).transpose(-2, -1)
    return rows[..., :keys, :].view(v.dtype)


def packed_by_keys(v: torch.Tensor, cu_seqlens: torch.Tensor, total: int) -> torch.Tensor:
    """A dim-major v of packed sequences [kv_heads, dim, padded] as [total, kv_heads, dim].

    Rows past the last sequence are zeros.
    """
    codes, row = v.view(torch.uint8), torch.arange(total, device=v.device)
    sequences = cu_seqlens.shape[0] - 1
    index = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    index = index.clamp(max=max(0, sequences - 1))
    key = row - cu_seqlens[index]
    within = key % GROUP  # half, pair, one of two
    slot = key - within + within % 8 // 2 * 4 + within // 8 * 2 + within % 2
    place = (padded_starts(cu_seqlens)[index] + slot).clamp(0, codes.shape[-1] - 1)
    rows = codes[..., place].permute(2, 0, 1)
    return rows.masked_fill((row >= cu_seqlens[-1])[:, None, None], 0).view(v.dtype)


def padded_starts(cu_seqlens: torch.Tensor) -> torch.Tensor:
    """Where packed sequences begin in a dim-major v, and the end."""
    places = torch.arange(cu_seqlens.shape[0], device=cu_seqlens.device)
    return (cu_seqlens + places * (KEYS_OF_A_SCALE - 1)) // KEYS_OF_A_SCALE * KEYS_OF_A_SCALE


def _packed(codes: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
    total, sequences = codes.shape[0], cu_seqlens.shape[0] - 1
    length = padded_total(total, sequences)
    starts = padded_starts(cu_seqlens)
    place = torch.arange(length, device=codes.device)
    key = _key_of(place)
    index = (torch.searchsorted(starts, place, right=True) - 1).clamp(0, sequences - 1)
    row = cu_seqlens[index] + key - starts[index]
    is_key = row < cu_seqlens[index + 1]
    rows = codes[row.clamp(0, max(0, total - 1))].masked_fill(~is_key[:, None, None], 0)
    return rows.permute(1, 2, 0).contiguous()


def _grouped(codes: torch.Tensor) -> torch.Tensor:
    """[.., keys, dim] as [.., dim, group, half, pair, one of two]."""
    keys = codes.shape[-2]
    return torch.unflatten(codes.transpose(-2, -1), -1, (keys // GROUP, 2, 4, 2))


def _permuted(laid_out: torch.Tensor) -> torch.Tensor:
    """[.., dim, places] as [.., dim, group, half, pair, one of two]."""
    groups = laid_out.shape[-1] // GROUP
    return torch.unflatten(laid_out, -1, (groups, 4, 2, 2)).transpose(-3, -2)


def _key_of(place: torch.Tensor) -> torch.Tensor:
    """The key of each place."""
    within = place % GROUP
    return place - within + within % 4 // 2 * 8 + within // 4 * 2 + within % 2
