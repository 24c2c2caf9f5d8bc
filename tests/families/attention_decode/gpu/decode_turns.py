"""Repeats a kernel of two stages, and prints how many launches differed from the first one.

Several of these processes take turns on a GPU, which stops kernels anywhere. It was so that a stage
was seen to be overwritten while its last read was under way: once in 2000 launches, the columns of
that read were wrong.
"""

from __future__ import annotations

import sys

import decode_arena as arena
import decode_cases as cases
import torch
from decode_cases import Shape

KERNEL = cases.spec(
    cases.operation(cache="e4m3", scales="head"),
    rows=16,
    keys=64,
    warps=4,
    stages=2,
    cluster=8,
)
LAUNCHES = 4000


def main(seed: int) -> None:
    """Verify a first launch, and compare the bits of the others with it."""
    shape = cases.fitting(KERNEL, Shape(30, 4, 4, 1, 1200))
    made = arena.call(KERNEL, shape, seed=seed)
    first = [one.clone() for one in arena.verify(made)]
    differing = torch.zeros((), dtype=torch.int64, device=arena.DEVICE)
    for _ in range(LAUNCHES):
        made.out.room.fill_(-1)
        out, lse = made.run()
        differing += (out != first[0]).any() | (lse != first[1]).any()
    print(differing.item())


if __name__ == "__main__":
    main(int(sys.argv[1]))
