"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import combine_cases as cases
from mutants import Checked

from warploom.generator.specification import KernelSpec

SUM = cases.spec(128, weights="fp32")
COPY = cases.spec(256, direction="permute")
BACK = cases.spec(256, **cases.BACK)


def plain(kernel: KernelSpec, seed: int) -> None:
    """Tokens and columns that no CTA divides, with elements between rows that are no one's."""
    cases.made(kernel, 61, 5, 2888, pad=8, seed=seed).verify()


def few(kernel: KernelSpec, seed: int) -> None:
    """Columns of a part of a warp."""
    cases.made(kernel, 13, 3, 24, pad=8, seed=seed).verify()


MUTANTS = {
    "the last columns are left out": Checked(
        "if (column >= p.columns) return", "if (column + kValues >= p.columns) return", plain, SUM
    ),
    "columns past the last are written": Checked(
        "if (column >= p.columns) return", "if (column > p.columns) return", few, SUM
    ),
    "what has no row is read": Checked(
        "choice < p.choices ? inverse[choice]",
        "choice < p.choices ? max(inverse[choice], 0)",
        plain,
        SUM,
    ),
    "weights are another token's": Checked(
        "token * p.weights_token", "(token + 1) % p.count * p.weights_token", plain, SUM
    ),
    "a choice is left out": Checked(
        "row = choice < p.choices", "row = choice + 1 < p.choices", plain, SUM
    ),
    "rows of no pair are left as they are": Checked(
        "if (p.experts == 0) return", "return", plain, COPY
    ),
    "rows of pairs are filled with zeros": Checked(
        "min(end, p.row_count) + pair", "min(end / 2, p.row_count) + pair", plain, COPY
    ),
    "a warp copies the first columns alone": Checked(
        "first += kLoads * kStep", "first += p.columns", plain, COPY
    ),
    "lanes are not summed": Checked("step = 16; step > 0", "step = 8; step > 0", plain, BACK),
    "the gradient of a skipped pair is left": Checked(
        "if (lane == 0) p.gradient[pair]",
        "if (lane == 0 && row >= 0) p.gradient[pair]",
        plain,
        BACK,
    ),
}
