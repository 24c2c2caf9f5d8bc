"""Attention's rules, layout, names and launches: what a kernel is told about a problem."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import pytest

from warploom.errors import SpecificationError, UnknownNameError
from warploom.generator.architectures import architecture
from warploom.generator.families import family
from warploom.generator.families._attention import DIMS, UNBOUNDED
from warploom.generator.families.attention_forward import (
    AttentionOperation,
    AttentionProblem,
    AttentionSchedule,
    attention_layout,
)
from warploom.generator.families.attention_forward.launch import section_of
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.tensor_maps import TensorMap

FAMILY = family("attention_forward")
ARCH = architecture("sm_90a")
OPERATION = AttentionOperation("bf16", 128)
SCHEDULE = AttentionSchedule(128, 128)
DEVICE = DeviceLimits(132)


def spec(
    operation: AttentionOperation = OPERATION, schedule: AttentionSchedule = SCHEDULE
) -> KernelSpec:
    return KernelSpec("sm_90a", operation, schedule)


def problem(**changes: Any) -> AttentionProblem:
    """[3, 8, 300, 128] by [3, 2, 500, 128], in memory [batch, seq, heads, dim]."""
    q, k = (300 * 8 * 128, 128, 8 * 128), (500 * 2 * 128, 128, 2 * 128)
    return replace(AttentionProblem(3, 8, 2, 300, 500, 128, 300, 500, q, k, k, q), **changes)


def packed(**changes: Any) -> AttentionProblem:
    """Three sequences of up to 300 rows and 500 columns; 700 and 1100 in all."""
    q, k = (0, 128, 8 * 128), (0, 128, 2 * 128)
    return replace(AttentionProblem(3, 8, 2, 300, 500, 128, 700, 1100, q, k, k, q), **changes)


def scheduled(scheduler: str) -> AttentionSchedule:
    return replace(SCHEDULE, scheduler=scheduler)  # type: ignore[arg-type]


def launch(kernel: KernelSpec, told: AttentionProblem) -> Launch:
    (only,) = FAMILY.launches(kernel, told, DEVICE)
    return only


# ---- Rules ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "reason"),
    [
        ({"q_tile": 96}, "q_tile 96: must be one of 64, 128, 192"),
        ({"kv_tile": 100}, "kv_tile 100: must be a positive multiple of 16"),
        ({"kv_tile": 0}, "kv_tile 0: must be a positive multiple of 16"),
        ({"kv_tile": 272}, "kv_tile 272: must be what wgmma takes: multiples of 8, at most 256"),
        ({"stages": 0}, "stages 0: must be 1 to 8"),
        ({"stages": 9}, "stages 9: must be 1 to 8"),
        ({"stages": 1}, "stages 1 with overlap: the next k arrives under the products of this v"),
        ({"q_tile": 64}, "pingpong with q_tile 64: takes two warpgroups"),
        ({"q_tile": 192}, "188 registers expected, 160 to have"),
        ({"kv_tile": 256, "stages": 1, "overlap": False}, "284 registers expected, 240 to have"),
        ({"stages": 4}, "shared memory 295936 bytes: sm_90a gives a block 232448"),
        ({"scheduler": "greedy"}, "scheduler 'greedy': must be one of single, static, dynamic"),
    ],
)  # fmt: skip
def test_a_schedule_that_breaks_one_rule_is_told_that_rule(
    schedule: dict[str, Any], reason: str
) -> None:
    (found,) = FAMILY.reasons(ARCH, OPERATION, replace(SCHEDULE, **schedule))
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("operation", "reason"),
    [
        ({"element": "fp32"}, "element 'fp32': must be one of fp16, bf16"),
        ({"dim": 80}, "dim 80: must be one of 32, 64, 96, 128, 192, 256"),
        ({"mask": "alibi"}, "mask 'alibi': must be one of none, causal, window"),
        ({"lengths": "ragged"}, "lengths 'ragged': must be one of fixed, packed"),
        ({"softcap": 30.0}, "softcap 30.0: must be one of False, True"),
    ],
)
def test_an_operation_that_is_not_legal_says_why(operation: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecificationError, match=re.escape(reason)):
        spec(replace(OPERATION, **operation))


def test_shared_memory_is_the_stages_and_q_twice_where_there_is_room() -> None:
    q, kv = 64 * 128 * 2, 128 * 128 * 2
    twice = attention_layout(ARCH, OPERATION, SCHEDULE)
    assert (twice.q_bytes, twice.kv_bytes, twice.q_stages) == (q, kv, 2)
    assert twice.shared_bytes == 2 * 2 * q + 2 * 2 * kv + 1024
    wide = attention_layout(ARCH, OPERATION, replace(SCHEDULE, kv_tile=176))
    assert wide.q_stages == 1
    assert wide.shared_bytes == 2 * q + 2 * 2 * 176 * 128 * 2 + 1024


def test_words_of_dropout_have_one_stage_where_two_do_not_fit() -> None:
    dropped = replace(OPERATION, dropout=True)
    twice, once = (
        attention_layout(ARCH, dropped, replace(SCHEDULE, q_tile=128, kv_tile=128, stages=stages))
        for stages in (2, 3)
    )
    assert (twice.word_stages, twice.words_bytes) == (2, 2 * 128 * 128 // 8)
    assert (once.word_stages, once.words_bytes) == (1, 128 * 128 // 8)
    assert once.shared_bytes <= ARCH.shared_bytes < once.shared_bytes + once.words_bytes


@pytest.mark.parametrize(
    ("dim", "span", "boxes"),
    [(32, 64, 1), (64, 128, 1), (96, 64, 3), (128, 128, 2), (192, 128, 3), (256, 128, 4)],
)
def test_boxes_of_the_widest_span_cover_the_head_dimension(dim: int, span: int, boxes: int) -> None:
    operation = replace(OPERATION, dim=dim)  # type: ignore[arg-type]
    layout = attention_layout(ARCH, operation, AttentionSchedule(64, 16, pingpong=False))
    assert (layout.span, layout.boxes) == (span, boxes)
    assert layout.box_columns * layout.boxes == dim


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("q_tile", [64, 128, 192])
def test_registers_are_shared_out_within_what_the_launch_allocates(
    q_tile: int, lengths: str
) -> None:
    operation = replace(OPERATION, dim=64, lengths=lengths)  # type: ignore[arg-type]
    schedule = AttentionSchedule(q_tile, 64, pingpong=False)  # type: ignore[arg-type]
    layout = attention_layout(ARCH, operation, schedule)
    warpgroups = schedule.warpgroups
    allocated = {1: 256, 2: 168, 3: 128}[warpgroups] * (1 + warpgroups)
    consumers = warpgroups * layout.register_budget
    if layout.producer_registers:
        assert layout.producer_registers % 8 == layout.register_budget % 8 == 0
        assert layout.producer_registers >= 24
        assert layout.producer_registers + consumers <= allocated


# ---- Names ---------------------------------------------------------------------------------------


def test_a_name_has_every_field_that_is_not_usual_and_parses_back() -> None:
    operation = AttentionOperation("fp16", 96, "window", softcap=True, lengths="packed")
    kernel = spec(operation, AttentionSchedule(64, 48, 3, False, False, "dynamic"))
    assert kernel.name.startswith(
        "attention_forward_sm90a_fp16_dim96_window_softcap_packed_64x48_stages3_dynamic_"
    )
    assert parse_name(kernel.name) == kernel
    assert spec().name.startswith("attention_forward_sm90a_bf16_dim128_128x128_overlap_pingpong_")
    with pytest.raises(UnknownNameError, match="its digest is"):
        parse_name(spec().name[:-8] + "00000000")


# ---- Launches ------------------------------------------------------------------------------------


def test_fixed_lengths_are_mapped_in_place_by_their_strides() -> None:
    values = launch(spec(), problem()).parameters
    q, k = values["q_map"], values["k_map"]
    assert isinstance(q, TensorMap)
    assert isinstance(k, TensorMap)
    assert (q.extents, q.box) == ((128, 300, 8, 3), (64, 64, 1, 1))
    assert q.pitches == (8 * 128 * 2, 128 * 2, 300 * 8 * 128 * 2)
    assert (k.extents, k.box) == ((128, 500, 2, 3), (64, 128, 1, 1))
    assert (values["heads"], values["seq_q"], values["seq_k"]) == (8, 300, 500)
    assert (values["q_tiles"], values["tiles"], values["sharing"]) == (3, 3 * 8 * 3, 4)


def test_each_tensor_is_read_by_its_own_strides() -> None:
    """k and v come as parts of one projection, or k from a cache, and need not lie alike."""
    own = {name: (8 * i, 16 * i, 32 * i) for i, name in enumerate("qkv", start=1)}
    told = problem(**{f"strides_{name}": strides for name, strides in own.items()})
    for name, (batch, head, seq) in own.items():
        found = launch(spec(), told).parameters[f"{name}_map"]
        assert isinstance(found, TensorMap)
        assert (found.tensor, found.pitches) == (name, (2 * seq, 2 * head, 2 * batch))


def test_a_packed_map_ends_every_box_where_its_sequence_does() -> None:
    kernel = spec(replace(OPERATION, lengths="packed"))
    values = launch(kernel, packed()).parameters
    for name, rows, total, heads in (("q", 64, 700, 8), ("k", 128, 1100, 2)):
        found = values[f"{name}_map"]
        assert isinstance(found, TensorMap)
        pitch = heads * 128 * 2
        back = 2**30
        assert found.extents == (128, rows, heads, back - rows + total + 1, back + 1)
        assert found.pitches == (pitch, 128 * 2, pitch, 2**34 - pitch)
        # The kernel asks for these coordinates: addresses wrap, and the row lies there.
        for row, count in ((0, rows), (total - 5, 5)):
            first = back - rows + row + count
            steps = zip((rows - count, 0, first, back), found.pitches, strict=True)
            assert sum(step * apart for step, apart in steps) % 2**64 == row * pitch
            assert first < found.extents[3]
    assert values["cu_seqlens_q"] == Address("cu_seqlens_q")
    assert (values["batch"], values["total_q"], values["all_heads"]) == (3, 700, 8)


def test_packed_tiles_are_enough_for_any_lengths() -> None:
    kernel = spec(replace(OPERATION, lengths="packed"))
    per_head = launch(kernel, packed()).parameters["q_tiles"]
    for lengths in ((300, 300, 100), (1, 299, 300), (129, 257, 256), (0, 0, 0)):
        needed = sum(-(-length // 128) for length in lengths)
        assert isinstance(per_head, int)
        assert needed <= per_head


@pytest.mark.parametrize(("scheduler", "grid"), [("single", 72), ("static", 72), ("dynamic", 72)])
def test_a_small_grid_has_a_block_for_every_tile(scheduler: str, grid: int) -> None:
    found = launch(spec(schedule=scheduled(scheduler)), problem())
    assert (found.grid, found.block, found.cluster, found.early) == (grid, 384, 1, True)


def test_persistent_blocks_are_as_many_as_multiprocessors() -> None:
    many = problem(batch=30)
    assert launch(spec(), many).grid == 132
    assert launch(spec(schedule=scheduled("single")), many).grid == 720


def test_only_a_dynamic_scheduler_has_a_counter() -> None:
    for scheduler, tensors in (("single", []), ("static", []), ("dynamic", ["counter"])):
        kernel = spec(schedule=scheduled(scheduler))
        found = FAMILY.workspaces(kernel, problem())
        assert [workspace.tensor for workspace in found] == tensors
        assert all(workspace.kept for workspace in found)  # no memset before a launch
        assert ("counter" in launch(kernel, problem()).parameters) == bool(tensors)


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("softcap", [False, True])
def test_a_launch_has_exactly_the_values_of_the_parameter_block(
    softcap: bool, mask: str, lengths: str
) -> None:
    fields: dict[str, Any] = {"mask": mask, "softcap": softcap, "lengths": lengths}
    kernel = spec(replace(OPERATION, **fields), replace(SCHEDULE, kv_tile=96, scheduler="dynamic"))
    told = packed(left=70, right=5, bottom_right=True) if lengths == "packed" else problem(right=5)
    values = launch(kernel, told).parameters
    block = FAMILY.parameters(kernel)
    assert set(values) == {field.name for field in block.fields}
    assert values["scale"] == Argument("scale")
    assert values.get("right", 5) == 5
    assert values.get("left") == (
        {"fixed": UNBOUNDED, "packed": 70}[lengths] if mask == "window" else None
    )
    assert values.get("bottom_right") == (1 if lengths == "packed" and mask != "none" else None)
    resolved = {
        name: bytes(128) if isinstance(value, TensorMap) else value if isinstance(value, int) else 1
        for name, value in values.items()
    }
    assert len(block.pack(resolved)) == block.size


def test_a_section_is_heads_whose_keys_and_values_share_the_second_level_cache() -> None:
    def section(**changes: Any) -> object:
        return launch(spec(), problem(**changes)).parameters["section"]

    assert section() == 24  # all: 256 kB of k and v each
    assert section(seq_k=16_384, total_k=16_384) == 4 * 4  # 8 MB a head, four to a group
    assert section(seq_k=1 << 20, total_k=1 << 20) == 4  # never less than a group


def test_sections_that_are_dealt_in_advance_leave_few_multiprocessors_idle() -> None:
    """Two tiles of a head, and one head of keys a section: all but a few waited for those few."""
    few = {"batch": 2, "heads": 16, "kv_heads": 16, "seq_q": 256, "seq_k": 1 << 17}

    def section(mask: str, scheduler: str) -> object:
        one = replace(spec(), operation=replace(spec().operation, mask=mask))
        one = replace(one, schedule=replace(one.schedule, scheduler=scheduler))
        return launch(one, problem(**few)).parameters["section"]

    assert section("causal", "static") == 32  # 64 tiles for 132 multiprocessors
    assert section("causal", "dynamic") == 1
    assert section("none", "static") == 1  # such tiles are dealt all at once
    for q_tiles, all_heads, sharing in ((2, 1000, 1), (48, 16, 1), (5, 240, 4), (3, 7, 7)):
        blocks = min(132, q_tiles * all_heads)
        heads = section_of(1 << 30, sharing, q_tiles, all_heads, blocks, dealt=True)
        assert heads % sharing == 0
        sections = [*([heads] * (all_heads // heads)), all_heads % heads]
        rounds = sum(-(-section * q_tiles // blocks) for section in sections)
        assert rounds * blocks <= 1.1 * all_heads * q_tiles


# ---- Text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_a_kernel_has_only_the_parts_of_its_choices(dim: int) -> None:
    words = ("tanh.approx", "cu_seqlens", "p.left", "p.right", "atomicInc")
    schedule = AttentionSchedule(64, 32, pingpong=False, scheduler="single")
    fields: dict[str, Any] = {"dim": dim}
    plain = render(spec(replace(OPERATION, **fields), schedule))
    assert [word for word in words if word in plain] == []
    fields |= {"mask": "window", "softcap": True, "lengths": "packed"}
    full = render(spec(replace(OPERATION, **fields), replace(schedule, scheduler="dynamic")))
    assert [word for word in words if word not in full] == []


# ---- Masks of keys -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strides", "rows", "steps"),
    [
        ((0, 0, 0), 1, (0, 0)),
        ((512, 0, 0), 3, (1, 0)),
        ((0, 512, 0), 8, (0, 1)),
        ((4096, 512, 0), 24, (8, 1)),
    ],
)
@pytest.mark.parametrize("lengths", ["fixed", "packed"])
def test_a_mask_of_keys_has_each_of_its_rows_looked_at_first(
    lengths: Literal["fixed", "packed"],
    strides: tuple[int, int, int],
    rows: int,
    steps: tuple[int, int],
) -> None:
    # A row that nobody looks at, or a step to another's, would leave out keys that count.
    told = {"fixed": problem, "packed": packed}[lengths](strides_mask=strides)
    masked = replace(OPERATION, masked=True, lengths=lengths)
    kernel = spec(masked, AttentionSchedule(128, 64))
    before, main = FAMILY.launches(kernel, told, DEVICE)
    assert (before.entry, main.entry) == (f"{kernel.name}_keys", kernel.name)
    assert (before.grid, before.early, main.early) == (rows, True, True)
    assert before.parameters == main.parameters
    assert (main.parameters["keys_batch"], main.parameters["keys_head"]) == steps
    assert main.parameters["keys_columns"] == 500
    (room,) = FAMILY.workspaces(kernel, told)
    assert (room.tensor, room.bytes) == ("keys", 16 * rows)


def test_a_mask_of_pairs_has_no_launch_before() -> None:
    masked = spec(replace(OPERATION, masked=True), AttentionSchedule(128, 64))
    assert launch(masked, problem(strides_mask=(0, 0, 512))).entry == masked.name
