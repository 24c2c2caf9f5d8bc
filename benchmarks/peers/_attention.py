"""The problems of both passes of attention, their operands, and what pages say of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.families import Family, Problem
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.problem import Arguments, extents

LISTED = cells()["attention"]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention: [batch, heads, seq, dim] or, with `lengths`, packed sequences of them."""

    name: str
    batch: int
    heads: int
    kv_heads: int
    seq: int
    dim: int
    causal: bool = False
    window: int | None = None  # columns to the left of the diagonal, which is always causal
    lengths: tuple[int, ...] = ()

    @property
    def keywords(self) -> dict[str, Any]:
        """What `warploom.attention` is given beside tensors."""
        window = {} if self.window is None else {"window": (self.window, 0)}
        return {"causal": self.causal, **window}

    @property
    def operation(self) -> dict[str, Any]:
        """The fields of the operation that it is."""
        mask = "window" if self.window is not None else "causal" if self.causal else "none"
        lengths = "packed" if self.lengths else "fixed"
        return {"element": "bf16", "dim": self.dim, "mask": mask, "lengths": lengths}

    @property
    def flops(self) -> int:
        """The work that the mask leaves the forward pass: 4 dim for each score.

        A causal square counts half the scores of a full one, as it does everywhere; a window
        counts its own, exactly.
        """
        if self.window is not None:
            whole, ramp = self.seq, min(self.window + 1, self.seq)
            scores = ramp * (ramp + 1) // 2 + (whole - ramp) * ramp
            return 4 * self.batch * self.heads * self.dim * scores
        squares = sum(n * n for n in self.lengths) or self.batch * self.seq**2
        return 4 * self.heads * self.dim * squares // (2 if self.causal else 1)

    def record(self, passed: str, products: int) -> dict[str, Any]:
        """The problem of a cell, of a pass with so many products where the forward pass has two."""
        flops = self.flops * products // 2
        return {**asdict(self), "type": "bf16", "pass": passed, "flops": flops}

    @property
    def longest(self) -> slice:
        """The rows of the longest packed sequence."""
        longest = max(self.lengths)
        first = sum(self.lengths[: self.lengths.index(longest)])
        return slice(first, first + longest)

    def masked(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Arguments, Band]:
        """A call on the last rows of a sequence and all of its columns, and its mask."""
        call = Arguments(q, k, v, causal="bottom_right" if self.causal else False)
        if self.window is not None:
            call.window = (self.window, 0)
        return call, band(call, extents(call))


# ---- Cells ---------------------------------------------------------------------------------------


def _words(dim: int, causal: bool, seq: int) -> str:
    return f"d{dim} {'causal' if causal else 'full'} {seq}"


def squares() -> list[Attention]:
    """As many heads of k and v as of q, and as many tokens at every length."""
    tokens, hidden = LISTED["tokens"], LISTED["hidden"]
    return [
        Attention(_words(dim, causal, seq), tokens // seq, *(hidden // dim,) * 2, seq, dim, causal)
        for dim in LISTED["dim"]
        for causal in LISTED["causal"]
        for seq in LISTED["seq"]
    ]


def grouped() -> list[Attention]:
    """Several heads of q for each of k and v."""
    return [
        Attention(
            f"{_words(dim, causal, seq)} {heads}/{kv_heads} heads x {batch}",
            *(batch, heads, kv_heads, seq, dim, causal),
        )
        for batch, heads, kv_heads, seq, dim, causal in LISTED["grouped"]
    ]


def windows() -> list[Attention]:
    """A causal window at growing lengths, each beside the same length without one."""
    width = LISTED["window"]["width"]
    return [
        Attention(f"d128 {kind} {seq}", 1, 16, 16, seq, 128, causal=True, window=window)
        for seq in LISTED["window"]["seq"]
        for kind, window in ((f"window {width}", width - 1), ("causal", None))
    ]


def packed() -> list[Attention]:
    """Sequences whose lengths follow Zipf's law, with grouped queries."""
    given = LISTED["packed"]
    heads, kv_heads, dim = (given[name] for name in ("heads", "kv_heads", "dim"))
    lengths = zipf(given["tokens"], random.Random(0))  # noqa: S311 (lengths, no secret)
    name = f"d{dim} causal packed, {len(lengths)} sequences, {heads}/{kv_heads} heads"
    sizes = len(lengths), heads, kv_heads, max(lengths), dim
    return [Attention(name, *sizes, causal=True, lengths=tuple(lengths))]


def zipf(total: int, source: random.Random) -> list[int]:
    """Draw lengths with probability 1 / length ** exponent until they add up to total."""
    given = LISTED["packed"]
    choices = range(given["shortest"], given["longest"] + 1)
    weights = [length ** -given["exponent"] for length in choices]
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, source.choices(choices, weights)[0]))
    return lengths


