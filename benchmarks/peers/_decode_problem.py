"""Decode attention to be measured: few rows by long keys, their caches, and what is right.

Caches lie as FlashAttention has them: [batch, keys, kv_heads, dim], or [pages, page, kv_heads, dim]
with a table, whose pages are in random order. All contenders of a cell read the same numbers, as
many sets of them as outlast L2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from benchmarks.peers._checked import Right
from warploom.runtime.contest import Floor
from warploom.runtime.elements import TORCH, unit_roundoff
from warploom.runtime.trial import buffer_sets

# Of the root of the sum of squares of p v: a probability is rounded to bf16 before it multiplies.
ROUNDED = 2.0**-6
SPREAD = 2.0**-7  # of all elements together: 1 in 2**10 of the keys, left out, makes four times it
EIGHT = 16  # times as far off may be who multiplies e4m3: q and probabilities have 4 bits fewer
SCALES = 0.0131, 0.0127  # that k and v in e4m3 are multiplied by
LARGEST = 448.0  # of e4m3
_CHUNK = 1 << 24  # numbers that are drawn at a time
Pair = tuple[torch.Tensor, torch.Tensor]  # of keys and values


@dataclass(frozen=True, slots=True)
class Decode:
    """One decode attention: `rows` of each sequence attend to its `keys`, the last row to all."""

    batch: int
    heads: int
    kv_heads: int
    keys: int
    rows: int = 1
    cache: str = "bf16"
    dim: int = 128

    @property
    def name(self) -> str:
        """What a cell of it is called."""
        rows = f", {self.rows} rows" if self.rows > 1 else ""
        heads = f"{self.heads}/{self.kv_heads} heads"
        return f"{self.cache} {heads}, batch {self.batch}, {self.keys} keys{rows}"

    @property
    def group(self) -> int:
        """Heads of q for each of k and v."""
        return self.heads // self.kv_heads

    @property
    def numbers(self) -> int:
        """How many k has, and v."""
        return self.batch * self.keys * self.kv_heads * self.dim

    @property
    def bytes(self) -> int:
        """The size of k and v."""
        return 2 * self.numbers * TORCH[self.cache].itemsize

    @property
    def flops(self) -> int:
        """The work of both products."""
        return 4 * self.batch * self.heads * self.rows * self.keys * self.dim

    @property
    def floor(self) -> Floor:
        """The least time: k, v, q and the result are moved once."""
        rows = 4 * self.batch * self.heads * self.rows * self.dim
        return Floor.of(self.flops, self.bytes + rows)

    def record(self) -> dict[str, Any]:
        """The problem of a cell."""
        return {**asdict(self), "type": self.cache, "bytes": self.bytes}


# ---- Numbers -------------------------------------------------------------------------------------


class Numbers:
    """Random numbers that keys and values are taken from, as many as a cell needed at most."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Pair] = {}

    def take(self, cache: str, count: int, device: str) -> Pair:
        """Two tensors of `count` normal numbers; in e4m3 times SCALES they are."""
        kept = self._kept.get((cache, device))
        if kept is None or kept[0].numel() < count:
            self._kept.pop((cache, device), None)
            del kept  # before others take its place
            kept = self._kept[cache, device] = self._drawn(cache, count, device)
        return kept[0][:count], kept[1][:count]

    def clear(self) -> None:
        """Give the memory back."""
        self._kept.clear()

    def _drawn(self, cache: str, count: int, device: str) -> Pair:
        draws = torch.Generator(device).manual_seed(count)

        def one(scale: float) -> torch.Tensor:
            found = torch.empty(count, dtype=TORCH[cache], device=device)
            for at in range(0, count, _CHUNK):
                chunk = found[at : at + _CHUNK]
                normal = torch.randn(len(chunk), generator=draws, device=device)
                chunk.copy_(
                    normal if cache == "bf16" else (normal / scale).clamp_(-LARGEST, LARGEST)
                )
            return found

        return one(SCALES[0]), one(SCALES[1])


NUMBERS = Numbers()


