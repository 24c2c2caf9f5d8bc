"""The cases of grouped GEMMs: what is measured beside torch answers rightly."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import deep_gemm_stand_in
import pytest
from samplers import assert_right

from benchmarks.families import Asked
from benchmarks.peers import _grouped as peer
from benchmarks.peers.libraries import deep_gemm
from warploom.generator.families.gemm import GemmOperation, complete
from warploom.generator.specification import KernelSpec


@pytest.mark.parametrize(
    "operation",
    [peer.BY_ROWS, peer.BLOCKS, peer.BY_K, replace(peer.BLOCKS, groups="masked")],
    ids=["rows", "blocks", "k", "masked"],
)
def test_every_contender_is_right(operation: GemmOperation) -> None:
    shape = (4, 128, 256, 80)
    found = peer._contenders(operation, shape, "zipf", Asked(device="cpu", peers=("torch",)))
    by_torch = ["torch._grouped_mm"] if operation.a == "bf16" else []
    assert_right(found, ["warploom", *by_torch], "gemm_sm90a")


@pytest.mark.parametrize("rows", [3, 80])
def test_kernels_of_a_configuration_compete(rows: int) -> None:
    """Also where there are fewer rows than groups; those of another operation do not."""
    few = {"tile": (16, 128, 64), "swap_ab": True, "stream_k": True}
    plain = {"tile": (64, 128, 64), "consumers": 1}
    spec, other = (
        KernelSpec("sm_90a", operation, complete("sm_90a", operation, fields))
        for operation, fields in ((peer.BY_ROWS, few), (peer.BY_K, plain))
    )
    asked = Asked(device="cpu", peers=("torch",), specs=(spec, other))
    found = peer._contenders(peer.BY_ROWS, (4, 128, 256, rows), "even", asked)
    assert_right(found, ["warploom", "torch._grouped_mm", spec.name], "gemm_sm90a")


def test_a_floor_leaves_out_the_weights_of_groups_without_rows() -> None:
    """Guards against a floor above a time: 128 rows leave many of 128 groups empty."""
    groups, n, k, rows = 128, 1536, 2048, 128
    ends = peer._routing.ends(rows, groups, "zipf", 0)
    hit = len(ends.unique()) - int(ends[0] == 0)
    assert 0 < hit < groups
    moved = peer._moved(peer.BY_ROWS, (groups, n, k, rows), "zipf")
    assert moved == 2 * (rows * k + hit * n * k + rows * n)
    assert peer._moved(peer.BY_K, (groups, n, k, rows), "zipf") > 2 * groups * n * k


@pytest.mark.parametrize("operation", [peer.BY_ROWS, peer.BLOCKS], ids=["bf16", "blocks"])
@pytest.mark.parametrize("groups", ["rows", "masked"])
def test_deep_gemm_is_given_the_rows_of_each_group(
    operation: GemmOperation, groups: Literal["rows", "masked"], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against rows that are padded, or scales laid out, otherwise than its kernels read."""
    monkeypatch.setattr(deep_gemm, "imported", deep_gemm_stand_in.imported)
    asked = Asked(device="cpu", peers=("deep_gemm",))
    made = replace(operation, groups=groups)
    found = peer._contenders(made, (4, 128, 256, 80), "zipf", asked)
    library = "deep_gemm" if groups == "masked" else "deep_gemm, rows padded before"
    assert_right(found, ["warploom", library], "gemm_sm90a")
