"""`warploom.testing.do_bench` on a GPU: what a long GEMM and one that L2 holds take."""

from __future__ import annotations

import pytest
import torch

from warploom.testing import do_bench

pytestmark = pytest.mark.gpu


def test_a_gemm_takes_what_a_loop_of_it_takes() -> None:
    a = torch.randn(4096, 4096, device="cuda").bfloat16()
    out = torch.empty_like(a)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(20):
        torch.mm(a, a, out=out)
    begin.record()
    for _ in range(20):
        torch.mm(a, a, out=out)
    end.record()
    torch.cuda.synchronize()
    looped = begin.elapsed_time(end) / 20
    for options in ({}, {"graph": True}, {"flush": False}):
        found = do_bench(lambda: torch.mm(a, a, out=out), **options)  # type: ignore[arg-type]
        assert 0.6 * looped < found < 1.6 * looped, (options, found, looped)


def test_what_is_flushed_is_read_from_memory() -> None:
    """16 MB, which L2 holds: a copy of it is no faster than memory where L2 is flushed."""
    x = torch.randn(4 << 20, device="cuda")
    y = torch.empty_like(x)
    cold = do_bench(lambda: y.copy_(x), return_mode="median")
    warm = do_bench(lambda: y.copy_(x), return_mode="median", flush=False)
    assert warm < 0.9 * cold
    low, middle, high = do_bench(lambda: y.copy_(x), quantiles=[0.1, 0.5, 0.9])
    assert 0 < low <= middle <= high