class Given:
    """What the contenders of a cell are given."""

    def __init__(self, problem: Decode, device: str, cache: str = "") -> None:
        self.problem, self.device, self.cache = problem, device, cache or problem.cache
        size = problem.bytes
        self.sets = 2
        if device == "cuda":
            l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
            self.sets = buffer_sets(size, l2_bytes)
        self.k, self.v = NUMBERS.take(self.cache, self.sets * problem.numbers, device)
        draws = torch.Generator(device).manual_seed(problem.rows)
        extents = problem.batch, problem.rows, problem.heads, problem.dim
        self.q = torch.randn(extents, generator=draws, device=device).bfloat16()
        self.lengths = torch.full((problem.batch,), problem.keys, device=device).int()
        self._tables: dict[int, torch.Tensor] = {}
        self._right: dict[int, Right] = {}

    @cached_property
    def scales(self) -> Pair:
        """What k and v are multiplied by, fp32 [1] each."""
        k, v = SCALES if self.cache == "e4m3" else (1.0, 1.0)
        return torch.full((1,), k, device=self.device), torch.full((1,), v, device=self.device)

    def caches(self, page: int = 0) -> list[Pair]:
        """Each set's k and v: [batch, keys, kv_heads, dim], or of pages."""
        problem = self.problem
        extents = (problem.batch, problem.keys, problem.kv_heads, problem.dim)
        if page:
            extents = (problem.batch * problem.keys // page, page, *extents[2:])
        k, v = (one.view(self.sets, *extents) for one in (self.k, self.v))
        return list(zip(k, v, strict=True))

    def table(self, page: int) -> torch.Tensor:
        """Which pages a sequence has, in order: int32 [batch, keys / page]."""
        if page not in self._tables:
            problem, draws = self.problem, torch.Generator().manual_seed(page)
            count = problem.batch * problem.keys // page
            order = torch.randperm(count, generator=draws).int()
            self._tables[page] = order.view(problem.batch, -1).to(self.device)
        return self._tables[page]

    def right(self, page: int = 0, *, eight: bool = False) -> Right:
        """What is right of all sets, [sets * batch, rows, heads, dim]."""
        if page not in self._right:
            self._right[page] = self._computed(page)
        found = self._right[page]
        return Right(found.exact, found.bound * EIGHT, found.spread * EIGHT) if eight else found

    def _computed(self, page: int) -> Right:
        found, noise = [], []
        for q, k, v in self._sequences(page):
            one, spread = attended(q, k, v)
            found.append(one)
            noise.append(spread)
        exact, bound = torch.stack(found), ROUNDED * torch.stack(noise)
        unit = unit_roundoff(torch.bfloat16)
        bound += unit * (exact.abs() + bound + torch.finfo(torch.bfloat16).tiny)
        return Right(exact, bound, SPREAD)

    def _sequences(self, page: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """q [rows, heads, dim], k and v [keys, kv_heads, dim] of each, in float64."""
        factors = [float(one) for one in self.scales]
        for caches in self.caches(page):
            for index in range(self.problem.batch):
                k, v = (
                    one[index] if not page else one[self.table(page)[index].long()].flatten(0, 1)
                    for one in caches
                )
                yield self.q[index].double(), k.double() * factors[0], v.double() * factors[1]


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Pair:
    """A sequence's result [rows, heads, dim], and the root of the sum of squares of its terms."""
    (rows, heads, dim), (keys, kv_heads, _) = q.shape, k.shape
    grouped = q.view(rows, kv_heads, -1, dim).permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
    scores = grouped @ k.permute(1, 2, 0) * dim**-0.5
    last = torch.arange(keys - rows, keys, device=q.device).repeat(heads // kv_heads)
    hidden = torch.arange(keys, device=q.device) > last[:, None]
    p = scores.masked_fill_(hidden, -math.inf).softmax(-1)
    out = p @ v.transpose(0, 1), (p.square_() @ v.square().transpose(0, 1)).sqrt_()
    shape = kv_heads, heads // kv_heads, rows, dim
    found, noise = (one.view(shape).permute(2, 0, 1, 3).reshape(q.shape) for one in out)
    return found, noise


# ---- Contenders ----------------------------------------------------------------------------------

Call = Callable[[int], torch.Tensor]  # by the set of buffers; [batch, rows, heads, dim]
Make = Callable[[Given, int], Call]  # with pages of so many keys, 0: contiguous


@dataclass(frozen=True, slots=True)
class Way:
    """A way in which a contender attends: its call, the layout of keys, and how exact it is.

    `eight`: it multiplies in e4m3, q and probabilities rounded to it.
    """

    name: str
    make: Make
    page: int = 0
    cache: str = "bf16"
    eight: bool = False

    @property
    def called(self) -> str:
        """The name of its contender."""
        return f"{self.name}, pages of {self.page}" if self.page else self.name
