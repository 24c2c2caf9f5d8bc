"""Problems that nobody tuned for: drawn by a seed, the same ones in every version of Python.

What chooses a kernel is judged on these: to the cells of cells.yaml it was fitted. Extents are of
the layers of language models, whole or as one GPU of several has them; a fifth is of no model.
Where a problem would take too much memory or time, its rows, or its tokens, are drawn again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

Product = tuple[int, int, int]  # m, n, k
Item = TypeVar("Item")
COUNT = 60  # problems that are drawn where nothing else is said

# ---- Layers of language models -------------------------------------------------------------------

HIDDEN = (1024, 1536, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168, 8192, 12288, 16384, 18432)
VOCABULARIES = (32000, 49152, 50304, 65536, 100352, 128256, 129280, 151936, 152064, 200064, 262144)
WIDER = (8 / 3, 3.5, 4.0, 5.25)  # what a layer's inner width is of its outer one
EXPERTS = (512, 768, 1024, 1408, 1536, 2048, 2816)  # inner widths of experts
RANKS = (512, 576, 1536, 2112)  # of queries and keys that pass a narrow layer
GROUPS = (1, 2, 4, 8, 16)  # query heads for each head of keys
SHARDS = (1, 1, 1, 2, 4, 8)  # GPUs that share a layer

# ---- Bounds --------------------------------------------------------------------------------------

ROWS = 2**14
STRANGE = (64, 2**17)  # extents that are no model's: least and most
BYTES, FLOPS = 2**32, 4e12  # of a product
RESULT = 2**29  # elements of a result, which is checked in float64


class Draw:
    """A stream of random numbers that its words and its seed decide.

    Only `random.Random.random` is used, whose numbers Python promises not to change.
    """

    def __init__(self, what: str, seed: int) -> None:
        self._random = random.Random(f"{what} {seed}")  # noqa: S311 (no secret)

    def below(self, count: int) -> int:
        """One of the numbers 0 to count - 1."""
        return int(self._random.random() * count)

    def of(self, items: Sequence[Item]) -> Item:
        """One of these."""
        return items[self.below(len(items))]

    def size(self, least: int, most: int) -> int:
        """A number from least to most, as likely to be in one octave as in another."""
        octaves = math.log2((most + 1) / least)
        return min(most, int(least * 2 ** (octaves * self._random.random())))


# ---- Products ------------------------------------------------------------------------------------


def products(what: str, bits: int, seed: int, count: int = COUNT) -> list[Product]:
    """Draw products of operands of so many bits: no two alike, of each `what` others.

    M is any number of rows, a third of the time a multiple of 64 or a power of two. N and K are
    multiples of 8 of 16-bit operands, 16 of 8-bit ones, without which there are no peers.
    """
    drawn = Draw(what, seed)
    found: dict[Product, None] = {}
    while len(found) < count:
        n, k = _weight(drawn, 128 // bits)
        found |= dict.fromkeys(_sized(drawn, n, k, bits))
    return list(found)


def _weight(drawn: Draw, unit: int) -> tuple[int, int]:
    """The extents [n, k] of a weight."""
    if drawn.below(5) == 0:
        n, k = drawn.size(*STRANGE), drawn.size(*STRANGE)
    else:
        n, k = drawn.of(_LAYERS)(drawn, drawn.of(HIDDEN), drawn.of(SHARDS))
    return _rounded(n, unit), _rounded(k, unit)


def _rounded(extent: int, unit: int) -> int:
    return -(-extent // unit) * unit


def _sized(drawn: Draw, n: int, k: int, bits: int) -> Iterator[Product]:
    """A product with as many rows as its bounds allow; none where a single row is too much."""
    for _ in range(64):
        m = _rows(drawn)
        moved = (m + n) * k * bits // 8 + 4 * m * n
        if moved <= BYTES and 2.0 * m * n * k <= FLOPS and m * n <= RESULT:
            yield m, n, k
            return


def _rows(drawn: Draw) -> int:
    rows, kind = drawn.size(1, ROWS), drawn.below(6)
    if kind == 0:
        return _rounded(rows, 64)
    return 2 ** round(math.log2(rows)) if kind == 1 else rows


def _qkv(drawn: Draw, hidden: int, shards: int) -> tuple[int, int]:
    heads = hidden // 128
    keys = max(1, heads // drawn.of(GROUPS))
    return 128 * (-(-heads // shards) + 2 * -(-keys // shards)), hidden


def _output(_drawn: Draw, hidden: int, shards: int) -> tuple[int, int]:
    return hidden, _rounded(hidden // shards, 128)


def _up(drawn: Draw, hidden: int, shards: int) -> tuple[int, int]:
    return drawn.of((1, 2)) * _inner(drawn, hidden, shards), hidden


def _down(drawn: Draw, hidden: int, shards: int) -> tuple[int, int]:
    return hidden, _inner(drawn, hidden, shards)


def _inner(drawn: Draw, hidden: int, shards: int) -> int:
    return _rounded(int(hidden * drawn.of(WIDER)), 256 * shards) // shards


def _head(drawn: Draw, hidden: int, shards: int) -> tuple[int, int]:
    return drawn.of(VOCABULARIES) // shards, min(hidden, 8192)


def _expert(drawn: Draw, hidden: int, _shards: int) -> tuple[int, int]:
    inner, hidden = drawn.of(EXPERTS), min(hidden, 8192)
    return drawn.of(((inner, hidden), (2 * inner, hidden), (hidden, inner)))


def _narrow(drawn: Draw, hidden: int, _shards: int) -> tuple[int, int]:
    rank = drawn.of(RANKS)
    return drawn.of(((rank, hidden), (hidden, rank)))


_LAYERS: tuple[Callable[[Draw, int, int], tuple[int, int]], ...] = (
    _qkv,
    _output,
    _up,
    _down,
    _head,
    _expert,
    _narrow,
)
