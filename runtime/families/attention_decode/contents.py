"""What the lists of a call on CPU tensors hold: a GPU's are never read by the host."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.runtime.families.attention_decode.extents import Extents
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families.attention_decode.call import AttentionDecodeCall


def check(call: AttentionDecodeCall, sizes: Extents) -> None:
    """Raise ProblemError for lengths, pages or offsets that lead out of their tensors."""
    if call.cu_seqlens_q is not None:
        longest = call.max_seqlen_q or 0
        _check_offsets("q", call.cu_seqlens_q, sizes.total_q, longest)
    if call.cu_seqlens_k is not None:
        _check_offsets("k", call.cu_seqlens_k, sizes.total_k, sizes.seq_k)
    lengths = [sizes.seq_k] * sizes.batch
    if call.cache_seqlens is not None:
        lengths = call.cache_seqlens.tolist()
        if any(not 0 <= length <= sizes.seq_k for length in lengths):
            raise ProblemError(
                f"cache_seqlens {shown(lengths)}",
                rule=f"must be between 0 and {sizes.seq_k}, the keys that the cache holds",
                fix="count the keys of each sequence, its new ones included, in whole pages of its "
                "row of the table",
            )
    if call.page_table is not None:
        _check_pages(call.page_table, lengths, sizes)


def _check_pages(table: torch.Tensor, lengths: list[int], sizes: Extents) -> None:
    for index, (row, length) in enumerate(zip(table.tolist(), lengths, strict=True)):
        used = row[: -(-length // sizes.page)]
        outside = [page for page in used if not 0 <= page < sizes.pages]
        if outside:
            raise ProblemError(
                f"page {outside[0]} in row {index} of page_table",
                rule=f"must be one of the cache's {sizes.pages} pages, 0 to {sizes.pages - 1}",
                fix="entries past a sequence's length may be anything",
            )


def _check_offsets(name: str, offsets: torch.Tensor, rows: int, longest: int) -> None:
    starts = offsets.tolist()
    lengths = [after - before for before, after in itertools.pairwise(starts)]
    if starts[0] != 0 or min(lengths, default=0) < 0 or starts[-1] > rows:
        raise ProblemError(
            f"cu_seqlens_{name} {shown(starts)} over {rows} rows",
            rule="must begin with 0, never decrease, and end at no more than the rows",
            fix="a cumulative sum of lengths that begins with 0",
        )
    if max(lengths, default=0) > longest:
        raise ProblemError(
            f"max_seqlen_{name} {longest}",
            rule=f"must be at least the longest sequence, {max(lengths)}",
            fix="pass the largest length of a sequence, or any larger number",
        )
