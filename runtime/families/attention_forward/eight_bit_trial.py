"""Random operands of an attention of 8 bits, calls of its kernels, and their check."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch

from warploom.generator.families.attention_forward.rules import KEYS_OF_A_SCALE
from warploom.runtime.elements import TORCH, unit_roundoff
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import extents
from warploom.runtime.families.attention_forward import eight_bit_reference, values
from warploom.runtime.families.attention_forward.eight_bit_call import EightBitCall
from warploom.runtime.families.attention_forward.trial import (
    CHECKED_ROWS,
    AttentionTrial,
    Operands,
)

_WIDEST = 6.0  # standard deviations that the largest number of 8 bits stands for
# Of v where sums are promoted: those of products of one sign tell short accumulators. Where sums
# are fast the tensor core truncates each product, and a bound of such sums would tell nothing.
_MEAN = 1.0
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}


class EightBitTrial(AttentionTrial):
    """An attention on normal random data of 8 bits; v lies as kernels read it.

    v has a mean, but where the tensor core alone adds up its products.
    """

    def eight_bit_call(self) -> EightBitCall:
        """A call on the first set."""
        one = self.sets[0]
        options = {**one.lengths, **self.keywords, "out_dtype": one.out.dtype}
        return EightBitCall(one.q, one.k, one.v, **options)

    def _operands(self) -> Operands:
        operation, shape = self.operation, self.shape
        q, q_scale = _quantized(self.queries(), TORCH[operation.scores])
        k, k_scale = _quantized(self.keys(), TORCH[operation.scores])
        mean = 0.0 if operation.weights == "e4m3" and operation.sums == "fast" else _MEAN
        v, lengths = self.keys() + mean, self.lengths()
        out = torch.full_like(q, torch.nan, dtype=TORCH[operation.element])
        heads = (shape.batch, shape.kv_heads)
        by_rows: tuple[int, ...] = heads
        by_blocks: tuple[int, ...] = heads
        if operation.scales == "blocks":
            by_rows = (shape.batch, shape.heads, shape.seq_q)
            by_blocks = (*heads, -(-shape.seq_k // KEYS_OF_A_SCALE))

        def scales(number: float, *sizes: int) -> torch.Tensor:
            return torch.full(sizes, number, dtype=torch.float32, device=self.device)

        keywords: dict[str, Any] = {
            **lengths,
            "q_descale": scales(q_scale, *by_rows),
            "k_descale": scales(k_scale, *by_blocks),
        }
        if operation.weights == "e4m3":
            v, v_scale = _quantized(v, torch.float8_e4m3fn, mean)
            v = values.dim_major(v, lengths.get("cu_seqlens_k"))
            keywords |= {"v_descale": scales(v_scale, *heads), "v_layout": "dim_major"}
            keywords["sums"] = operation.sums
        return Operands(q, k, v, out, keywords)

    def _by_keys(self, one: Operands) -> torch.Tensor:
        offsets = one.lengths.get("cu_seqlens_k")
        if offsets is None:
            return values.by_keys(one.v, self.shape.seq_k)
        return values.packed_by_keys(one.v, offsets, one.k.shape[0])

    @cached_property
    def _expected(self) -> list[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of the longest sequence: rows, what is right there, and how far off it may be."""
        one, shape, operation = self.sets[0], self.shape, self.operation
        q, k = self.sequence(one.q, shape.seq_q), self.sequence(one.k, shape.seq_k)
        v = one.v if operation.weights == "same" else self._by_keys(one)
        v = self.sequence(v, shape.seq_k)
        rows = slice(max(0, q.shape[2] - CHECKED_ROWS), q.shape[2])
        # All scales of an operand are one number.
        scales: dict[str, Any] = {
            name: one.lengths[name].flatten()[:1].expand(1, shape.kv_heads)
            for name in ("q_descale", "k_descale", "v_descale")
            if name in one.lengths
        }
        keywords: dict[str, Any] = {**self.keywords, **scales}
        keywords["out_dtype"] = one.out.dtype
        if "causal" in keywords:
            keywords["causal"] = "bottom_right"
        call = EightBitCall(q[:, :, rows], k, v, **keywords)
        exact, off = expected(call, operation.sums, unit_roundoff(one.out.dtype))
        return [(rows, exact, off)]


def expected(call: EightBitCall, sums: str, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What is right of a call, in float64, and how far off it may be, element by element.

    Args:
        call: On operands of 8 bits.
        sums: "promoted" or "fast": who adds up weights of e4m3 with v.
        unit: The relative error of one rounding to the type of the output.
    """
    plain, masked = call.dequantized(), band(call, extents(call))
    bound = eight_bit_reference.bound(call.q.dtype, call.weights, sums, unit)
    exact, off = (reference.of_call(plain, masked, each)[0] for each in (reference.exact, bound))
    return exact, off


def _quantized(
    tensor: torch.Tensor, kind: torch.dtype, mean: float = 0.0
) -> tuple[torch.Tensor, float]:
    largest = _LARGEST[kind]
    scale = (_WIDEST + mean) / largest
    # Of 10^8 normal numbers some lie further out, which torch would convert to NaN.
    numbers = (tensor.float() / scale).clamp(-largest, largest)
    return (numbers.round() if kind == torch.int8 else numbers).to(kind), scale
