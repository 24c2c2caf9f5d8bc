"""The cells of the family: what is measured beside cuBLAS answers rightly."""

from __future__ import annotations

from dataclasses import replace

import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import sparse_gemm as peer
from warploom.generator.families.sparse_gemm import SparseGemmShape


@pytest.mark.parametrize(
    ("kind", "library"), [("bf16", "mm"), ("e4m3", "_scaled_mm"), ("int8", "_int_mm")]
)
def test_contenders_are_right(kind: str, library: str) -> None:
    shape = SparseGemmShape(40, 32, 64)
    found = peer.contenders(peer.OPERATIONS[kind], shape, Asked(device="cpu"))
    named = [replace(one, name=one.name.partition(",")[0]) for one in found]
    assert_right(named, ["warploom", f"torch.{library} (cuBLAS)", "warploom.gemm"], "sparse_gemm")
