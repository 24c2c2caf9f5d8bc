"""Appending, as measuring and building ahead of time ask for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendShape,
)
from warploom.runtime import measure
from warploom.runtime.baselines import Baseline
from warploom.runtime.elements import TORCH
from warploom.runtime.families.attention_append.api import append_kv_cache
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.sampled import CallTrial, SampledFamily
from warploom.runtime.tensors import normal

PAGE, BEFORE = 16, 20  # rows of a page, and of each sequence that are there
FILLED = 0x41  # of every byte of what is written: a number in each type
LEAST_SET = 1 << 20  # bytes that a set counts as: of few tokens there would be thousands
_MOST = 256  # sequences; more tokens are all of one
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


class AttentionAppendRuntime(SampledFamily[AttentionAppendOperation, AttentionAppendShape]):
    """Calls of `attention_append`."""

    function = staticmethod(append_kv_cache)
    operands = len(AttentionAppendCall.declaration.required)
    called = AttentionAppendCall

    def draw(
        self,
        operation: AttentionAppendOperation,
        shape: AttentionAppendShape,
        device: str,
        random: torch.Generator | None,
    ) -> AttentionAppendCall:
        """A call with normal operands; on `meta`, undrawn.

        Up to 256 tokens are of a sequence each.
        """
        tokens, heads, dim = shape.tokens, shape.kv_heads, operation.dim
        batch, seq = (tokens, 1) if tokens <= _MOST else (1, tokens)
        columns = -(-(BEFORE + seq) // PAGE)
        pages, page = (batch * columns, PAGE) if operation.paged else (batch, columns * PAGE)
        element, dtype = TORCH[operation.element], TORCH[operation.cached]

        def drawn(heads: int) -> torch.Tensor:
            made = normal((tokens, heads, dim), random, device).to(element)
            return made if operation.packed else made.view(batch, seq, heads, dim).transpose(1, 2)

        def room(*extents: int, dtype: torch.dtype) -> torch.Tensor:
            """As a server has it: rows of all heads lie together."""
            made = torch.empty(extents, dtype=dtype, device=device)
            filled(made)
            return made.transpose(1, 2)

        given: dict[str, Any] = {}
        if operation.paged:
            table = torch.arange(pages, dtype=torch.int32, device=device)
            given["page_table"] = table.view(columns, batch).t().contiguous()
        if operation.packed:
            starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
            given["cu_seqlens"] = starts * seq
        if operation.rotary != "none":
            angles = normal((BEFORE + seq, dim // 16 * 8), random, device)
            table_type = TORCH[operation.angle]
            given |= {"cos": angles.cos().to(table_type), "sin": angles.sin().to(table_type)}
            given["interleaved"] = operation.rotary == "interleaved"
        if operation.queries:
            given["q"] = drawn(shape.heads or heads)
            given["out"] = torch.empty_like(given["q"], memory_format=torch.contiguous_format)
        if operation.scales == "head":
            scales = torch.rand(2, heads, generator=random, device=device) / 16 + 2**-6
            given["scale_k"], given["scale_v"] = scales
        if operation.scales == "token":
            for name in ("scale_k", "scale_v"):
                given[name] = room(pages, page, heads, dtype=torch.float32)
        k_cache, v_cache = (room(pages, page, heads, dim, dtype=dtype) for _ in range(2))
        lengths = torch.full((batch,), BEFORE, dtype=torch.int32, device=device)
        return AttentionAppendCall(k_cache, v_cache, drawn(heads), drawn(heads), lengths, **given)

    def results(self, call: AttentionAppendCall) -> list[torch.Tensor]:
        """What a call writes."""
        return list(written(call).values())

    def moved(
        self,
        operation: AttentionAppendOperation,
        shape: AttentionAppendShape,
        call: AttentionAppendCall,
    ) -> int:
        """The new rows alone: caches have others, too."""
        return max(LEAST_SET, shape.tokens * operation.token_bytes(shape.kv_heads, shape.heads))

    def blank(self, result: torch.Tensor) -> None:
        """Fill caches, too, whose other rows must stay as they are."""
        filled(result)

    def expected(self, call: AttentionAppendCall) -> list[torch.Tensor]:
        """What the reference leaves in copies of what a call writes, filled before."""
        fresh: dict[str, Any] = {name: one.clone() for name, one in written(call).items()}
        for one in fresh.values():
            filled(one)
        return expected(replace(call, **fresh))

    def share(self, results: Sequence[Any], expected: Sequence[torch.Tensor]) -> float:
        """0 where all are equal; else infinite. NaN is like any other number here."""
        both = zip(map(_plain, results), map(_plain, expected), strict=True)
        return max(
            measure.largest_share(one, other, torch.zeros_like(other)) for one, other in both
        )

    def baselines(self, operation: AttentionAppendOperation, trial: CallTrial) -> list[Baseline]:
        """The same in eager torch: rotation, quantization, and writes at indices."""
        copies = []
        for one in trial.sets:
            own: dict[str, Any] = {name: tensor.clone() for name, tensor in written(one).items()}
            copies.append(replace(one, **own))

        def append(one: AttentionAppendCall) -> list[torch.Tensor]:
            one.compute(None, (one.out,))  # type: ignore[arg-type]
            return list(written(one).values())

        return [Baseline("torch, eager", [partial(append, one) for one in copies])]


def filled(one: torch.Tensor) -> None:
    """Fill a tensor with what no call would write by chance: it is found where nothing was."""
    if not one.is_meta:
        one.view(_INTEGERS[one.dtype.itemsize]).fill_(
            sum(FILLED << 8 * byte for byte in range(one.dtype.itemsize))
        )


def written(call: AttentionAppendCall) -> dict[str, torch.Tensor]:
    """The tensors that a call writes, by name."""
    found = {"k_cache": call.k_cache, "v_cache": call.v_cache}
    if call.scale_k is not None and call.scale_v is not None and call.scale_k.dim() == 3:
        found |= {"scale_k": call.scale_k, "scale_v": call.scale_v}
    if call.lengths_after is not None:
        found["lengths_after"] = call.lengths_after
    if call.out is not None:
        found["out"] = call.out
    return found


def expected(call: AttentionAppendCall) -> list[torch.Tensor]:
    """What the reference leaves in copies of what a call writes."""
    copies: dict[str, Any] = {name: one.clone() for name, one in written(call).items()}
    other = replace(call, **copies)
    other.compute(None, (other.out,))  # type: ignore[arg-type]
    return list(copies.values())


def _plain(one: torch.Tensor) -> torch.Tensor:
    return one.float().nan_to_num(nan=-77.0).double()


FAMILY = AttentionAppendRuntime()
