"""Kernels that are wrong in one place each (mutants.py says how and why)."""

from __future__ import annotations

import route_cases as cases
from mutants import Checked

from warploom.generator.specification import KernelSpec

ONE, MANY = cases.spec(256), cases.spec(1024, 8)


def plain(kernel: KernelSpec, seed: int) -> None:
    """Pairs that no warp's load divides, of experts of which many share a warp."""
    cases.made(kernel, cases.drawn("uniform", 4097, 3, 60, seed), 60).verify()


def skewed(kernel: KernelSpec, seed: int) -> None:
    """Many lanes of a warp have one expert."""
    cases.made(kernel, cases.drawn("skewed", 4097, 8, 1000, seed), 1000).verify()


def skipping(kernel: KernelSpec, seed: int) -> None:
    """Ids before the first expert, and past the last."""
    cases.made(kernel, cases.drawn("skipping", 999, 4, 16, seed) + 5, 16, 5).verify()


def strided(kernel: KernelSpec, seed: int) -> None:
    """Ids that lie one column after the other."""
    ids = cases.drawn("uniform", 513, 4, 8, seed)
    made = cases.made(kernel, ids, 8)
    made.call.ids = made.call.ids.t().contiguous().t()
    made.verify()


MUTANTS = {
    "the last pair is left out": Checked("pair < end ?", "pair + 1 < end ?", plain, ONE),
    "lanes of an expert are counted from the end": Checked(
        "(1u << lane) - 1", "~0u << lane", plain, ONE
    ),
    "only the first lane of an expert counts": Checked("+= __popc(alike)", "+= 1", skewed, ONE),
    "warps before are left out of the scan": Checked(
        "last += i < warp ? sums[i] : 0;", "", skewed, MANY
    ),
    "experts of earlier steps are left out of the scan": Checked("last += done;", "", skewed, ONE),
    "CTAs before are left out": Checked("before += i < rank ? count : 0;", "", plain, MANY),
    "ids are not counted from the first expert": Checked(
        "uint64_t(id) - uint64_t(p.first)", "uint64_t(id)", skipping, ONE
    ),
    "skipped pairs have a row": Checked("expert < p.experts ? row : -1", "row", skipping, ONE),
    "the step of choices is one": Checked("choice * p.choice_step", "choice", strided, ONE),
}
