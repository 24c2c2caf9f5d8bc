"""The cells of the family: what is measured beside cuBLAS answers rightly."""

from __future__ import annotations

import pytest

from benchmarks import runner
from benchmarks.families import Asked
from benchmarks.peers import sparse_gemm as peer
from warploom.generator.families.sparse_gemm import SparseGemmShape


def test_the_cells_are_those_of_the_list() -> None:
    cases = list(runner.cases(runner.named(["sparse_gemm"]), Asked()))
    assert [case.name for case in cases][:2] == ["1x4096x4096", "16x4096x4096"]
    assert len(cases) == 3 * 24 and cases[24].name == "e4m3 1x4096x4096"
    limits = [case.floor.limit for case in cases if case.floor is not None]
    assert limits[:6] == ["bytes"] * 3 + ["flops"] * 3
    assert peer.FAMILY.subject(cases[0].problem) == "4096x4096"
    assert peer.FAMILY.flops(cases[0].problem) == 2 * 4096 * 4096


@pytest.mark.parametrize(
    ("kind", "library"), [("bf16", "mm"), ("e4m3", "_scaled_mm"), ("int8", "_int_mm")]
)
def test_contenders_are_right(kind: str, library: str) -> None:
    shape = SparseGemmShape(40, 32, 64)
    found = peer.contenders(peer.OPERATIONS[kind], shape, Asked(device="cpu"))
    assert [one.name.partition(",")[0] for one in found] == [
        "warploom",
        f"torch.{library} (cuBLAS)",
        "warploom.gemm",
    ]
    for one in found:
        assert one.error_share is not None and one.error_share() <= 1
    assert found[0].told is not None and "sparse_gemm" in found[0].told()[0]
