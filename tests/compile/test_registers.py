"""Schedules of packed products that are near what a thread may hold do not spill."""

from __future__ import annotations

from typing import Any

import pytest
from precompiled import compiled

from warploom.generator.families import family
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


@pytest.mark.parametrize(("operation", "fields"), NEAR)
def test_a_kernel_that_is_near_its_registers_does_not_spill(
    operation: MixedGemmOperation, fields: dict[str, Any]
) -> None:
    schedule = family("mixed_gemm").complete("sm_90a", operation, fields)
    spec = KernelSpec("sm_90a", operation, schedule)
    layout = mixed_gemm_layout(operation, schedule)  # type: ignore[arg-type]
    assert layout.registers >= 0.85 * layout.register_budget
    artifact = compiled(spec)
    assert [one.spill_bytes for one in artifact.resources.values()] == [0]
    assert artifact.serialised == ()
