"""Random legal kernels, and random problems for them: tables, lengths, orders of pages.

`WARPLOOM_SAMPLES_SEED` draws others.
"""

from __future__ import annotations

import os
from random import Random
from typing import Any, get_args, get_type_hints

import decode_cases as cases
from decode_cases import Shape

from warploom.errors import SpecificationError
from warploom.generator.families.attention_decode import DecodeOperation, DecodeSchedule
from warploom.generator.specification import KernelSpec

COUNT, SEED = 16, int(os.environ.get("WARPLOOM_SAMPLES_SEED", "1"))
PROBLEMS, TOGETHER = 2000, 50  # of which one test runs so many
_OPTIONS = get_type_hints(DecodeOperation)
_FIELDS = get_type_hints(DecodeSchedule)


def kernels(count: int, seed: int) -> list[KernelSpec]:
    """Return `count` kernels, whatever they compute, and how."""
    random = Random(seed)
    found: dict[KernelSpec, None] = {}
    while len(found) < count:
        if (kernel := _kernel(random)) is not None:
            found[kernel] = None
    return list(found)


def _kernel(random: Random) -> KernelSpec | None:
    of: dict[str, Any] = {
        name: random.choice((True, False) if kind is bool else get_args(kind))
        for name, kind in _OPTIONS.items()
    }
    if of["cache"] == "same":
        of["scales"] = "none"  # which calls refuse
    elif of["cache"] == "int8" and of["scales"] == "none":
        of["scales"] = "head"
    if of["keys"] == "packed":
        of |= {"page": 0, "lengths": False}
    by = {
        name: random.choice(get_args(_FIELDS[name]))
        for name in ("rows", "keys", "warps", "ctas_per_sm")
    }
    try:
        return cases.spec(DecodeOperation(**of), **by)
    except SpecificationError:
        return None


DRAWN = kernels(COUNT, SEED)
CHOICE = (*cases.OPTIONS, *cases.SIMPLE.values(), *DRAWN)


def problem(index: int, seed: int = SEED) -> tuple[KernelSpec, Shape, list[int]]:
    """A kernel, extents that it takes, and lengths: none, one, all, more than there is room for."""
    random = Random(f"{seed} {index}")
    kernel, group = random.choice(CHOICE), random.choice((1, 1, 2, 3, 4, 5, 8, 16))
    seq_q = random.choice((1, 1, 2, 3, random.randint(1, 256 // group)))
    shape = Shape(
        batch=random.choice((1, 2, 3, random.randint(1, 40))),
        kv_heads=random.randint(1, 4),
        group=group,
        seq_q=seq_q,
        seq_k=int(2 ** (12.3 * random.random())),
    )
    shape = cases.fitting(kernel, shape)
    known = [0, 1, shape.seq_k, shape.seq_k - 1]
    if cases.of(kernel).lengths:
        known += [shape.seq_k + 5000, -3]
    lengths = [
        random.choice(known) if random.random() < 0.3 else random.randint(0, shape.seq_k)
        for _ in range(shape.batch)
    ]
    return kernel, shape, lengths
