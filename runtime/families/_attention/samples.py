"""Random operands of an attention as a model's lie, [batch, seq, heads, dim], for both passes."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeVar

import torch

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention.block_mask import (
    FIRST,
    NOTHING,
    WHOLE,
    BlockMask,
    packed,
)
from warploom.runtime.families._attention.modifiers import MODIFIERS
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.tensors import normal
from warploom.runtime.trial import generator

BLOCK, DENSITY = 128, 0.25  # rows and columns of a block; the share of blocks that count
ArgumentsT = TypeVar("ArgumentsT", bound=Arguments)


def further(
    operation: Operation,
    scores: tuple[int, int, int, int],
    device: str,
    random: torch.Generator | None,
) -> dict[str, Any]:
    """What beside q, k and v that calls of an operation are given, by their keywords.

    scores   their extents: batch, heads, rows, columns; a bias and a mask serve all batches
    """
    found: dict[str, Any] = {}
    for kind in MODIFIERS:
        found |= kind.sample(operation, scores, device, random)
    return found


class AttentionData:
    """What trials of both passes have in common: normal random data, and what calls are told."""

    def __init__(self, operation: Operation, shape: AttentionShape, device: str, seed: int) -> None:
        self.shape, self.device, self._seed = shape, device, seed
        self._element, self._mask = operation.element, operation.mask
        self._value_dim = operation.dim_v or shape.dim
        self._blocks = operation.blocks
        self._packed = operation.lengths == "packed"
        self._random = generator(device, seed)
        scores = (shape.batch, shape.heads, shape.seq_q, shape.seq_k)
        self._further = further(operation, scores, device, self._random)

    @property
    def keywords(self) -> dict[str, Any]:
        """What the calls are given beside q, k, v and lengths."""
        found: dict[str, Any] = dict(self._further)
        if self._mask == "causal":
            equal = self.shape.seq_q == self.shape.seq_k
            found["causal"] = True if equal else "bottom_right"
        elif self._mask == "window":
            found["window"] = (max(0, self.shape.window - 1), 0)
        if self._blocks:
            found["block_mask"] = self._block_mask
        return found

    @cached_property
    def _block_mask(self) -> BlockMask:
        """A quarter of the blocks of each head's rows, and its diagonal, of which half counts."""
        shape, block = self.shape, BLOCK
        rows, columns = -(-shape.seq_q // block), -(-shape.seq_k // block)
        random = generator("cpu", self._seed)
        drawn = torch.rand(1, shape.heads, rows, columns, generator=random) < DENSITY
        diagonal = torch.arange(rows)[:, None] == torch.arange(columns)
        places = torch.where(diagonal, FIRST, torch.where(drawn, WHOLE, NOTHING)).int()
        bits = packed(torch.ones(1, block, block, dtype=torch.bool).tril(), 8)
        found = BlockMask(places, bits, (block, block), shape.seq_q, shape.seq_k)
        return found.to(self.device)

    def call(self, kind: type[ArgumentsT]) -> ArgumentsT:
        """A call on q, k and v of their own."""
        q, k, v = self.queries(), self.keys(), self.values()
        return kind(q, k, v, **self.lengths(), **self.keywords)

    def queries(self) -> torch.Tensor:
        """A tensor like q."""
        return self._tensor(self.shape.heads, self.shape.seq_q, self.shape.total_q)

    def keys(self) -> torch.Tensor:
        """A tensor like k."""
        return self._tensor(self.shape.kv_heads, self.shape.seq_k, self.shape.total_k)

    def values(self) -> torch.Tensor:
        """A tensor like v."""
        sizes = (self.shape.kv_heads, self.shape.seq_k, self.shape.total_k)
        return self._tensor(*sizes, self._value_dim)

    def outputs(self) -> torch.Tensor:
        """A tensor like the output."""
        return self._tensor(self.shape.heads, self.shape.seq_q, self.shape.total_q, self._value_dim)

    def lengths(self) -> dict[str, Any]:
        """Offsets of packed sequences: the first is the longest, the rest share what is left."""
        shape = self.shape
        if not self._packed:
            return {}
        queries = self._ends(shape.seq_q, shape.total_q)
        keys = self._ends(shape.seq_k, shape.total_k)
        offsets = torch.tensor(queries, dtype=torch.int32, device=self.device)
        return {
            "max_seqlen_q": shape.seq_q,
            "max_seqlen_k": shape.seq_k,
            "cu_seqlens_q": offsets,
            "cu_seqlens_k": offsets
            if keys == queries
            else torch.tensor(keys, dtype=torch.int32, device=self.device),
        }

    def sequence(self, tensor: torch.Tensor, seq: int) -> torch.Tensor:
        """The last batch, or the first packed sequence, which has `seq` rows: [1, heads, seq, dim].

        Of lse [1, heads, seq].
        """
        if not self._packed:
            return tensor[-1:]
        if tensor.dim() == 2:
            return tensor[None, :, :seq]
        return tensor[:seq].transpose(0, 1)[None]

    def _ends(self, longest: int, total: int) -> list[int]:
        others = self.shape.batch - 1
        rest = (longest + (total - longest) * index // others for index in range(1, others + 1))
        return [0, longest, *rest]

    def _tensor(self, heads: int, seq: int, total: int, dim: int = 0) -> torch.Tensor:
        dim = dim or self.shape.dim
        wanted = (total, heads, dim) if self._packed else (self.shape.batch, seq, heads, dim)
        drawn = normal(wanted, self._random, self.device)
        found = drawn.to(TORCH[self._element])
        return found if self._packed else found.transpose(1, 2)
