"""Contenders of the families whose time is that of the bytes they move: Warploom, and torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.families import Asked
from benchmarks.protocol import rotated
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender
from warploom.runtime.plan import Plan, make

Operands = Any  # a family's call: its operands, and the kernel that it is to run
COPY = "copy"  # a contender
MULTIPLE = (
    1 << 16
)  # bytes: copies of no multiple of 4 KiB took 1.46 to 1.55 times as long on an H200


def copy_of(moved: int, device: str) -> Contender:
    """A copy that reads and writes as many bytes together, to a multiple of 64 KiB."""
    half = -(-moved // (2 * MULTIPLE)) * MULTIPLE

    def draw() -> tuple[torch.Tensor, torch.Tensor]:
        to, source = (torch.ones(half, dtype=torch.uint8, device=device) for _ in range(2))
        return to, source

    pairs = rotated(draw, moved, device)
    return Contender(COPY, [partial(to.copy_, source) for to, source in pairs])


def contenders(
    draw: Callable[[], Operands],
    moved: int,
    operation: object,
    asked: Asked,
    *,
    ours: Callable[[Operands], Any],
    torchs: Callable[[Sequence[Operands]], Contender],
    error_share: Callable[[Operands, Callable[[], Any]], float],
) -> list[Contender]:
    """Warploom as dispatched, torch, and each kernel that competes and computes the same.

    `draw` makes operands, which move so many bytes; `error_share` runs a call on them, once more.
    """
    given = rotated(draw, moved, asked.device)

    def contender(name: str, spec: KernelSpec | None) -> Contender:
        calls = [partial(ours, replace(one, spec=spec)) for one in given]

        def told() -> tuple[str, str]:
            choice = make(replace(given[0], spec=spec), Plan).choice
            return choice.spec.name, choice.reason

        return Contender(name, calls, lambda: error_share(given[0], calls[0]), told)

    peers = [torchs(given)] if not asked.peers or "torch" in asked.peers else []
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    beside = (contender(spec.name, spec) for spec in fitting)
    return [contender("warploom", None), *peers, *beside]
