"""Random operands of an attention as a model's lie, [batch, seq, heads, dim], for both passes."""

from __future__ import annotations

from typing import Any

import torch

from warploom.generator.model.shapes import AttentionShape
from warploom.runtime.attention_dispatch import Operation
from warploom.runtime.elements import TORCH

SOFTCAP = 30.0


class AttentionData:
    """What trials of both passes have in common: normal random data, and what calls are told."""

    def __init__(self, operation: Operation, shape: AttentionShape, device: str, seed: int) -> None:
        self.shape, self.device = shape, device
        self._element, self._mask = operation.element, operation.mask
        self._softcap, self._packed = operation.softcap, operation.lengths == "packed"
        self._random = torch.Generator(device).manual_seed(seed)

    @property
    def keywords(self) -> dict[str, Any]:
        """What the calls are given beside tensors."""
        found: dict[str, Any] = {}
        if self._mask == "causal":
            equal = self.shape.seq_q == self.shape.seq_k
            found["causal"] = True if equal else "bottom_right"
        elif self._mask == "window":
            found["window"] = (max(0, self.shape.window - 1), 0)
        if self._softcap:
            found["softcap"] = SOFTCAP
        return found

    def queries(self) -> torch.Tensor:
        """A tensor like q."""
        return self._tensor(self.shape.heads, self.shape.seq_q, self.shape.total_q)

    def keys(self) -> torch.Tensor:
        """A tensor like k and v."""
        return self._tensor(self.shape.kv_heads, self.shape.seq_k, self.shape.total_k)

    def lengths(self) -> dict[str, Any]:
        """Offsets of packed sequences: the first is the longest, the rest share what is left."""
        shape = self.shape
        if not self._packed:
            return {}
        found: dict[str, Any] = {"max_seqlen_q": shape.seq_q, "max_seqlen_k": shape.seq_k}
        for name, longest, total in (
            ("cu_seqlens_q", shape.seq_q, shape.total_q),
            ("cu_seqlens_k", shape.seq_k, shape.total_k),
        ):
            rest = (
                longest + (total - longest) * index // (shape.batch - 1)
                for index in range(1, shape.batch)
            )
            ends = [0, longest, *rest]
            found[name] = torch.tensor(ends, dtype=torch.int32, device=self.device)
        if found["cu_seqlens_q"].tolist() == found["cu_seqlens_k"].tolist():
            found["cu_seqlens_k"] = found["cu_seqlens_q"]
        return found

    def sequence(self, tensor: torch.Tensor, seq: int) -> torch.Tensor:
        """The last batch, or the first packed sequence, which has `seq` rows: [1, heads, seq, dim].

        Of lse [1, heads, seq].
        """
        if not self._packed:
            return tensor[-1:]
        if tensor.dim() == 2:
            return tensor[None, :, :seq]
        return tensor[:seq].transpose(0, 1)[None]

    def _tensor(self, heads: int, seq: int, total: int) -> torch.Tensor:
        dim = self.shape.dim
        wanted = (total, heads, dim) if self._packed else (self.shape.batch, seq, heads, dim)
        drawn = torch.randn(wanted, generator=self._random, device=self.device)
        found = drawn.to(TORCH[self._element])
        return found if self._packed else found.transpose(1, 2)
