"""Decode attention beside cuDNN, FlashAttention, FlashInfer and XQA, each in its best layout.

A cell's figure is of the fastest of them over Warploom on contiguous keys. Pages, fixed chunks and
caches of 8 bits stand beside it; one graph for all lengths beside one that was captured there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._decode_contenders import (
    contenders,
    replayed,
    replayed_contenders,
)
from benchmarks.peers._decode_problem import Decode
from warploom.generator.configurations import cells

LISTED = cells()["attention_decode"]
LARGE, SMALL = 256, 64  # MB of k and v, between which sizes are told apart


def single(cache: str, lengths: Sequence[int]) -> Iterator[Decode]:
    """One row a sequence, at every number of heads, keys and sequences."""
    batches = LISTED["batch"] if cache == "bf16" else LISTED[cache]["batch"]
    for heads, kv_heads in LISTED["heads"]:
        for keys in lengths or LISTED["keys"]:
            for batch in batches:
                yield Decode(batch, heads, kv_heads, keys, cache=cache)


def several() -> Iterator[Decode]:
    """Several rows a sequence, each of which sees the keys up to its own."""
    for cell in LISTED["rows"]:
        yield Decode(*cell)


def cases(cache: str, asked: Asked) -> Iterator[Case]:
    """A cell for each problem, of a cache in 16 bits or in 8."""
    for problem in [*single(cache, asked.m), *(several() if cache == "bf16" else ())]:
        make = partial(contenders, problem)
        yield Case(problem.name, problem.record(), problem.floor, make)


def graphs(_asked: Asked) -> Iterator[Case]:
    """Graphs that are replayed at more keys than they were captured at."""
    captured = LISTED["replayed"]["captured"]
    for cell in LISTED["replayed"]["cells"]:
        problem = Decode(*cell)
        name = f"{problem.name}, captured at {captured}"
        about = {**problem.record(), "captured": captured}
        make = partial(replayed_contenders, problem, captured)
        yield Case(name, about, problem.floor, make, replayed)


class Decoding(Family):
    """softmax(q k^T) v of few rows by many keys."""

    def at(self, problem: Problem) -> int:
        """The keys of a sequence."""
        return int(problem["keys"])

    def subject(self, problem: Problem) -> str:
        """Heads, sequences and their rows."""
        rows = f", {problem['rows']} rows" if problem["rows"] > 1 else ""
        heads = f"{problem['heads']}/{problem['kv_heads']} heads"
        return f"{heads}, batch {problem['batch']}{rows}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By rows, heads, sequences and keys."""
        names = "rows", "heads", "kv_heads", "batch", "keys"
        return tuple(problem[name] for name in names)

    def division(self, problem: Problem) -> str:
        """By the size of k and v."""
        megabytes = problem["bytes"] / 2**20
        if megabytes < SMALL:
            return f"k and v below {SMALL} MB"
        return f"k and v from {LARGE} MB" if megabytes >= LARGE else f"{SMALL} MB to {LARGE} MB"


FAMILY = Decoding(
    name="attention_decode",
    groups={
        "decode": Group("{kind}", partial(cases, "bf16"), "{kind}", about="bf16 caches"),
        "e4m3": Group("{kind}", partial(cases, "e4m3"), about="e4m3 caches"),
        "replayed": Group("{kind}, one graph for all lengths", graphs, listed=True, fixed=True),
    },
    grid=("decode", "e4m3"),
    kinds={
        "bf16": "Decode attention, bf16",
        "e4m3": "Decode attention, e4m3 cache",
    },
    peers={
        "cudnn": "cuDNN",
        "fa2": "FlashAttention-2",
        "fa3": "FlashAttention-3",
        "flashinfer": "FlashInfer",
        "xqa": "XQA",
    },
    called={
        f"{baseline}, {how}": f"{baseline} ({how})"
        for baseline, ways in {
            "cuDNN": ["heads as rows"],
            "FlashAttention-2": ["heads as rows"],
            "FlashAttention-3": ["pages of 64"],
            "FlashInfer": [
                *("pages of 16", "pages of 64"),
                *("tensor cores, pages of 16", "tensor cores, pages of 64"),
            ],
            "XQA": ["pages of 16", "pages of 64"],
        }.items()
        for how in ways
    },
    absences={
        "begins at the top left": "torch has no such mask",
        "is not that of a group's heads": "one row a sequence only",
        "has no causal mask": "one row a sequence only",
        "measured up to batch 64": "not measured above batch 64",
        "with pages of 64 only": "several rows a sequence measured with pages of 64 only",
    },
    axis=("keys", "keys of a sequence"),
    divided="size",
)
