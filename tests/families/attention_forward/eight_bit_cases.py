"""Calls of attention on operands of 8 bits: what is drawn, and what is exact of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from warploom.generator.families.attention_forward.rules import KEYS_OF_A_SCALE
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import extents
from warploom.runtime.families.attention_forward import eight_bit_reference, values
from warploom.runtime.families.attention_forward.eight_bit_call import EightBitCall

E4M3 = torch.float8_e4m3fn
LARGEST = {E4M3: 448.0, torch.int8: 127.0}
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Drawn:
    """q, k and v by keys, of 8 bits, and the keywords of a call."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keywords: dict[str, Any]

    def call(self) -> EightBitCall:
        """The call that the reference and bounds are of."""
        keywords = {name: value for name, value in self.keywords.items() if name != "spec"}
        return EightBitCall(self.q, self.k, self.v, **keywords)

    def dim_major(self) -> dict[str, Any]:
        """v as kernels read it, and its keyword."""
        laid_out = values.dim_major(self.v, self.keywords.get("cu_seqlens_k"))
        return {"v": laid_out, "v_layout": "dim_major"}

    def computed(self, compute: reference.Attention) -> Pair:
        """What a function of the reference makes of it."""
        call = self.call()
        return reference.of_call(call.dequantized(), band(call, extents(call)), compute)

    @property
    def exact(self) -> Pair:
        """Out and lse in float64."""
        return self.computed(reference.exact)

    @property
    def rounded(self) -> Pair:
        """Out and lse where weights are rounded as kernels round them, and sums are exact."""
        return self.computed(eight_bit_reference.rounded(self._weights))

    def bound(self, sums: str = "promoted") -> Pair:
        """How far a kernel's may be off."""
        unit = torch.finfo(self.keywords.get("out_dtype", torch.bfloat16)).eps / 2
        return self.computed(eight_bit_reference.bound(self.q.dtype, self._weights, sums, unit))

    @property
    def _weights(self) -> str:
        return "e4m3" if self.v.dtype == E4M3 else "same"


def quantized(
    tensor: torch.Tensor, dims: tuple[int, ...], kind: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of 8 bits and their scales over these dimensions, which are left."""
    scale = tensor.abs().amax(dims, keepdim=True).clamp(min=1e-20) / LARGEST[kind]
    numbers = tensor / scale
    return (numbers.round() if kind == torch.int8 else numbers).to(kind), scale


def drawn(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    seq_q: int = 37,
    seq_k: int = 300,
    dim: int = 64,
    *,
    kind: torch.dtype = E4M3,
    blocks: bool = False,
    mean: float = 1.0,
    spread: float = 1.0,
    rising: bool = False,
    device: str = "cpu",
    seed: int = 0,
    **keywords: Any,
) -> Drawn:
    """Normal numbers, quantized, that lie as a model's do, [batch, seq, heads, dim].

    mean, spread  of v
    rising        keys grow to the left, so that each tile of keys has a larger maximum
    """
    random = torch.Generator(device).manual_seed(seed)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(sizes, generator=random, device=device).transpose(1, 2)

    q, k = normal(batch, seq_q, heads, dim), normal(batch, seq_k, kv_heads, dim)
    v = normal(batch, seq_k, kv_heads, dim) * spread + mean
    if rising:
        k = k * torch.linspace(3, 0.2, seq_k, device=device)[:, None]
    if blocks:
        q, q_scale = quantized(q, (3,), kind)
        k, k_scale = _of_blocks(k, kind)
        q_scale = q_scale.squeeze(-1)
    else:
        grouped = q.unflatten(1, (kv_heads, -1))
        q, q_scale = quantized(grouped, (2, 3, 4), kind)
        q, q_scale = q.flatten(1, 2), q_scale.flatten(1)
        k, k_scale = quantized(k, (2, 3), kind)
        k_scale = k_scale.flatten(1)
    v, v_scale = quantized(v, (2, 3), E4M3)
    scales = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale.flatten(1)}
    return Drawn(q, k, v, {**scales, **keywords})


def packed(
    lengths_q: list[int],
    lengths_k: list[int],
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 64,
    *,
    kind: torch.dtype = E4M3,
    past: int = 0,
    device: str = "cpu",
    seed: int = 0,
    **keywords: Any,
) -> Drawn:
    """The same of packed sequences; `past` rows at the end belong to none, and are NaN in v."""
    random = torch.Generator(device).manual_seed(seed)
    offsets_q, offsets_k = (
        torch.tensor([0, *lengths], device=device).cumsum(0).int()
        for lengths in (lengths_q, lengths_k)
    )

    def normal(rows: int, count: int) -> torch.Tensor:
        return torch.randn((rows + past, count, dim), generator=random, device=device)

    q, q_scale = quantized(normal(sum(lengths_q), heads), (0, 1, 2), kind)
    k, k_scale = quantized(normal(sum(lengths_k), kv_heads), (0, 1, 2), kind)
    v, v_scale = quantized(normal(sum(lengths_k), kv_heads) + 1, (0, 1, 2), E4M3)
    if past:
        v.view(torch.uint8)[-past:] = 0x7F
    shape = (len(lengths_q), kv_heads)
    steps = torch.arange(1, shape[0] * shape[1] + 1, device=device).reshape(shape)
    scales = {
        name: one.reshape(1, 1) * (1 + steps / 64)
        for name, one in zip("qkv", (q_scale, k_scale, v_scale), strict=True)
    }
    return Drawn(
        q,
        k,
        v,
        {
            **{f"{name}_descale": one for name, one in scales.items()},
            "cu_seqlens_q": offsets_q,
            "cu_seqlens_k": offsets_k,
            "max_seqlen_q": max(lengths_q),
            "max_seqlen_k": max(lengths_k),
            **keywords,
        },
    )


def _of_blocks(k: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    keys = k.shape[2]
    whole = torch.nn.functional.pad(k, (0, 0, 0, -keys % KEYS_OF_A_SCALE))
    numbers, scale = quantized(whole.unflatten(2, (-1, KEYS_OF_A_SCALE)), (3, 4), kind)
    turned = numbers.flatten(2, 3)[:, :, :keys].transpose(1, 2).contiguous().transpose(1, 2)
    return turned, scale.squeeze(-1).squeeze(-1)
