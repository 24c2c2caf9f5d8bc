"""The proof that two versions choose alike sees another kernel, and another reason for one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from same_choices import GPUS, chosen
from same_kernels import configs

from warploom.runtime import records


@pytest.fixture(autouse=True)
def read_again() -> Iterator[None]:
    records.forget()
    yield
    records.forget()


def test_choices_differ_where_no_records_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    path = configs() / "gemm" / "space.yaml"
    tuned = dict(chosen(path, *GPUS[0]))
    monkeypatch.setenv("WARPLOOM_RECORDS", "ignore")
    records.forget()
    untuned = dict(chosen(path, *GPUS[0]))
    assert tuned.keys() == untuned.keys() and len(tuned) > 10
    assert {one["reason"] for one in tuned.values()}.isdisjoint(
        one["reason"] for one in untuned.values()
    )
    assert any(tuned[problem]["kernel"] != one["kernel"] for problem, one in untuned.items())
