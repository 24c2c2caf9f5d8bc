"""Grouped GEMM with quantized weights on the CPU: results, errors, kernels, launches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from host import needs_compiler, run
from pretended_gpu import PretendedGpu, gpu
from torch.nn import functional

import warploom
from warploom.errors import ProblemError, SpecificationError
from warploom.generator.epilogue import Amax, Bias, Gate, RmsScale, Scale, StochasticRounding
from warploom.generator.families._product.groups import FEW_WAVES
from warploom.generator.families.mixed_gemm import (
    FAMILY,
    MixedGemmOperation,
    MixedGemmProblem,
    MixedGemmShape,
)
from warploom.generator.families.mixed_gemm.launch import launches, workspaces
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts
from warploom.runtime.dispatch import choose
from warploom.runtime.families.mixed_gemm.family import FAMILY as RUNTIME
from warploom.runtime.families.mixed_gemm.grouped_call import GroupedMixedCall

__all__ = ["gpu"]

BF16 = torch.bfloat16
ROWS, N, K = 37, 48, 160
ENDS = (5, 5, 20, 33)  # the second group is empty, and four rows have none


def offsets(*ends: int) -> torch.Tensor:
    return torch.tensor(ends, dtype=torch.int32)


def operands(format: str = "mxfp4", **options: Any) -> tuple[torch.Tensor, PackedExperts]:
    torch.manual_seed(0)
    a, w = torch.randn(ROWS, K).to(BF16), torch.randn(len(ENDS), N, K)
    a[ENDS[-1] :] = torch.nan
    return a, PackedExperts.quantize(w, format, **options)


def products(a: torch.Tensor, packed: PackedExperts) -> torch.Tensor:
    """The rows that have a group, by their weights, in float64."""
    weights, begin, found = packed.dequantize(torch.float64), 0, []
    for group, end in enumerate(ENDS):
        found.append(a[begin:end].double() @ weights[group].t())
        begin = end
    return torch.cat(found)


def group_of_rows() -> torch.Tensor:
    return torch.searchsorted(offsets(*ENDS), torch.arange(ENDS[-1], dtype=torch.int32), right=True)


def close(found: torch.Tensor, exact: torch.Tensor) -> bool:
    return bool((found.double() - exact).abs().max() <= 2**-7 * exact.abs().max() + 1e-3)


# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"format": "int4", "group": 32}, {"format": "uint4", "group": None}, {"format": "nvfp4"}],
    ids=str,
)
def test_rows_are_multiplied_by_the_weight_of_their_group(options: dict[str, Any]) -> None:
    a, packed = operands(**options)
    exact = products(a, packed)
    out = torch.full((ROWS, N), 7.0, dtype=BF16)
    for _ in range(3):  # the second and third are recognised
        assert warploom.grouped_mixed_gemm(a, packed, offs=offsets(*ENDS), out=out) is out
        assert close(out[: ENDS[-1]], exact) and (out[ENDS[-1] :] == 7).all()


def test_the_epilogue_is_that_of_the_group() -> None:
    a, packed = operands()
    x, group, last = products(a, packed), group_of_rows(), ENDS[-1]
    bias, row, scale = torch.randn(len(ENDS), N), torch.rand(ROWS), torch.rand(ROWS)
    biased = x + bias.double()[group]
    gate, up = biased[:, ::2].clamp(max=7), biased[:, 1::2].clamp(-7, 7)
    cases: list[tuple[dict[str, Any], torch.Tensor]] = [
        ({"bias": bias}, biased),
        ({"bias": bias[0], "activation": "relu"}, (x + bias[0]).relu()),
        ({"scale_a": scale}, scale[:last, None] * x),
        (
            {"bias": bias, "gate": "silu", "row_scale": row},
            functional.silu(biased[:, ::2]) * biased[:, 1::2] * row[:last, None],
        ),
        ({"bias": bias, "gate": "swiglu_oai"}, (up + 1) * gate * torch.sigmoid(1.702 * gate)),
        (
            {"bias": bias, "gate": "swiglu_oai", "gate_alpha": 1.0, "gate_limit": 0.5},
            (up.clamp(-0.5, 0.5) + 1) * gate.clamp(max=0.5) * gate.clamp(max=0.5).sigmoid(),
        ),
    ]
    for keywords, exact in cases:
        d = warploom.grouped_mixed_gemm(a, packed, offs=offsets(*ENDS), **keywords)
        assert d.shape == (ROWS, exact.shape[1])
        assert close(d[:last], exact), keywords.keys()


def test_a_compiler_sees_one_operator() -> None:
    a, packed = operands()
    a = a.nan_to_num()

    def call(a: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return warploom.grouped_mixed_gemm(a, packed, offs=ends, gate="silu")

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    found, wanted = (one(a, offsets(*ENDS))[: ENDS[-1]] for one in (compiled, call))
    assert torch.equal(found, wanted)


def test_no_rows_and_no_groups_give_nothing() -> None:
    _, packed = operands()
    none = warploom.grouped_mixed_gemm(
        torch.ones(0, K, dtype=BF16), packed, offs=offsets(0, 0, 0, 0)
    )
    assert none.shape == (0, N)


# ---- Bad calls -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offs": offsets(5, 5, 20, 38)}, "to at most 37"),
        ({"offs": offsets(5, 5, 20)}, "must be one for each group"),
        ({"a": torch.ones(ROWS, 64, dtype=BF16)}, "K being the weight's 160"),
        ({"a": torch.ones(ROWS, K)}, "element types of a"),
        ({"a": torch.ones(ROWS, K, dtype=torch.int8)}, "must be packed for"),
        ({"a": torch.ones(2, ROWS, K, dtype=BF16)}, r"must be \[S, K\]"),
        ({"a": torch.ones(ROWS, K, dtype=BF16, requires_grad=True)}, "have no gradient"),
        ({"weight": torch.ones(4, N, K)}, "must be PackedExperts"),
        ({"bias": torch.ones(3, N)}, "bias"),
        ({"row_scale": torch.ones(3)}, "row_scale"),
        ({"bias": torch.ones(4, 1, N)}, r"bias \[4, 1, 48\] .* use bias.flatten"),
        ({"row_scale": torch.ones(4, ROWS)}, r"row_scale \[4, 37\] .* must have 37 elements"),
        ({"scale_a": torch.ones(4, ROWS)}, r"scale_a \[4, 37\] .* must have 37 elements"),
        ({"gate": "tanh"}, "must be one of"),
        ({"activation": ["relu"]}, "activation .*must be one of"),
        ({"gate": "silu", "activation": "relu"}, "must be one of them"),
        ({"out": torch.zeros(ROWS, N + 1, dtype=BF16)}, "out"),
    ],
    ids=str,
)
def test_bad_calls_are_refused(change: dict[str, Any], told: str) -> None:
    a, packed = operands()
    call = {"a": a, "weight": packed, "offs": offsets(*ENDS), **change}
    with pytest.raises(ProblemError, match=told):
        warploom.grouped_mixed_gemm(call.pop("a"), call.pop("weight"), **call)


def test_a_kernel_without_groups_is_refused() -> None:
    a, packed = operands()
    plain = MixedGemmOperation("bf16", "mxfp4", "bf16", 32, "e8m0")
    with pytest.raises(ProblemError, match="with groups rows"):
        warploom.grouped_mixed_gemm(a, packed, offs=offsets(*ENDS), spec=spec_of(plain))


# ---- Kernels and launches ------------------------------------------------------------------------


def spec_of(operation: MixedGemmOperation, **fields: Any) -> KernelSpec:
    fields = {"multiply": "mma", "scaled": "weights", "consumers": 1, **fields}
    fields = {"tile": (8, 64, 128), **fields}
    return KernelSpec("sm_90a", operation, FAMILY.complete("sm_90a", operation, fields))


def grouped(*epilogue: Any, **fields: Any) -> MixedGemmOperation:
    return MixedGemmOperation(
        "bf16", "mxfp4", "bf16", 32, "e8m0", epilogue, **{"groups": "rows", **fields}
    )


def test_illegal_kernels_say_why() -> None:
    for step, told in (
        (Amax(), "without outputs beside D"),
        (RmsScale(), "without norms"),
        (StochasticRounding(), "without outputs beside D"),
        (Gate("silu"), "interleaved"),
    ):
        with pytest.raises(SpecificationError, match=told):
            spec_of(grouped(step))
    for change in ({"cluster_split_k": 2}, {"store": "tma", "tile": (16, 64, 128)}):
        with pytest.raises(SpecificationError, match="must be 1 and direct"):
            spec_of(grouped(), **change)


@pytest.mark.parametrize("kind", [("bf16", "mxfp4"), ("bf16", "int4"), ("e4m3", "int4")], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 20, 50, 300])
def test_every_number_of_rows_has_a_kernel(rows: int, kind: tuple[Any, Any]) -> None:
    group, scale = (32, "e8m0") if kind[1] == "mxfp4" else (64, "bf16")
    for steps in ((), (Bias("bf16"), Gate("swiglu_oai", "interleaved"))):
        operation = MixedGemmOperation(*kind, "bf16", group, scale, steps, groups="rows")  # type: ignore[arg-type]
        shape = MixedGemmShape(rows, 5760, 2880, 128)
        schedule: Any = choose(operation, shape, device=NO_GPU, requires="direct").spec.schedule
        assert schedule.store == "direct" and schedule.cluster_split_k == 1


def test_the_grid_is_the_same_whatever_the_offsets_are() -> None:
    """A captured graph replays it: each group may have one tile that is not full."""
    problem = MixedGemmProblem(20, 128, 256, 256, 128, batches=3)
    (launch,) = launches(spec_of(grouped()), problem, DeviceLimits(10_000))
    assert launch.grid == (3 + 3 - 1) * 2
    assert "a_tail_map" not in launch.parameters and "cut" not in launch.parameters
    spec = spec_of(grouped(), stream_k=True)
    (launch,) = launches(spec, problem, DeviceLimits(132))
    assert launch.grid == 10 * 2  # each k tile
    assert launch.parameters["few_tiles"] == FEW_WAVES * launch.grid
    sizes = {one.tensor: one.bytes for one in workspaces(spec, problem)}
    assert sizes["parts"] >= launch.grid * 4 * 8 * 64
    with pytest.raises(ProblemError, match="at most 1024"):
        launches(spec, MixedGemmProblem(20, 128, 256, 256, 128, batches=1025), DeviceLimits(132))


_HARNESS = Path(__file__).with_name("grouped_walk.cpp")


@needs_compiler
def test_all_k_tiles_of_all_tiles_are_walked_once(tmp_path: Path) -> None:
    """A cluster that waits for one that has no part of its tile would wait for ever."""
    source = render(spec_of(grouped(), stream_k=True))
    parts = re.findall(r"^struct (?:Unit|Walk) \{.*?^\};", source, re.M | re.S)
    assert len(parts) == 2
    constants = (
        "#define __device__\n#define __forceinline__ inline\nusing std::max; using std::min;\n"
    )
    constants += "struct Parameters { int few_tiles; };\n"
    run("\n".join((constants, *parts, f'#line 1 "{_HARNESS}"', _HARNESS.read_text())), tmp_path)


def test_samples_are_calls_of_their_operation() -> None:
    """What the tuner times is drawn here, and held against float64."""
    operation = grouped(Bias("bf16"), Gate("silu", "interleaved"), Scale("row"))
    shape = MixedGemmShape(5, 64, 128, 4)
    assert str(shape) == "4 of 5x64x128" and FAMILY.parse_shape(operation, "4x5x64x128") == shape
    trial = RUNTIME.trial(operation, shape, "cpu", 0)
    (call,) = RUNTIME.calls(operation, shape)
    assert isinstance(call, GroupedMixedCall)
    assert call.draft(NO_GPU).choice.spec.operation == operation
    assert trial.error_share(choose(operation, shape, device=NO_GPU, requires="direct").spec) <= 1


def test_kernels_are_handed_every_tensor_by_its_place_in_the_epilogue(gpu: PretendedGpu) -> None:
    """A bias in the place of a scale would be seen on a GPU alone; nothing is copied."""
    a, packed = operands(format="uint4", group=None)
    ends, bias, row = offsets(*ENDS), torch.ones(len(ENDS), N, dtype=BF16), torch.ones(ROWS)
    before = warploom.counters.copies
    for _ in range(3):
        d = warploom.grouped_mixed_gemm(
            a, packed, offs=ends, bias=bias, gate="silu", row_scale=row, scale_a=row
        )
    assert warploom.counters.copies == before
    given = {"a": a, "b": packed.slabs, "offsets": ends, "bias_1": bias, "scale_0": row}
    given |= {"scale_3": row, "channel_scales": packed.channel_scales}
    given |= {"channel_zeros": packed.channel_zeros}
    for launch in gpu.launches:
        assert {name: launch[name] for name in given} == {
            name: one.data_ptr() for name, one in given.items()
        }
    assert gpu.launches[-1]["d"] == d.data_ptr()
