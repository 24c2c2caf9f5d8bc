"""`warploom.testing.do_bench` on a GPU: what a kernel of a known number of cycles takes."""

from __future__ import annotations

import pytest
import torch

from warploom.testing import do_bench

pytestmark = pytest.mark.gpu
CYCLES = 4_000_000
LEAST = 2.0  # milliseconds, at 2 GHz, which no Hopper GPU exceeds; a busy GPU takes longer


@pytest.mark.parametrize("options", [{}, {"graph": True}, {"flush": False}])
def test_a_kernel_takes_the_milliseconds_of_its_cycles(options: dict[str, bool]) -> None:
    """Launches that are not awaited would take microseconds, and seconds would be 0.002."""
    found = do_bench(lambda: torch.cuda._sleep(CYCLES), rep=20, **options)  # type: ignore[no-untyped-call, arg-type]
    assert LEAST <= found < 500 * LEAST


def test_quantiles_are_in_their_order() -> None:
    x = torch.randn(4 << 20, device="cuda")
    y = torch.empty_like(x)
    low, middle, high = do_bench(lambda: y.copy_(x), quantiles=[0.1, 0.5, 0.9])
    assert 0 < low <= middle <= high
