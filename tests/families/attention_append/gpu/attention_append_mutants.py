"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

from dataclasses import replace

import attention_append_cases as cases
import torch
from attention_append_cases import FULL, PAGED, PLAIN
from mutants import Checked

from warploom.generator.specification import KernelSpec


def plain(kernel: KernelSpec, _seed: int) -> None:
    """Sequences of which some are full, and one is left out."""
    cases.made(kernel, (3, -1, 31, 47, 46, 48), (2,)).verify()


def packed(kernel: KernelSpec, _seed: int) -> None:
    """Tokens of sequences, and some that are of none."""
    made = cases.made(kernel, (3, 0, 31, 17, 45), (2, 0, 3, 1))
    assert made.call.cu_seqlens is not None
    made.call.cu_seqlens -= torch.tensor([0, 0, 0, 0, 0, 1], dtype=torch.int32)
    made.verify()


def past_the_pages(kernel: KernelSpec, _seed: int) -> None:
    """A table with the first page that there is not."""
    made = cases.made(kernel)
    assert made.call.page_table is not None
    made.call.page_table[1, 0] = made.call.k_cache.shape[0]
    made.verify()


ROWS, PAGES, ALL = cases.spec(PLAIN), cases.spec(PAGED), cases.spec(FULL)
HEADS = cases.spec(replace(PLAIN, cache="e4m3", scales="head"))
LARGEST = "fmaxf(fabsf(one[i]), fabsf(other[i]))"
MUTANTS = {
    "a row past the end is written": Checked(
        "position < p.capacity", "position <= p.capacity", plain, ROWS
    ),
    "a sequence that is left out is written": Checked("length >= 0 && ", "", plain, ROWS),
    "a page that there is not is written": Checked(
        "page < p.pages", "page <= p.pages", past_the_pages, PAGES
    ),
    "the last token of a sequence is left out": Checked(
        "index < p.seq", "index + 1 < p.seq", plain, ROWS
    ),
    "tokens of no sequence are written": Checked(
        " && token < p.cu_seqlens[sequence + 1]", "", packed, ALL
    ),
    "a sequence without tokens has those of the next": Checked(
        "ahead] <= token", "ahead] < token", packed, ALL
    ),
    "rows are turned the other way": Checked(
        "__fsub_rn(__fmul_rn(x", "__fadd_rn(__fmul_rn(x", plain, PAGES
    ),
    "what is not turned is": Checked("value ? 0 : p.rotary", "p.rotary", plain, PAGES),
    "half of a row has no say in its scale": Checked(LARGEST, "fabsf(one[i])", packed, ALL),
    "neighbours have no say in the scale of a row": Checked("step > 0", "step > 1", packed, ALL),
    "all heads have the scale of the first": Checked(
        "head * p.head_step", "0 * p.head_step", plain, HEADS
    ),
    "lengths afterwards are those before": Checked(
        "length : length + p.seq", "length : length", plain, ROWS
    ),
}
