"""The host's time of decode attention."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import warploom
from benchmarks.peers.public import Cell


def _host(given: bool) -> tuple[Callable[[], object], float]:
    q = torch.randn(4, 32, 1, 128, device="cuda").bfloat16()
    k, v = (torch.randn(4, 8, 1024, 128, device="cuda").bfloat16() for _ in range(2))
    lengths = torch.full((4,), 64, dtype=torch.int32, device="cuda")
    parameters = inspect.signature(warploom.attention_decode).parameters
    out = torch.empty_like(q) if given else None
    # Another checkout may know the old name alone.
    name = "cache_seqlens" if "cache_seqlens" in parameters else "lengths"
    keywords: dict[str, Any] = {name: lengths, "out": out}
    return lambda: warploom.attention_decode(q, k, v, **keywords), 0.0


CELLS = [
    Cell("host attention_decode", partial(_host, False), host=True),
    Cell("host attention_decode, out given", partial(_host, True), host=True),
]
