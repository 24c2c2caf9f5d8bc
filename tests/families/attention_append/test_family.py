"""What the generator says of the family: rules, launches, text and registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
from precompiled import compiled_together

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families import family
from warploom.generator.families.attention_append import (
    AttentionAppendOperation,
    AttentionAppendProblem,
    AttentionAppendSchedule,
    AttentionAppendShape,
)
from warploom.generator.launches import NO_GPU, Address
from warploom.generator.model import rank
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch

FAMILY = family("attention_append")
PLAIN = AttentionAppendOperation("bf16", 128)
FULL = AttentionAppendOperation(
    *("bf16", 96, "e4m3", "token", "halves", "same"), queries=True, packed=True, paged=True
)
PROBLEM = AttentionAppendProblem(
    *(3, 8, 0, 6, 2, 0, 3, 4096, 1), *[(1 << 30, 1 << 20, 128)] * 4, positions=100, rotary=96
)


def spec(operation: AttentionAppendOperation = PLAIN, threads: int = 128) -> KernelSpec:
    return KernelSpec("sm_90a", operation, AttentionAppendSchedule(threads))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dim": 72}, "dim 72: must be a positive multiple of 16"),
        ({"dim": 528}, "dim 528: must be 16 to 512"),
        ({"element": "fp32"}, "must be one of fp16, bf16"),
        ({"scales": "head"}, "scales head of cache same: must be none"),
        ({"cache": "int8"}, "scales none of cache int8: must be head or token"),
        ({"queries": True}, "queries without rotary"),
        ({"table": "same"}, "table same without rotary"),
    ],
)
def test_what_is_not_legal_is_told(change: dict[str, object], said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        spec(replace(PLAIN, **change))  # type: ignore[arg-type]


def test_a_name_says_what_is_special() -> None:
    name = "bf16_d96_e4m3_scales_token_rotary_halves_table_same_queries_packed_paged_threads128_"
    assert spec(FULL).name.startswith(f"attention_append_sm90a_{name}")


@pytest.mark.parametrize(
    ("dim", "lanes"), [(16, 1), (32, 2), (80, 8), (96, 8), (128, 8), (512, 32)]
)
def test_a_row_is_shared_by_a_power_of_two_of_threads(dim: int, lanes: int) -> None:
    assert replace(PLAIN, dim=dim).lanes == lanes


@pytest.mark.parametrize("threads", [64, 128, 256, 512])
@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 0), (1, 8), (8, 32), (8, 64), (128, 128)])
def test_blocks_have_every_row_of_every_token_once(threads: int, kv_heads: int, heads: int) -> None:
    for operation in (PLAIN, FULL, replace(PLAIN, dim=16), replace(PLAIN, dim=512)):
        one = spec(operation, threads)
        (launch,) = FAMILY.launches(one, replace(PROBLEM, kv_heads=kv_heads, heads=heads), NO_GPU)
        rows, blocks = 2 * kv_heads + heads, int(launch.parameters["blocks"])  # type: ignore[call-overload]
        of_block = launch.block // operation.lanes
        assert launch.block <= threads and launch.block % 32 == 0
        assert (blocks - 1) * of_block < rows <= blocks * of_block
        assert launch.grid == 6 * blocks and launch.early


def test_few_rows_take_small_blocks() -> None:
    (launch,) = FAMILY.launches(spec(), replace(PROBLEM, kv_heads=1), NO_GPU)
    assert (launch.grid, launch.block) == (6, 32)


def tensors(operation: AttentionAppendOperation) -> list[str]:
    """Those that a launch is handed."""
    (launch,) = FAMILY.launches(spec(operation), PROBLEM, NO_GPU)
    return [one.tensor for one in launch.parameters.values() if isinstance(one, Address)]


def test_a_launch_has_the_tensors_that_its_operation_has() -> None:
    assert tensors(PLAIN) == ["k_cache", "v_cache", "k", "v", "lengths", "lengths_after"]
    assert {*tensors(FULL)} - {*tensors(PLAIN)} == {
        *("page_table", "cu_seqlens", "cos", "sin", "q", "out", "scale_k", "scale_v")
    }


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": 2**31},
        {"tokens": 2**28, "heads": 512},
        {"columns": 2**20, "page": 2**11},
        {"pages": 2**31},
        {"batch": 2**31 - 1},
        {"positions": 2**31},
    ],
    ids=str,
)
def test_what_takes_more_than_32_bits_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(ProblemError, match="must be smaller"):
        FAMILY.launches(spec(), replace(PROBLEM, **change), NO_GPU)


def test_a_kernel_has_what_its_operation_needs_alone() -> None:
    plain, full = render(spec()), render(spec(FULL))
    for text in ("turn(", "sequence_of", "__shfl", "page_table", "p.q", "coded(", "scale"):
        assert text not in plain and text in full


def test_kernels_that_need_most_registers_do_not_spill() -> None:
    interleaved = replace(FULL, dim=512, rotary="interleaved", table="fp32")
    listed = [spec(interleaved, 512), spec(replace(FULL, cache="int8", dim=256), 512)]
    for name, one in compiled_together(listed).items():
        assert name in one.resources
        assert all(entry.clean for entry in one.resources.values()), name


def test_every_operation_has_a_schedule() -> None:
    for operation in (PLAIN, FULL, replace(PLAIN, dim=16)):
        chosen = dispatch.choose(operation, AttentionAppendShape(1, 8, 32))
        assert chosen.spec.schedule == AttentionAppendSchedule(128)


def test_the_model_knows_that_memory_limits_many_tokens_and_a_launch_few() -> None:
    many = rank(None, [spec()], AttentionAppendShape(100_000, 8), 132)[0].seconds
    assert 1.5e-4 < many < 4e-4
    assert rank(None, [spec()], AttentionAppendShape(1, 8), 132)[0].seconds < 3e-6
