"""The caches of `flash_attn_with_kvcache`, as kernels take them: views, of which none is a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch

from warploom.errors import ProblemError
from warploom.integrations.flash_attn_call import named_tensor
from warploom.runtime.families.attention_append.api import append_kv_cache
from warploom.runtime.families.attention_decode.extents import PAGES

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Rotary:
    """By what k is rotated, and q: at positions that move on with its rows, or at one for all."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool
    moving: bool

    @classmethod
    def of(
        cls,
        cos: torch.Tensor | None,
        sin: torch.Tensor | None,
        interleaved: bool,
        *,
        moving: bool,
    ) -> Self | None:
        """None where nothing is rotated."""
        if cos is None and sin is None:
            return None
        tensors = named_tensor("rotary_cos", cos), named_tensor("rotary_sin", sin)
        return cls(*tensors, interleaved, moving)


@dataclass(frozen=True, slots=True)
class Cache:
    """k and v, [batch or pages, heads_k, rows, dim], and which pages a sequence has, if any."""

    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None
    said: str  # what the table came of

    @classmethod
    def of(
        cls,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor | None,
        batch_idx: torch.Tensor | None,
    ) -> Self:
        """The cache as kernels take it, nothing of it copied; ProblemError where it is none."""
        caches = (k_cache, v_cache)
        lead = "batch, seq" if block_table is None else "pages, page"
        for name, tensor, layout in (
            ("q", q, "[batch, seq_q, heads, dim]"),
            ("k_cache", k_cache, f"[{lead}, heads_k, dim]"),
            ("v_cache", v_cache, f"[{lead}, heads_k, dim]"),
        ):
            if named_tensor(name, tensor).dim() != 4:
                raise ProblemError(f"{name} {list(tensor.shape)}", rule=f"must be {layout}", fix="")
        if torch.is_grad_enabled() and any(one.requires_grad for one in (q, *caches)):
            raise ProblemError(
                "q or a cache that requires a gradient",
                rule="must not: flash_attn_with_kvcache has none",
                fix="call it under torch.no_grad(), or use flash_attn_func",
            )
        if block_table is not None and batch_idx is not None:
            raise ProblemError(
                "block_table together with cache_batch_idx",
                rule="one of them must be None: a row of block_table is the pages of one sequence",
                fix="take the rows of the table instead: block_table[cache_batch_idx]",
            )
        if block_table is not None:
            return cls._paged(*caches, named_tensor("block_table", block_table), "block_table")
        if batch_idx is not None:  # a page is all that an item has
            table = named_tensor("cache_batch_idx", batch_idx)[:, None]
            return cls._paged(*caches, table, "cache_batch_idx")
        return cls(k_cache.transpose(1, 2), v_cache.transpose(1, 2), None, "")

    @classmethod
    def _paged(cls, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, said: str) -> Self:
        """Pages of a size that kernels have: larger ones are several of these."""
        rows = k.shape[1]
        if rows not in PAGES:
            page = max((one for one in PAGES if rows and rows % one == 0), default=0)
            joined = all(one.stride(0) == rows * one.stride(1) for one in (k, v))
            if not page or not joined or v.shape[1] != rows:
                raise ProblemError(
                    f"{said} with caches {list(k.shape)} and {list(v.shape)}",
                    rule=f"must be of a multiple of {PAGES[0]} rows that follow each other",
                    fix="allocate caches with more rows than are used",
                )
            each = rows // page
            table = table[..., None] * each + torch.arange(each, device=table.device)
            table = table.flatten(1).int()
            k, v = (one.view(len(one) * each, page, *one.shape[2:]) for one in (k, v))
        return cls(k.transpose(1, 2), v.transpose(1, 2), table, said)

    def append(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: torch.Tensor,
        rotary: Rotary | None,
    ) -> Pair:
        """Write k and v [batch, heads_k, new, dim] behind `lengths` keys.

        Returns q [batch, seq_q, heads, dim], rotated, and the lengths with the new keys.
        """
        after = torch.empty_like(lengths)
        given = (self.k, self.v, k, v, lengths)
        beside: dict[str, Any] = {"page_table": self.table, "lengths_after": after}
        if rotary is None:
            append_kv_cache(*given, **beside)
            return q, after
        # Rows that stay at one position are heads of one row.
        rows = q.transpose(1, 2) if rotary.moving else q.flatten(1, 2)[:, :, None]
        turned = append_kv_cache(
            *given,
            **beside,
            q=rows,
            cos=rotary.cos,
            sin=rotary.sin,
            interleaved=rotary.interleaved,
            out=torch.empty_like(rows),  # which lies as q does
        )
        assert turned is not None  # noqa: S101, since q was given
        return (turned.transpose(1, 2) if rotary.moving else turned.view(q.shape)), after
