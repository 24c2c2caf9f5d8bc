"""Every case that was ever found wrong, with what was wrong: each is run again by the tests.

A new one comes from a failing sample or a user: its kernel, its problem, what was seen, the cure.
"""

from __future__ import annotations

from dataclasses import dataclass

import gemm_cases as cases

from warploom.generator.specification import KernelSpec


@dataclass(frozen=True)
class Entry:
    """One case, as `arena.call` takes it."""

    kernel: KernelSpec
    shape: tuple[int, int, int]
    seen: str
    cure: str
    batches: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())


LEDGER = [
    Entry(
        cases.spec((128, 128), store="direct"),
        (257, 131, 193),
        "columns right of D overwritten: TMA stores whole 16 bytes, whatever the bounds",
        "store tma only where rows of D end at a multiple of 16 bytes",
    ),
    Entry(
        cases.spec((128, 128), kernel_schedule="pingpong", stages=3),
        (3001, 2008, 520),
        "launch failure: a consumer two laps of the ring ahead took an old phase for its own",
        "an order barrier between the consumers (order_pingpong.cuh)",
    ),
    Entry(
        cases.spec((64, 48), consumers=1),
        (1, 512, 4096),
        "not wrong but slow, 1.4 times: TMA filled 63 rows that A does not have",
        "a box of A with as many rows as there are; rows that are not loaded are not stored",
    ),
    Entry(
        cases.spec((128, 96), epilogue=(cases.Residual("bf16"),)),
        (300, 776, 64),
        "an injected wait between products (C7517) where k = 0 was a branch of the kernel",
        "no kernel for k = 0: the runtime computes the epilogue of 0",
    ),
    Entry(
        cases.spec(
            (64, 256),
            a="e5m2",
            b="e4m3",
            d="fp32",
            store="direct",
            swap_ab=True,
            kernel_schedule="pingpong",
        ),
        (129, 700, 8),
        "two elements beyond the bound of fp8 by 4 %: of so few products, what is cut off each "
        "counts too, not only what is cut off the sum",
        "the bound has one step more (runtime/accumulation.py)",
    ),
    Entry(
        cases.spec((128, 96), batched=True, epilogue=cases.SCALES),
        (257, 136, 193),
        "a batch of one B was taken for rows of one matrix, its scales for those of all rows",
        "B has batches where it has more than two dimensions, whatever their extents",
        ((3,), (1,)),
    ),
]
