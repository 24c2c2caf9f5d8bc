"""What tests of torch's attention share: Warploom activated for CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sdpa_torchs import torchs

import warploom
from warploom.integrations import sdpa_activation, sdpa_rules


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch's kernels ran, where Warploom may be activated for CPU tensors."""
    noted: list[str] = []
    monkeypatch.setattr(sdpa_activation, "_KEY", "CPU")
    monkeypatch.setattr(sdpa_activation, "torchs_kernels", lambda: torchs(noted))
    monkeypatch.setattr(sdpa_rules, "elsewhere", lambda tensor: None)
    return noted


@pytest.fixture
def activated(ran: list[str]) -> Iterator[list[str]]:
    with warploom.sdpa.activate():
        yield ran
