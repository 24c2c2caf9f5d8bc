"""What the model counts of packed sequences, whose lengths nobody reads."""

from __future__ import annotations

import pytest

from warploom.generator.families import family
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation, AttentionSchedule
from warploom.generator.families.attention_forward.work import work_of

PACKED = AttentionOperation(element="bf16", dim=128, lengths="packed")
EQUAL = AttentionShape(4, 8, 8, 1024, 1024, 128, total_q=4096, total_k=4096)
UNLIKE = AttentionShape(10, 7, 7, 7035, 7035, 128, total_q=15063, total_k=15063)


def schedule(**fields: object) -> AttentionSchedule:
    return AttentionSchedule(**{"q_tile": 128, "kv_tile": 128, **fields})  # type: ignore[arg-type]


def test_equal_sequences_take_the_steps_of_fixed_lengths() -> None:
    assert work_of(PACKED, schedule(), EQUAL).mean == pytest.approx(1024 / 128 + 0.5)


def test_most_tiles_are_of_the_longest_sequences() -> None:
    # Guards against the mean length of the sequences, 12 steps: the kernel took twice as long.
    assert work_of(PACKED, schedule(), UNLIKE).mean > 2 * UNLIKE.total_k / 10 / 128


def test_sequences_shorter_than_a_tile_have_one_each() -> None:
    short = AttentionShape(40, 1, 1, 20, 20, 128, total_q=600, total_k=600)
    assert work_of(PACKED, schedule(), short).tiles == 40


def test_unlike_tiles_dealt_in_advance_wait_for_who_gets_the_longest() -> None:
    seconds, start = family("attention_forward").seconds, family("attention_forward").constants
    static, dynamic = (
        seconds(start, PACKED, schedule(scheduler=one), UNLIKE, 132)
        for one in ("static", "dynamic")
    )
    assert static > 1.1 * dynamic
