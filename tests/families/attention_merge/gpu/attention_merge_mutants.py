"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import attention_merge_cases as cases
import torch
from mutants import Checked

from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.families.attention_merge.call import AttentionMergeCall

KERNEL = cases.spec()


def plain(kernel: KernelSpec, _seed: int) -> None:
    """Rows that no block divides, with elements between them that are no one's."""
    cases.made(kernel, 3, 5, 67, pad=8).verify()


def nothing(kernel: KernelSpec, _seed: int) -> None:
    """Rows of which one side, or both, attended to nothing, and holds NaN."""
    made = cases.made(kernel, 40)
    call: AttentionMergeCall = made.call
    call.lse_a[:20], call.lse_b[10:30] = -torch.inf, torch.inf
    call.out_a[:20], call.out_b[10:30] = torch.nan, torch.nan
    made.verify()


def apart(kernel: KernelSpec, _seed: int) -> None:
    """Logarithms of which one counts alone."""
    made = cases.made(kernel, 40)
    made.call.lse_a[::2] += 300
    made.call.lse_b[1::2] += 300
    made.verify()


def in_place(kernel: KernelSpec, _seed: int) -> None:
    """Each row is read whole, by all of its threads, before it is written."""
    made = cases.made(kernel, 1000)
    call = made.call
    expected, logs = (one.clone() for one in made.verify())
    out, lse = call.out_a.clone(), call.lse_a.clone()
    plan.run(AttentionMergeCall(out, lse, call.out_b, call.lse_b, out, lse, spec=kernel))
    assert torch.equal(out, expected) and torch.equal(lse, logs)


MUTANTS = {
    "the last row is left out": Checked(
        "if (row >= p.rows)", "if (row + 1 >= p.rows)", plain, KERNEL
    ),
    "rows past the last are written": Checked(
        "if (row >= p.rows) return", "if (row > p.rows) return", plain, KERNEL
    ),
    "a step is another dimension's": Checked("at1 * step1", "at1 * step2", plain, KERNEL),
    "lanes past the end of a row write": Checked(
        "column >= kDim) break;\n    Values<Out>",
        "column > kDim) break;\n    Values<Out>",
        plain,
        cases.spec(96),
    ),
    "infinity is a large logarithm": Checked(
        "return lse == infinity() ? -infinity() : lse", "return lse", nothing, KERNEL
    ),
    "what has no weight is multiplied": Checked(
        "weight_a == 0.f ? 0.f : weight_a", "weight_a", nothing, KERNEL
    ),
    "the smaller logarithm is the base": Checked(
        "fmaxf(log_a, log_b)", "fminf(log_a, log_b)", apart, KERNEL
    ),
    "the logarithm of the sum is lost": Checked("base + logf(sum)", "base", plain, KERNEL),
}
