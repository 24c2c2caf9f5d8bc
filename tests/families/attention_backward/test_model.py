"""The backward pass's model: its arithmetic holds for what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_backward.model import START, Blocks, seconds


def time(
    shape: AttentionShape, mask: str = "none", dim: int = 128, count: int = 132, **fields: object
) -> float:
    operation = AttentionBackwardOperation("bf16", dim, mask)  # type: ignore[arg-type]
    given = {"q_tile": 64, "kv_tile": 128, "overlap": False, **fields}
    schedule = AttentionBackwardSchedule(**given)  # type: ignore[arg-type]
    return seconds(START, operation, schedule, shape, count)


def square(seq: int, dim: int = 128) -> AttentionShape:
    """A cell of benchmarks/cells.yaml: 16k tokens, hidden 2048."""
    return AttentionShape(16384 // seq, 2048 // dim, 2048 // dim, seq, seq, dim)


@pytest.mark.parametrize(
    ("fields", "shape", "count", "longest", "mean"),
    [
        ({}, square(512), 4 * 16 * 32, 8, 8),
        ({}, replace(square(512), seq_q=513), 4 * 16 * 32, 9, 9),  # one row more is a step more
        ({"mask": "causal"}, square(1024), 8 * 16 * 16, 16, 9),  # of 1024 rows 576 on the mean
        ({"mask": "window"}, replace(square(16384), window=1024), 128 * 16, 18, 18),
        # A half to either side hides two corners of a quarter: 24 of 32 tiles on the mean.
        ({"mask": "window"}, replace(square(2048), window=2049), 8 * 16 * 16, 32, 24),
        ({}, AttentionShape(1, 64, 8, 1024, 1024, 128), 8 * 8, 8 * 16, 8 * 16),  # 8 heads share
        ({"dim": 256}, square(512, 256), 4 * 8 * 32 * 2, 8, 8),  # two blocks for a tile
    ],
)
def test_blocks_and_their_steps_are_those_of_the_kernels(
    fields: dict[str, object], shape: AttentionShape, count: int, longest: float, mean: float
) -> None:
    operation = AttentionBackwardOperation(**{"element": "bf16", "dim": 128, **fields})  # type: ignore[arg-type]
    parts = 1 if operation.dim <= 128 else 2
    found = Blocks.of(operation, AttentionBackwardSchedule(64, 128), shape, parts)
    assert found == Blocks(count, longest, mean)


# Milliseconds of the three launches on an H200, head dimension 128, 64x128 without overlap.
MEASURED = {
    ("none", 512): 0.504,
    ("none", 2048): 1.453,
    ("none", 16384): 10.124,
    ("causal", 512): 0.385,
    ("causal", 2048): 0.826,
    ("causal", 16384): 5.100,
}


@pytest.mark.parametrize(("mask", "seq"), MEASURED)
def test_the_start_is_near_what_was_measured(mask: str, seq: int) -> None:
    assert time(square(seq), mask) * 1e3 == pytest.approx(MEASURED[mask, seq], rel=0.08)


def test_tall_tiles_of_q_take_less_shared_memory_and_pay_where_sequences_are_long() -> None:
    assert time(square(16384), q_tile=80) < 0.97 * time(square(16384))
    assert time(square(512), q_tile=80) > time(square(512))  # 512 is no multiple of 80


def test_wide_heads_take_seven_products_and_twice_the_blocks() -> None:
    # Half the heads of twice the dimension: as many flops of five products, but seven are computed.
    narrow, wide = (time(square(8192, dim), dim=dim) for dim in (128, 256))
    assert 1.2 < wide / narrow < 1.6


def test_rows_cost_their_bytes_before_and_after() -> None:
    free = {**START, "hbm_bandwidth": 1e18}
    operation, schedule = (
        AttentionBackwardOperation("bf16", 128),
        AttentionBackwardSchedule(64, 128),
    )
    cost = seconds(START, operation, schedule, square(512), 132)
    cost -= seconds(free, operation, schedule, square(512), 132)
    elements = 16384 * 2048
    assert cost * START["hbm_bandwidth"] == pytest.approx(elements * (2 + 2 + 4 + 4 + 2), rel=1e-4)


def test_one_stage_one_warpgroup_and_a_fixed_order_cost() -> None:
    plain = time(square(4096))
    assert time(square(4096), stages=1) > 1.1 * plain
    assert time(square(4096), kv_tile=64) > 1.1 * plain
    ordered = AttentionBackwardOperation("bf16", 128, deterministic=True)
    schedule = AttentionBackwardSchedule(64, 128, overlap=False)
    assert seconds(START, ordered, schedule, square(4096), 132) > plain


def test_a_cluster_shares_out_heads_and_pays_for_the_sums() -> None:
    grouped = AttentionShape(1, 64, 8, 2048, 2048, 128)  # 128 blocks, of 8 heads each

    def blocks(cluster: int) -> Blocks:
        schedule = AttentionBackwardSchedule(64, 128, cluster=cluster)  # type: ignore[arg-type]
        return Blocks.of(AttentionBackwardOperation("bf16", 128), schedule, grouped, 1)

    assert blocks(1) == Blocks(128, 8 * 32, 8 * 32)
    assert blocks(4) == Blocks(4 * 128, 2 * 32, 2 * 32)
    # Under a mask short blocks wait for the longest, which a cluster makes a quarter as long.
    assert time(grouped, "causal", cluster=4) < 0.9 * time(grouped, "causal")
    # Where heads are alone, the other blocks of a cluster have nothing to do.
    assert time(square(4096), cluster=4) > 2 * time(square(4096))
    # What fills the GPU without clusters gains nothing, and pays.
    full = AttentionShape(16, 64, 8, 4096, 4096, 128)
    assert 1 < time(full, count=128, cluster=2) / time(full, count=128) < 1.1


def test_few_blocks_take_as_long_as_the_longest() -> None:
    one = AttentionShape(1, 8, 8, 1024, 1024, 128)  # 64 blocks on 132 multiprocessors
    assert time(one, "causal") == time(one, "causal", count=264)
    assert time(replace(one, seq_q=0)) == START["launch"]


def test_packed_gradients_count_their_rows_and_not_the_longest_of_all() -> None:
    packed = AttentionShape(32, 16, 16, 8192, 8192, 128, total_q=32768, total_k=32768)
    operation = AttentionBackwardOperation("bf16", 128, "causal", lengths="packed")
    found = seconds(START, operation, AttentionBackwardSchedule(64, 128), packed, 132)
    assert found < 0.1 * time(AttentionShape(32, 16, 16, 8192, 8192, 128), "causal")
