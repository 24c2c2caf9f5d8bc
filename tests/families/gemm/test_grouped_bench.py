"""The cases of grouped GEMMs: what is measured beside torch answers rightly."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import deep_gemm_stand_in
import pytest
import torch
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


@pytest.mark.parametrize("block", peer.BY_K_FP8)
def test_every_contender_of_gradients_in_fp8_is_right(
    block: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against operands that torch's and DeepGEMM's kernels would read otherwise."""
    monkeypatch.setattr(deep_gemm, "imported", deep_gemm_stand_in.imported)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", _scaled_grouped_mm)
    asked = Asked(device="cpu")
    found = peer._contenders_by_k(peer.BY_K_FP8[block], (4, 128, 256, 400), "zipf", asked)
    by_block = ["torch._grouped_mm, bf16", "deep_gemm, adds to fp32"]
    by_row = ["torch._scaled_grouped_mm", "torch._grouped_mm, bf16"]
    baselines = by_row if block == "row" else by_block
    assert_right(found, ["warploom", "warploom, bf16", *baselines], "gemm_sm90a")


def _scaled_grouped_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    offs: torch.Tensor,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> torch.Tensor:
    """torch's function, which has no kernel for CPUs: scales are of rows of each group."""
    ends, sides = offs.tolist(), (scale_a.view(len(offs), -1, 1), scale_b.view(len(offs), 1, -1))
    assert use_fast_accum and a.stride(1) == b.stride(0) == 1
    found = [a[:, i:j].float() @ b[i:j].float() for i, j in zip([0, *ends], ends, strict=False)]
    return (torch.stack(found) * sides[0] * sides[1]).to(out_dtype)


def test_a_floor_leaves_out_the_weights_of_groups_without_rows() -> None:
    """Guards against a floor above a time: 128 rows leave many of 128 groups empty."""
    groups, n, k, rows = 128, 1536, 2048, 128
    ends = peer._routing.ends(rows, groups, "zipf", 0)
    hit = len(ends.unique()) - int(ends[0] == 0)
    assert 0 < hit < groups
    moved = peer._moved(peer.BY_ROWS, (groups, n, k, rows), "zipf")
    assert moved == 2 * (rows * k + hit * n * k + rows * n)
    written, read = 2 * groups * n * k, rows * (n + k)
    assert peer._moved(peer.BY_K, (groups, n, k, rows), "zipf") == written + 2 * read
    assert peer._moved(peer.BY_K_FP8["row"], (groups, n, k, rows), "zipf") == written + read


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
