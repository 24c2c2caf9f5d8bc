"""The products that are measured: which, and that ours and the peer's compute one function."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samplers import constant

import warploom
from benchmarks import gemm, operations
from benchmarks.cells import batched, cells, trained
from benchmarks.peers import KINDS, operands, ours, peer
from benchmarks.protocol import Contender, compete
from warploom.generator.families.gemm import Accumulation
from warploom.runtime.families.gemm import reference
from warploom.runtime.measure import error_share

PROBLEM = {"type": "bf16", "m": 48, "n": 80, "k": 96}


def test_the_cells_are_those_of_the_list() -> None:
    assert cells("squares")[0] == (8192, 8192, 8192)
    assert len(cells("squares")) == 5
    assert len(cells("llm")) == 10 * 18
    assert cells("llm", [16])[1] == (16, 4096, 4096)
    assert cells("squares", [2048]) == [(2048, 4096, 4096)]
    assert trained() == (4096, 14336, 4096)
    assert batched()[-1] == (32, (1, 4096, 4096))


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


@pytest.mark.parametrize("kind", KINDS)
def test_peer_and_warploom_compute_one_function(kind: str, any_cpu: None) -> None:
    torch.manual_seed(0)
    sets = [operands(KINDS[kind], 48, 80, 96, "cpu") for _ in range(2)]
    contenders = [ours(KINDS[kind], sets), peer(KINDS[kind], sets)]
    found = compete(kind, PROBLEM, contenders, sampler=constant(1e-5))
    for entry in found.entries:
        assert entry.absent is None
        assert entry.error_share is not None
        assert entry.error_share <= 1
    assert str(found.entries[0].kernel).startswith(f"gemm_sm90a_{KINDS[kind].a}")


def test_the_operation_of_a_kind_is_the_one_that_its_call_gets() -> None:
    for kind in KINDS.values():
        contender = ours(kind, [operands(kind, 1, 80, 96, "cpu")])
        assert contender.kernel is not None
        assert "_".join(kind.operation().tokens) in contender.kernel()


def test_an_output_that_nothing_wrote_is_wrong() -> None:
    kind = KINDS["bf16"]
    contender = ours(kind, [operands(kind, 32, 32, 64, "cpu")])
    assert contender.error_share is not None
    assert contender.error_share() == float("inf")


def test_one_wrong_element_is_wrong() -> None:
    one = operands(KINDS["int8"], 32, 32, 64, "cpu")
    d = warploom.gemm(one.a, one.b)
    assert error_share(d, one.a, one.b) == 0
    d[3, 5] += 1
    assert error_share(d, one.a, one.b) == float("inf")


@pytest.mark.parametrize(("accumulation", "right"), [("fast", True), ("promoted", False)])
def test_promoted_sums_may_err_less_than_fast_ones(
    accumulation: Accumulation, right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of a quarter of the fast bound: at k = 4096 that is 6 times the promoted one."""
    gemm = warploom.gemm

    def rough(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, **keywords: Any) -> None:
        exact, bound = reference.gemm_bound(a, b, keywords["epilogue"], torch.float32)
        gemm(a, b, out=out, **keywords)
        out[3, 5] = exact[3, 5] + bound[3, 5] / 4

    monkeypatch.setattr(warploom, "gemm", rough)
    torch.manual_seed(0)
    kind = replace(KINDS["e4m3"], d="fp32")
    sets = [operands(kind, 16, 32, 4096, "cpu") for _ in range(2)]
    contender = ours(kind, sets, accumulation=accumulation)
    for call in contender.calls:
        call()
    assert contender.error_share is not None
    assert (contender.error_share() <= 1) == right


def test_a_contender_that_refuses_is_absent_with_its_reason_and_the_others_run() -> None:
    def refuse() -> None:
        raise RuntimeError("self.size(0) needs to be greater than 16\nand more lines")

    contenders = [Contender("warploom", [lambda: None]), Contender("torch._int_mm", [refuse])]
    found = compete("cell", PROBLEM, contenders, sampler=constant(1e-5))
    assert found.entries[0].seconds == 1e-5
    assert found.entries[1].absent == "self.size(0) needs to be greater than 16"
    assert found.verdict == "absent"


def test_the_fused_cell_is_checked_and_compares_fused_with_plain() -> None:
    found = gemm.fused((32, 48, 64), "cpu", constant(1e-5))
    assert [entry.contender for entry in found.entries] == ["fused", "plain", "torch.mm"]
    assert all(0 < (entry.error_share or 0) <= 1 for entry in found.entries)
    assert found.ratio == 1.0


def test_each_wider_operation_is_checked_beside_what_it_would_replace() -> None:
    small: dict[str, Any] = {"device": "cpu", "sampler": constant(1e-5)}
    shape = (32, 48, 64)
    measured = [
        operations.promoted((32, 48, 256), **small),
        operations.quantised("bf16", shape, **small),
        operations.quantised("e4m3", shape, **small),
        operations.batched(3, shape, **small),
        operations.in_place(shape, **small),
    ]
    for cell in measured:
        assert [entry.absent for entry in cell.entries] == [None, None]
        assert all(0 < (entry.error_share or 0) <= 1 for entry in cell.entries), cell.name
        assert cell.ratio == 1.0


def test_the_kernels_compiled_are_the_shipped_ones_each_once() -> None:
    specs = gemm.shipped()
    assert len(set(specs)) == len(specs) > 20
    assert {spec.operation for spec in specs} >= {kind.operation() for kind in KINDS.values()}


def test_compile_times_stand_beside_the_baseline_of_the_same_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gemm, "_compilation", lambda name, _source: lambda: 1.0 if name == "draft" else 1.25
    )
    baseline = tmp_path / "draft.cu"
    baseline.write_text("")
    (spec, *_) = gemm.shipped()
    (found,) = gemm.compiling([spec], baseline)
    assert [entry.contender for entry in found.entries] == ["warploom", "draft.cu"]
    assert found.entries[0].kernel == spec.name
    assert found.ratio == 0.8
    assert gemm.compiling([spec], None)[0].verdict == "absent"
