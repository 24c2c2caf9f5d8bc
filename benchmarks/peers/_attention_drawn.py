"""Attentions that nobody tuned for, drawn by a seed as products are (see `problems`).

Heads are those of models, whole or as one GPU of several has them. Half of the masks are causal, a
fifth are windows; a quarter has packed sequences. Two thirds have as many columns as rows, a sixth
begins with columns that rows come after (a prompt in parts, a cache), a sixth is of two sequences
(cross attention, without a mask).
"""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.peers._attention_problem import Attention
from benchmarks.problems import BYTES, COUNT, FLOPS, Draw

# ---- Layers of models ----------------------------------------------------------------------------

DIMENSIONS = (*(128,) * 6, *(64,) * 3, *(256,) * 2, *(96,) * 2, 192, 32, 160, 80, 72)
HEADS = (1, 2, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64)
SHARING = 16  # query heads of a head of keys, at most
ELEMENTS = (*("bf16",) * 5, "fp16")

# ---- Bounds --------------------------------------------------------------------------------------

LENGTH = (128, 2**15)  # of a sequence: least and most
SHORTEST = 16  # of packed sequences, of columns that come before rows, and of a window
BATCHES, PACKED = (1, 64), (2, 48)  # sequences of one length, and packed ones


def attentions(what: str, seed: int, count: int = COUNT) -> list[Attention]:
    """Draw attentions: no two alike, of each `what` others.

    Rows are any number, a third of the time a multiple of 64 or a power of two.
    """
    drawn = Draw(what, seed)
    found: dict[str, Attention] = {}
    while len(found) < count:
        heads, dim = drawn.of(HEADS), drawn.of(DIMENSIONS)
        groups = [1 if drawn.below(2) else sharing for sharing in _divisors(heads)]
        layer = Attention("", 1, heads, heads // drawn.of(groups), 0, dim)
        one = _sized(drawn, replace(layer, element=drawn.of(ELEMENTS)))
        if one:
            found[one.name] = one
    return list(found.values())


def _divisors(heads: int) -> list[int]:
    return [sharing for sharing in range(1, SHARING + 1) if heads % sharing == 0]


def _sized(drawn: Draw, layer: Attention) -> Attention | None:
    """This layer over lengths that its bounds allow; None where none of many is allowed."""
    for _ in range(64):
        one = _masked(drawn, (_packed if drawn.below(4) == 0 else _fixed)(drawn, layer))
        if one.moved <= BYTES and one.flops <= FLOPS:
            return replace(one, name=_name(one))
    return None


def _fixed(drawn: Draw, layer: Attention) -> Attention:
    seq, kind = _rows(drawn), drawn.below(6)
    seq_k = {0: drawn.size(*LENGTH), 1: _longer(drawn, seq)}.get(kind, seq)
    return replace(layer, batch=drawn.size(*BATCHES), seq=seq, seq_k=0 if seq_k == seq else seq_k)


def _packed(drawn: Draw, layer: Attention) -> Attention:
    longest = _rows(drawn)
    lengths = tuple(drawn.size(SHORTEST, longest) for _ in range(drawn.size(*PACKED)))
    kind = drawn.below(6)
    lengths_k = {
        0: tuple(drawn.size(SHORTEST, longest) for _ in lengths),
        1: tuple(_longer(drawn, length) for length in lengths),
    }.get(kind, ())
    return replace(
        layer,
        batch=len(lengths),
        seq=max(lengths),
        lengths=lengths,
        seq_k=max(lengths_k, default=0),
        lengths_k=lengths_k,
    )


def _rows(drawn: Draw) -> int:
    rows, kind = drawn.size(*LENGTH), drawn.below(6)
    if kind == 0:
        return -(-rows // 64) * 64
    return 2 ** round(math.log2(rows)) if kind == 1 else rows


def _longer(drawn: Draw, rows: int) -> int:
    """Columns of rows that others come before."""
    return min(LENGTH[1], rows + drawn.size(SHORTEST, LENGTH[1]))


def _masked(drawn: Draw, one: Attention) -> Attention:
    kind, width, both = drawn.below(10), drawn.size(SHORTEST, one.columns), drawn.below(4) == 0
    if kind < 3 or any(rows > columns for rows, columns in one.sequences):
        return one
    if kind < 8:
        return replace(one, causal=True)
    return replace(one, causal=not both, window=width)


def _name(one: Attention) -> str:
    heads = f"{one.heads}" if one.heads == one.kv_heads else f"{one.heads}/{one.kv_heads}"
    mask = "causal" if one.causal else "full"
    if one.window is not None:
        mask = f"window {one.window}" + ("" if one.causal else " both ways")
    length = f"{one.batch}x{heads}x{one.seq}" + (f"x{one.seq_k}" if one.seq_k else "")
    if one.lengths:
        totals = "x".join(str(sum(each)) for each in (one.lengths, one.lengths_k) if each)
        length += f" packed {totals}"
    return f"{one.element} d{one.dim} {mask} {length}"
