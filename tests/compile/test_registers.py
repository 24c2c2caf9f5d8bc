"""Schedules that are near what a thread may hold do not spill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from precompiled import reports

from warploom.generator.epilogue import (
    Bias,
    EpilogueStep,
    Gate,
    GateGradient,
    Preactivation,
    Residual,
    Scale,
    Scatter,
)
from warploom.generator.families import family
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.families.mixed_gemm import MixedGemmOperation
from warploom.generator.families.mixed_gemm.layout import mixed_gemm_layout
from warploom.generator.specification import KernelSpec

TWO: dict[str, Any] = {"warp_split_k": 2, "ctas_per_sm": 2}
# What has about as many registers as it may; each kind of loop.
NEAR: list[tuple[MixedGemmOperation, dict[str, Any]]] = [
    (
        MixedGemmOperation("bf16", "uint4", "bf16", 64, "bf16"),
        {"tile": (16, 128, 256), "multiply": "mma", "scaled": "sums", **TWO},
    ),
    (
        MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16"),
        {"tile": (16, 64, 256), "multiply": "mma", "scaled": "sums", "stream_k": True, **TWO},
    ),
    (
        MixedGemmOperation("fp16", "uint4", "bf16", 128, "fp32"),
        {
            "tile": (8, 256, 256),
            "multiply": "wgmma",
            "scaled": "weights",
            "ctas_per_sm": 2,
            "cluster_split_k": 8,
        },
    ),
    (
        MixedGemmOperation("e4m3", "uint4", "bf16", 64, "fp32"),
        {"tile": (128, 128, 128), "multiply": "wgmma", "scaled": "sums", "lookahead": 2},
    ),
    (
        MixedGemmOperation("e4m3", "int4", "bf16", 128, "bf16"),
        {"tile": (160, 128, 256), "multiply": "wgmma", "scaled": "sums", "lookahead": 2},
    ),
]

# Gates, and gradients of gates: each spilled before the rules counted its registers.
UNGATED = GateGradient("silu", "bf16")
GATES: list[tuple[tuple[EpilogueStep, ...], dict[str, Any]]] = [
    ((UNGATED,), {"kernel_schedule": "pingpong", "cluster": (2, 1)}),
    ((UNGATED,), {"tile": (128, 256, 64), "cluster": (2, 1)}),
    (
        (GateGradient("swiglu_oai", "bf16", "interleaved"),),
        {"kernel_schedule": "pingpong"},
    ),
    # A thread stores one row of each chunk.
    (
        (Bias("bf16"), Gate("silu"), Scale("row"), Scatter("int64")),
        {"tile": (256, 64, 64), "swap_ab": True, "kernel_schedule": "pingpong"},
    ),
    ((Scale("host"), UNGATED), {"tile": (256, 96, 64), "stream_k": True}),
    (
        (Gate("gelu", "interleaved"),),
        {"kernel_schedule": "pingpong", "batched": True, "a": "fp16"},
    ),
    (
        (Preactivation("bf16"), Gate("gelu", "interleaved")),
        {"tile": (128, 256, 64), "cluster": (2, 1)},
    ),
    (
        (Bias("bf16"), Gate("silu"), Scale("row"), Residual("bf16")),
        {"tile": (128, 256, 64), "stream_k": True, "groups": "rows"},
    ),
]


def gated(steps: tuple[EpilogueStep, ...], fields: dict[str, Any]) -> KernelSpec:
    fields = {"tile": (128, 128, 64), **fields}
    a, groups = fields.pop("a", "bf16"), fields.pop("groups", "none")
    batched = fields.pop("batched", groups != "none")
    operation = GemmOperation(a, a, a, "row", "col", steps, batched=batched, groups=groups)
    return KernelSpec("sm_90a", operation, family("gemm").complete("sm_90a", operation, fields))


def test_a_kernel_that_is_near_its_registers_does_not_spill(
    request: pytest.FixtureRequest,
) -> None:
    specs = [gated(*one) for one in GATES]
    for operation, fields in NEAR:
        schedule = family("mixed_gemm").complete("sm_90a", operation, fields)
        specs.append(KernelSpec("sm_90a", operation, schedule))
        layout = mixed_gemm_layout(operation, schedule)  # type: ignore[arg-type]
        assert layout.registers >= 0.85 * layout.register_budget
    renew = request.config.getoption("--update-golden")
    for report in reports(specs, Path(__file__).with_suffix(".json"), renew=renew).values():
        assert [one.spill_bytes for one in report.resources.values()] == [0]
        assert report.serialised == ()
