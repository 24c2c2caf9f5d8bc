"""Attentions with what training asks for: dropout, masks, biases, ALiBi, sinks, lists of blocks.

Each is a plain attention, and the kind of what is done to its scores or weights.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.peers._attention_problem import Attention
from warploom.generator.configurations import cells

LISTED = cells()["attention"]["options"]
WITHOUT = "warploom, without"  # a contender: the same operands, the option left out
Pattern = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of rows and columns: what counts


@dataclass(frozen=True, slots=True)
class Kind:
    """What is done: the list of its cells, the line of totals they count in, and what they say."""

    listed: str
    division: str
    words: str


KINDS = {
    "dropout": Kind("dropout", "dropout", f"dropout {LISTED['dropout_p']}"),
    "mask_of_pairs": Kind("scores", "masks and biases", "mask [1, 1, S, S]"),
    "mask_of_keys": Kind("scores", "masks and biases", "mask [B, 1, 1, S]"),
    "bias": Kind("scores", "masks and biases", "bias [1, H, S, S]"),
    "bias_gradient": Kind("scores", "masks and biases", "bias [1, H, S, S] with a gradient"),
    "alibi": Kind("alibi", "ALiBi", "ALiBi"),
    "sinks": Kind("sinks", "sinks", "sinks"),
    "documents": Kind("blocks", "block masks", "documents"),
    "prefix": Kind("blocks", "block masks", "prefix"),
    "random": Kind("blocks", "block masks", "a quarter of the blocks"),
}
_DIFFERENTIATED = {"bias_gradient": "bias", "sinks": "sinks"}  # what of a kind has a gradient


@dataclass(frozen=True, slots=True)
class Option:
    """An attention and a kind; no kind is the attention alone."""

    attention: Attention
    kind: str = ""

    @property
    def name(self) -> str:
        """What a cell of it is called."""
        return f"{self.attention.name}, {KINDS[self.kind].words}"

    @property
    def listed(self) -> str:
        """The list of its cells."""
        return KINDS[self.kind].listed if self.kind else ""

    @property
    def differentiated(self) -> str:
        """What has a gradient beside q, k and v; "" where nothing has."""
        return _DIFFERENTIATED.get(self.kind, "")

    @property
    def dropout_p(self) -> float:
        """The probability that a weight is dropped."""
        return float(LISTED["dropout_p"]) if self.kind == "dropout" else 0.0

    @property
    def flops(self) -> int:
        """The work of the forward pass: lists of blocks leave the scores that they show."""
        if self.listed != "blocks":
            return self.attention.flops
        one = self.attention
        return 4 * one.dim * one.batch * one.heads * _SCORES[self.kind](one.seq)

    def record(self, passed: str, products: int) -> dict[str, Any]:
        """The problem of a cell, of passes with so many products where the forward pass has two.

        `flops_without` is the work of the same attention alone.
        """
        about = self.attention.record(passed, products)
        own = {"option": self.kind, "flops": self.flops * products // 2}
        return {**about, **own, "flops_without": about["flops"]}


def options(*, both: bool) -> Iterator[Option]:
    """Every cell, of both passes or of the forward pass, which knows no gradient of a bias."""
    for kind, about in KINDS.items():
        if both or kind != "bias_gradient":
            for batch, heads, kv_heads, seq, dim, causal in LISTED[about.listed]:
                window = LISTED["window"] - 1 if kind == "sinks" else None
                one = Attention("", batch, heads, kv_heads, seq, dim, causal, window)
                yield Option(replace(one, name=_name(one, about)), kind)


def _name(one: Attention, about: Kind) -> str:
    mask = " causal" if one.causal else " full"
    if one.window is not None:
        mask = f" window {one.window + 1}"
    if about.listed == "blocks":
        mask = ""  # lists say all
    shared = f" {one.heads}/{one.kv_heads} heads" if one.heads != one.kv_heads else ""
    return f"d{one.dim}{mask} {one.seq}{shared}"


# ---- Lists of blocks -----------------------------------------------------------------------------


def documents(seq: int) -> list[int]:
    """The lengths of the documents that a sequence is of: cut at places that are drawn."""
    count = LISTED["lists"]["documents"]
    cuts = sorted(random.Random(0).sample(range(1, seq), count - 1))  # noqa: S311 (no secret)
    return [end - begin for begin, end in zip((0, *cuts), (*cuts, seq), strict=True)]


def prefix(seq: int) -> int:
    """How many of a sequence's first columns count in every row."""
    return int(LISTED["lists"]["prefix"] * seq)


def drawn_blocks(seq: int) -> list[list[int]]:
    """The blocks of columns that count in each block of rows: as many in each."""
    blocks, share = seq // LISTED["lists"]["block"], LISTED["lists"]["share"]
    draws = random.Random(0)  # noqa: S311 (no secret)
    return [sorted(draws.sample(range(blocks), int(share * blocks))) for _ in range(blocks)]


_SCORES: dict[str, Callable[[int], int]] = {  # of one head, that count
    "documents": lambda seq: sum(n * (n + 1) // 2 for n in documents(seq)),
    "prefix": lambda seq: (seq * (seq + 1) + prefix(seq) * (prefix(seq) - 1)) // 2,
    "random": lambda seq: sum(map(len, drawn_blocks(seq))) * LISTED["lists"]["block"] ** 2,
}


def pattern(option: Option, device: str) -> Pattern | None:
    """Which scores count by lists of blocks, by the numbers of rows and columns; None of others."""
    seq = option.attention.seq
    if option.kind == "documents":
        lengths = torch.tensor(documents(seq))
        number = torch.arange(len(lengths)).repeat_interleave(lengths).to(device)
        return lambda row, column: (column <= row) & (number[row] == number[column])
    if option.kind == "prefix":
        first = prefix(seq)
        return lambda row, column: (column < first) | (column <= row)
    if option.kind == "random":
        block, chosen = LISTED["lists"]["block"], drawn_blocks(seq)
        counts = torch.zeros(len(chosen), len(chosen), dtype=torch.bool)
        for row, columns in enumerate(chosen):
            counts[row, columns] = True
        counts = counts.to(device)
        return lambda row, column: counts[row // block, column // block]
    return None