GROUPS: dict[str, Callable[[], Iterable[Attention]]] = {
    "square": squares,
    "grouped": grouped,
    "window": windows,
    "packed": packed,
}
GRID = ("square", "grouped")
TITLES = {
    "square": "{kind}",
    "grouped": "{kind}",
    "window": f"{{kind}}, in a causal window of {LISTED['window']['width']}",
    "packed": "{kind}, packed sequences of varying length",
}
DIMENSION = "{kind}, head dimension {dim}"  # a row of the README


# ---- Operands ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Operands:
    """Random q, k, v, and an output full of NaN; packed: offsets of the sequences."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lengths: dict[str, Any]


def sets(problem: Attention, device: str) -> list[Operands]:
    """As many sets of operands as outlast the GPU's L2 cache when used in turn."""
    heads = 2 * (problem.heads + problem.kv_heads)
    tokens = sum(problem.lengths) or problem.batch * problem.seq
    size = 2 * heads * problem.dim * tokens
    return rotated(lambda: operands(problem, device), size, device)


def operands(problem: Attention, device: str) -> Operands:
    """Make operands as a model has them: [batch, seq, heads, dim] in memory, seen transposed."""

    def tensor(heads: int) -> torch.Tensor:
        if problem.lengths:
            shape = (sum(problem.lengths), heads, problem.dim)
            return torch.randn(shape, device=device).bfloat16()
        shape4 = (problem.batch, problem.seq, heads, problem.dim)
        return torch.randn(shape4, device=device).bfloat16().transpose(1, 2)

    q, k, v = tensor(problem.heads), tensor(problem.kv_heads), tensor(problem.kv_heads)
    given: dict[str, Any] = {}
    if problem.lengths:
        offsets = torch.tensor([0, *problem.lengths], device=device).cumsum(0).int()
        longest = max(problem.lengths)
        given = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets}
        given |= {"max_seqlen_q": longest, "max_seqlen_k": longest}
    return Operands(q, k, v, torch.full_like(q, torch.nan), given)


# ---- What pages say ------------------------------------------------------------------------------

PEERS = {
    "cudnn": "cuDNN",
    "fa2": "FlashAttention-2",
    "fa3": "FlashAttention-3",
    "fa4": "FlashAttention-4",
}
ABSENCES = {"one causal mask and one length only": "torch has no windows and no packed sequences"}


@dataclass(frozen=True, kw_only=True)
class Pass(Family):
    """What both passes have in common."""

    grid: tuple[str, ...] = GRID
    axis: tuple[str, str] = ("length", "length of a sequence")
    divided: str = "cells of"
    drawn: str = f", {LISTED['tokens'] // 1024}k tokens, hidden size {LISTED['hidden']}"

    def at(self, problem: Problem) -> int:
        """The length of a sequence."""
        return int(problem["seq"])

    def subject(self, problem: Problem) -> str:
        """The head dimension, the mask and what is unusual."""
        dim = f"head dimension {problem['dim']}"
        if problem["lengths"]:
            return f"{dim}, {len(problem['lengths'])} packed sequences"
        mask = "causal" if problem["causal"] else "no mask"
        if problem["window"] is not None:
            mask = f"window of {problem['window'] + 1}"
        heads, kv_heads = problem["heads"], problem["kv_heads"]
        groups = f", {heads} query heads on {kv_heads}" if heads != kv_heads else ""
        return f"{dim}, {mask}{groups}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By heads, mask and length."""
        windowed = problem["window"] is not None
        shared = problem["heads"] != problem["kv_heads"]
        return shared, problem["dim"], windowed, problem["causal"], problem["seq"], problem["batch"]

    def flops(self, problem: Problem) -> float | None:
        """What the cell says."""
        return float(problem["flops"])

    def division(self, problem: Problem) -> str:
        """The head dimension and what is unusual."""
        if problem["lengths"]:
            return "packed sequences"
        shared = ", grouped queries" if problem["heads"] != problem["kv_heads"] else ""
        window = "" if problem["window"] is None else ", window"
        return f"head dimension {problem['dim']}{window}{shared}"

    def panel(self, problem: Problem) -> tuple[str, str] | None:
        """By mask and head dimension: one length, as many heads of k and v as of q, no window."""
        alone = problem["heads"] == problem["kv_heads"] and not problem["lengths"]
        if not alone or problem["window"] is not None:
            return None
        mask = "causal" if problem["causal"] else "no mask"
        return mask, f"head dimension {problem['dim']}"
