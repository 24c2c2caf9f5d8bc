"""The layouts that libraries keep quantised weights in, from the same codes, scales and zeros.

Marlin's is that of vLLM 0.33: tiles of 16 (k) by 64 (n) in the order in which the threads of a warp
hold operand B of `mma.m16n8k16`, and scales in the order in which they hold its results.
"""

from __future__ import annotations

import torch

from benchmarks.peers._mixed_codes import OFFSET, Codes, words

# Where a word's numbers are taken from so that a mask and a shift give pairs: of 4 and of 8 bits.
_PAIRS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_EXPONENT = 120  # what Marlin leaves out of e4m3's exponents in bf16: 127 - 7


# ---- Marlin --------------------------------------------------------------------------------------


def marlin_words(found: Codes) -> torch.Tensor:
    """Codes as int32 [k / 16, n bits / 2]."""
    order = _fragments(found.bits).to(found.codes.device)
    tiles = found.codes.t().reshape(found.k // 16, 16, found.n // 16, 16).transpose(1, 2)
    ordered = tiles.reshape(-1, order.numel())[:, order].view(found.k // 16, found.n * 16)
    return words(ordered, found.bits)


def _fragments(bits: int) -> torch.Tensor:
    """Places, in four tiles of 16 x 16 (k, n), of the numbers of 32 threads, 32 each."""
    lane = torch.arange(32).view(32, 1, 1, 1)
    tile = torch.arange(4).view(1, 4, 1, 1)
    half = torch.arange(2).view(1, 1, 2, 1)  # of a tile's columns
    k = 2 * (lane % 4) + torch.tensor([0, 1, 8, 9]).view(1, 1, 1, 4)
    places = 256 * tile + 16 * k + lane // 4 + 8 * half
    pairs = _PAIRS[bits]
    return places.reshape(-1, len(pairs))[:, pairs].reshape(-1)


def marlin_scales(found: Codes) -> torch.Tensor:
    """Scales as [k / group, n]; of mxfp4 bytes, of e4m3 with what its exponents lack."""
    if found.format == "e4m3":
        scaled = found.scales.float() * 2.0**_EXPONENT
        return _permuted(scaled.to(found.scales.dtype).t(), _channels())
    if found.format == "mxfp4":
        return _permuted(_permuted(found.scales.t(), _groups()), [0, 2, 1, 3])
    return _permuted(found.scales.t(), _groups())


def marlin_zeros(found: Codes) -> torch.Tensor | None:
    """Zero points as int32 [k / group, n / 8]; None where the format has none."""
    if found.zeros is None:
        return None
    if int(found.zeros.max()) > 15:
        raise ValueError("Marlin keeps zero points in 4 bits: 16 does not fit")
    return words(_permuted(_permuted(found.zeros.t(), _groups()), [*_PAIRS[4]]), 4)


def _groups() -> list[int]:
    """Of 64 columns: a thread's of eight fragments beside each other."""
    return [i + 8 * j for i in range(8) for j in range(8)]


def _channels() -> list[int]:
    """Of 32 columns: a thread's pairs of four fragments beside each other."""
    return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _permuted(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Every run of as many columns as `order` has, in that order."""
    return rows.reshape(-1, len(order))[:, order].reshape(rows.shape).contiguous()


# ---- Machete, humming, torch ---------------------------------------------------------------------


def machete_words(found: Codes) -> torch.Tensor:
    """Codes as int32 [k / 8, n], column by column: what Machete's own packing takes."""
    return words(found.codes, 4).t()


def humming_tensors(found: Codes) -> dict[str, torch.Tensor]:
    """What a layer of humming loads: codes along k, zero points along n, scales as they are."""
    scales = found.scales
    if found.format == "mxfp4":
        scales = scales.view(torch.float8_e8m0fnu)
    tensors = {"weight": words(found.codes, found.bits), "weight_scale": scales.contiguous()}
    if found.zeros is not None:
        if int(found.zeros.max()) > 15:
            raise ValueError("humming keeps zero points in 4 bits: 16 does not fit")
        tensors["zero_point"] = words(found.zeros.t().contiguous(), 4).t().contiguous()
    return tensors


def torch_bytes(found: Codes) -> torch.Tensor:
    """Codes as uint8 [n, k / 2], the first of a pair high: what torch's own packing takes."""
    return found.codes[:, ::2] << 4 | found.codes[:, 1::2]


def torch_offsets(found: Codes) -> torch.Tensor:
    """What torch adds to scale (code - 8), [n, k / group], in the type of the scales."""
    if found.zeros is None:
        return torch.zeros_like(found.scales)
    return ((OFFSET - found.zeros.float()) * found.scales.float()).to(found.scales.dtype)
