"""The products that are measured: ours and the peers' compute one function, and errors show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import deep_gemm_stand_in
import pytest
import torch
from samplers import constant

import warploom
from benchmarks import runner
from benchmarks.families import Asked, Case
from benchmarks.peers import (
    _block_scaled,
    _block_scaled_layer,
    _drawn,
    _gate_gradient,
    _gated,
    _gated_layer,
    _normed,
    _operations,
    _rounding,
    _strassen,
    gemm,
)
from benchmarks.peers._libraries import GEMM
from benchmarks.peers._products import TYPES, floor, ours, sets
from benchmarks.peers.libraries import deep_gemm
from warploom.generator.specification import parse_name
from warploom.runtime.contest import Cell
from warploom.runtime.families.gemm import reference
from warploom.runtime.families.gemm.call import Accumulation
from warploom.runtime.families.gemm.reference import error_share


def measured(case: Case, *peers: str) -> Cell:
    return runner.measure(case, Asked(peers=peers, device="cpu"), constant(1e-5))


@pytest.fixture
def any_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute torch's 8-bit products exactly.

    Its own refuse fp8 where a CPU has no AVX-512, and saturate sums of int8 where it has no VNNI.
    """

    def scaled(a: torch.Tensor, b: torch.Tensor, **keywords: Any) -> torch.Tensor:
        taken = {"scale_a", "scale_b", "out_dtype", "use_fast_accum", "out"}
        assert set(keywords) == taken
        out: torch.Tensor = keywords["out"]
        assert out.dtype == keywords["out_dtype"]
        exact = a.double() @ b.double() * keywords["scale_a"] * keywords["scale_b"]
        return out.copy_(exact)

    def integers(a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(a.double() @ b.double())

    monkeypatch.setattr(torch, "_scaled_mm", scaled)
    monkeypatch.setattr(torch, "_int_mm", integers)


@pytest.mark.parametrize("kind", TYPES)
def test_peer_and_warploom_compute_one_function(kind: str, any_cpu: None) -> None:
    cell = measured(gemm.case(kind, TYPES[kind], (48, 80, 96), type=kind), "cublas")
    assert len(cell.entries) == 2
    for entry in cell.entries:
        assert entry.absent is None
        assert entry.error_share is not None and entry.error_share <= 1
    assert parse_name(str(cell.entries[0].kernel)).operation == TYPES[kind]
    assert cell.problem["decision"]


def test_a_peer_of_another_type_is_absent_with_the_reason() -> None:
    cell = measured(gemm.case("int8", TYPES["int8"], (32, 32, 64)), "triton", "quack")
    assert [entry.absent for entry in cell.entries[1:]] == [
        f"{name}: not for int8 here" for name in ("triton", "quack")
    ]


def test_peers_that_are_not_installed_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for module in ("triton", "quack", "quack.gemm_interface"):
        monkeypatch.setitem(sys.modules, module, None)
    cell = measured(gemm.case("bf16", TYPES["bf16"], (32, 32, 64)))
    absent = {entry.contender: entry.absent for entry in cell.entries}
    assert absent.keys() == {"warploom", "torch.mm", "triton", "quack"} and len(GEMM) == 3
    assert absent["triton"] == "triton is not installed" and absent["quack"]


@pytest.mark.parametrize(
    ("shape", "kind", "microseconds", "limit"),
    [
        ((8192, 8192, 8192), "bf16", 1374.4, "flops"),
        ((8192, 8192, 8192), "e4m3", 687.2, "flops"),
        ((1, 4096, 4096), "bf16", 7.717, "bytes"),
        ((1, 28672, 4096), "bf16", 54.01, "bytes"),
        ((16, 4096, 4096), "int8", 3.932, "bytes"),
    ],
)
def test_a_floor_counts_flops_and_bytes_once(
    shape: tuple[int, int, int], kind: str, microseconds: float, limit: str
) -> None:
    found = floor(TYPES[kind], shape)
    assert found.seconds * 1e6 == pytest.approx(microseconds, rel=1e-3)
    assert found.limit == limit


def test_an_output_that_nothing_wrote_is_wrong() -> None:
    contender = ours(TYPES["bf16"], sets(TYPES["bf16"], (32, 32, 64), "cpu"))
    assert contender.error_share and contender.error_share() == float("inf")


def test_one_wrong_element_is_wrong() -> None:
    (one,) = sets(TYPES["int8"], (32, 32, 64), "cpu")
    d = warploom.gemm(one.a, one.b)
    assert error_share(d, one.a, one.b) == 0
    d[3, 5] += 1
    assert error_share(d, one.a, one.b) == float("inf")


@pytest.mark.parametrize(("accumulation", "right"), [("fast", True), ("promoted", False)])
def test_promoted_sums_may_err_less_than_fast_ones(
    accumulation: Accumulation, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a quarter of the fast bound: at k = 4096 that is 6 times the promoted one."""
    plain = warploom.gemm

    def rough(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **keywords: Any) -> None:
        exact, bound = reference.gemm_bound(a, b, keywords["epilogue"], torch.float32)
        plain(a, b, out=out, **keywords)
        out[3, 5] = exact[3, 5] + bound[3, 5] / 4

    monkeypatch.setattr(warploom, "gemm", rough)
    operation = replace(TYPES["e4m3"], d="fp32", accumulation=accumulation)
    contender = ours(operation, sets(operation, (16, 32, 4096), "cpu"))
    for call in contender.calls:
        call()
    assert contender.error_share and (contender.error_share() <= 1) == right


def test_each_wider_operation_is_checked_beside_what_it_would_replace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"squares": [(32, 48, 256)], "trained": (32, 48, 64), "batched": [(3, 32, 48, 64)]}
    monkeypatch.setattr(_operations, "cells", lambda: {"gemm": listed})
    cells = [measured(case) for case in _operations.operations(Asked())]
    assert [cell.name.split()[0] for cell in cells] == [
        "promoted",
        *["quantised"] * 4,
        "batch",
        "in",
    ]
    for cell in cells:
        assert [entry.absent for entry in cell.entries] == [None, None]
        assert all(0 < (entry.error_share or 0) <= 1 for entry in cell.entries), cell.name
        assert cell.ratio == 1.0
    (fused,) = [measured(case) for case in _operations.fused(Asked())]
    assert [entry.contender for entry in fused.entries] == ["fused", "plain", "torch.mm"]
    assert all(0 < (entry.error_share or 0) <= 1 for entry in fused.entries)


def test_a_gate_is_checked_beside_a_product_and_what_follows_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"types": ["bf16", "e4m3_row_column"], "weights": [(32, 64)], "m": [5]}
    monkeypatch.setattr(_gated, "cells", lambda: {"gemm": {"gated": listed}})
    for layers in ("gated_layers", "block_scaled_layers"):
        monkeypatch.setattr(_gated, layers, lambda _: ())
    for case in _gated.gated(Asked()):
        found = {entry.contender: entry for entry in measured(case).entries}
        assert 0 < (found["warploom"].error_share or 0) <= 1
        assert {"without the gate", "warploom, then torch.compile", "warploom, then liger"} <= set(
            found
        )
        assert ("quack" in found) == case.name.startswith("gated bf16")


def test_the_gradient_of_a_gate_is_checked_beside_a_kernel_behind_the_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"gated": {"gradients": {"sizes": [(64, 96)], "tokens": [5]}}}
    monkeypatch.setattr(_gate_gradient, "cells", lambda: {"gemm": listed})
    monkeypatch.setattr(_gate_gradient, "compiled", lambda make: make())
    (case,) = _gate_gradient.gate_gradients(Asked())
    found = {entry.contender: entry for entry in measured(case).entries}
    assert parse_name(str(found["warploom"].kernel)).operation == _gate_gradient.OPERATION
    assert found.pop("without the gate").error_share is None  # it is no result of the case
    assert set(found) == {
        "warploom",
        *(f"{one}, then torch.compile" for one in ("warploom", "torch")),
    }
    assert all(0 < (entry.error_share or 0) <= 1 for entry in found.values())


def test_stochastic_rounding_is_measured_beside_rounding_to_nearest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"types": [["bf16", "e4m3"], ["e4m3_row_column", "bf16"]], "shapes": [(5, 32, 64)]}
    monkeypatch.setattr(_rounding, "cells", lambda: {"gemm": {"rounding": listed}})
    for case in _rounding.rounded(Asked()):
        found = {entry.contender: entry for entry in measured(case).entries}
        assert list(found) == ["warploom, stochastic", "warploom, to nearest"]
        assert all(0 < (entry.error_share or 0) <= 1 for entry in found.values())


def test_strassens_algorithm_is_measured_beside_ordinary_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"types": ["bf16"], "shapes": [(64, 96, 128)]}
    monkeypatch.setattr(_strassen, "cells", lambda: {"gemm": {"strassen": listed}})
    (case,) = _strassen.strassen(Asked())
    found = {entry.contender: entry for entry in measured(case).entries}
    ways = {"warploom, strassen", "warploom, strassen2", "warploom", "torch.mm"}
    assert set(found) == ways and next(iter(found)) == "warploom, strassen"
    assert all(0 < (entry.error_share or 0) <= 1 for entry in found.values())
    assert all(found[name].kernel for name in ways - {"torch.mm"})


@pytest.mark.parametrize(("family", "kind"), [("gemm", "bf16"), ("mixed_gemm", "w4a16")])
def test_a_norm_through_two_epilogues_is_measured_beside_kernels_of_norms(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: str
) -> None:
    listed = {"types": [kind], "layers": [(256, 128, 64)], "m": [5]}
    monkeypatch.setattr(_normed, "cells", lambda: {family: {"normed": listed}})
    monkeypatch.setattr(_normed, "compiled", lambda make: make())
    (case,) = _normed.normed(family, Asked())
    found = {entry.contender: entry for entry in measured(case).entries}
    assert next(iter(found)) == "warploom" and len(found) == 3 + (kind == "bf16")
    assert all(0 < (entry.error_share or 0) <= 1 for entry in found.values())
    assert case.floor is not None and case.floor.limit == "bytes"


def test_a_layer_that_trains_is_checked_in_every_way_that_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"layers": {"sizes": [(64, 96)], "tokens": [5]}}
    monkeypatch.setattr(_gated_layer, "cells", lambda: {"gemm": {"gated": listed}})
    (case,) = _gated_layer.gated_layers(Asked())
    found = {entry.contender: entry for entry in measured(case).entries}
    ways = {"warploom", "warploom, compiled", "warploom, layer by layer", "torch.compile"}
    assert set(found) == ways
    for name in ("warploom", "warploom, layer by layer"):
        assert 0 < (found[name].error_share or 0) <= 1


def test_a_layer_of_a_checkpoint_in_e4m3_is_checked_beside_deep_gemm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards against a peer that computes something else: its gate and cast are torch's here."""
    listed = {"block_scaled_layers": {"sizes": [(256, 384)], "tokens": [5]}}
    monkeypatch.setattr(_block_scaled_layer, "cells", lambda: {"gemm": {"gated": listed}})
    monkeypatch.setattr(deep_gemm, "imported", deep_gemm_stand_in.imported)
    monkeypatch.setattr(_block_scaled_layer, "compiled", lambda make: make())
    (case,) = _block_scaled_layer.block_scaled_layers(Asked())
    found = {entry.contender: entry for entry in measured(case).entries}
    assert set(found) == {"warploom", "deep_gemm, then torch.compile"}
    assert all(0 < (entry.error_share or 0) <= 1 for entry in found.values())
    assert str(found["warploom"].kernel).count("_sm90a_") == 3


def test_deep_gemm_is_given_what_its_kernels_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep_gemm, "imported", deep_gemm_stand_in.imported)
    operation = _block_scaled.TYPES["e4m3_block"]
    cell = measured(_block_scaled._case("block", operation, (5, 192, 256)), "deep_gemm")
    shares = {entry.contender: entry.error_share for entry in cell.entries}
    assert 0 < (shares["deep_gemm"] or 0) <= 1


def test_what_quack_is_given_has_gate_and_up_in_turn() -> None:
    a, b = torch.randn(5, 64).bfloat16(), torch.randn(64, 32).bfloat16()
    turned = warploom.gemm(a, _gated._interleaved(b), gate="silu", gate_layout="interleaved")
    assert torch.equal(turned, warploom.gemm(a, b, gate="silu"))


def test_the_host_is_timed_beside_torch_with_outputs_and_without() -> None:
    (case,) = gemm.host(Asked())
    cell = measured(case)
    names = [entry.contender for entry in cell.entries]
    assert names[:2] == ["warploom.gemm", "torch.mm"] and len(names) == 5


def test_the_kernels_compiled_are_those_of_every_type() -> None:
    found = {spec.operation for spec in gemm.shipped(Asked(m=(16,)))}
    assert found == set(TYPES.values())


def test_block_scaled_cases_are_right_by_scales_of_either_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    listed = {"weights": [(192, 256)], "m": [5, 129], "row_row": [(48, 192, 256)]}
    monkeypatch.setattr(_block_scaled, "_LISTED", listed)
    cases = [*_block_scaled.block_scaled(Asked())]
    kinds = [case.problem["type"] for case in cases]
    assert kinds == ["e4m3_block_few", "e4m3_block", "e4m3_block_row"]
    assert {*kinds} <= gemm.FAMILY.kinds.keys()
    for case in cases:
        entries = measured(case, "none").entries
        assert [one.contender for one in entries] == ["warploom", "warploom, scales along k"]
        assert all(one.error_share is not None and one.error_share <= 1 for one in entries)


def test_sampled_block_scaled_shapes_have_whole_blocks_of_k() -> None:
    found = [*_drawn.drawn(Asked(seed=7, count=4))]
    scaled = [case.problem for case in found if "block" in case.problem["type"]]
    assert [one["type"] for one in scaled] == ["e4m3_block"] * 4 + ["e4m3_block_row"] * 4
    assert all(one["k"] % 128 == 0 for one in scaled)
    operation, shape = _drawn.DRAWN["e4m3_block"], (3, 192, 256)
    names = [one.name for one in _drawn.contenders(operation, shape, Asked(device="cpu"))]
    assert names == ["warploom", "torch._scaled_mm", "deep_gemm"]
