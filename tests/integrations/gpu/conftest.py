"""What tests of integrations on a GPU share: Warploom activated in torch's attention."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import warploom


@pytest.fixture
def activated() -> Iterator[None]:
    with warploom.sdpa.activate():
        yield
