"""What the generator says of the family: rules, layouts, launches, names, choices and times."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from decode_samples import options, sample

from warploom.errors import ProblemError, SpecificationError
from warploom.generator.families.attention_decode import FAMILY, DecodeShape, work
from warploom.generator.families.attention_decode.layout import decode_layout, room
from warploom.generator.launches import NO_GPU
from warploom.generator.model import rank
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch

CONFIGS = Path(__file__).parents[3] / "configs" / "attention_decode"
TILE = {"rows": 16, "keys": 128, "warps": 4}
LARGEST = 2**31 - 1


def spec(tile: dict[str, Any] | None = None, **fields: Any) -> KernelSpec:
    operation = options(**fields)
    return KernelSpec("sm_90a", operation, FAMILY.complete("sm_90a", operation, tile or TILE))


@pytest.mark.parametrize(
    ("tile", "fields", "said"),
    [
        ({}, {"page": 16, "keys": "packed"}, "page 16 with packed keys: must be 0"),
        ({}, {"scales": "token"}, "scales token of a cache of bf16: must be none or head"),
        ({"rows": 64, "warps": 2}, {}, "warps 2 with rows 64: must be a multiple of 4"),
        ({"keys": 32, "warps": 4}, {}, "keys 32: must be a positive multiple of 64"),
        ({"keys": 256}, {}, "must be at most"),
        ({"keys": 64, "ctas_per_sm": 2, "stages": 5}, {}, "use fewer stages"),
        ({"warps": 8, "ctas_per_sm": 2}, {"dim": 256, "cache": "int8"}, "registers"),
        # NVRTC spilled 164, 116, 124 and 788 bytes of these.
        ({"keys": 256, "warps": 8}, {"cache": "e4m3"}, "170 registers expected, 168 to have"),
        ({"rows": 64, "keys": 64, "warps": 8}, {}, "registers"),
        ({"warps": 2}, {"dim": 256}, "registers"),
        ({"keys": 256, "warps": 1}, {"cache": "e4m3"}, "registers"),
        ({"keys": 64, "cluster": 4}, {"dim": 256}, "262 registers expected, 255 to have"),
    ],
)
def test_what_is_not_legal_is_told(tile: dict[str, Any], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecificationError, match=said):
        spec({**TILE, **tile}, **fields)


def test_a_name_says_what_is_special() -> None:
    assert spec().name.startswith("attention_decode_sm90a_bf16_dim128_16x128_stages3_warps4_")


@pytest.mark.parametrize(
    ("fields", "span", "pieces", "boxes"),
    [
        ({}, 128, 2, 2),  # no more rows than 64 are read past the last key
        ({"dim": 96}, 64, 3, 2),
        ({"dim": 96, "cache": "e4m3"}, 32, 3, 2),
        ({"page": 16}, 128, 2, 8),
        ({"page": 128}, 128, 2, 1),
        ({"dim": 64, "cache": "int8", "page": 32}, 64, 1, 4),
    ],
)
def test_a_stage_is_boxes_of_pages_in_pieces_that_swizzle(
    fields: dict[str, Any], span: int, pieces: int, boxes: int
) -> None:
    one = spec(**fields)
    layout = decode_layout(one.operation, one.schedule)
    assert (layout.span, layout.pieces, layout.boxes) == (span, pieces, boxes)


def test_stages_fill_shared_memory() -> None:
    for one in expand_file(CONFIGS / "space.yaml").specs[::7]:
        layout = decode_layout(one.operation, one.schedule)
        left = room(one.schedule) - layout.shared_bytes
        assert 0 <= left < layout.ring_bytes or one.schedule.stages == 32


CALLS = product(
    ("bf16", "fp16"),
    (64, 96, 128, 256),
    (("same", "none"), ("e4m3", "none"), ("int8", "head"), ("e4m3", "token")),
    (0, 16, 64, 256),
    (1, 16, 17, 33, 256),
)


def test_the_table_has_a_schedule_for_everything() -> None:
    for element, dim, (cache, scales), page, rows in CALLS:
        operation = options(
            element=element, dim=dim, cache=cache, scales=scales, page=page, softcap=True
        )
        for seq_k in (1, 1000, LARGEST):
            assert dispatch.tabled(operation, DecodeShape(3, rows, 1, 1, seq_k), NO_GPU)


@pytest.mark.parametrize(
    ("cache", "rows", "batch", "seq_k", "tile"),
    [
        ("same", 1, 1, 512, (16, 128, 8)),
        ("same", 4, 1, 2048, (16, 128, 8)),
        ("same", 8, 1, 2048, (32, 64, 8)),
        ("same", 1, 2, 1024, (16, 128, 4)),
        ("same", 1, 1, 12000, (16, 128, 8)),
        ("same", 1, 1, 20000, (16, 128, 1)),
        ("same", 1, 2, 2048, (16, 128, 4)),
        ("same", 1, 2, 20000, (16, 128, 1)),
        ("same", 1, 64, 8192, (16, 128, 1)),
        ("e4m3", 1, 1, 2048, (16, 64, 8)),
        ("e4m3", 1, 1, 4096, (16, 128, 8)),
        ("e4m3", 1, 1, 8192, (16, 128, 8)),
        ("e4m3", 1, 1, 20000, (16, 256, 1)),
        ("e4m3", 1, 64, 512, (16, 128, 1)),
        ("e4m3", 1, 64, 2048, (16, 256, 1)),
    ],
)
def test_what_was_fastest_is_chosen(
    cache: str, rows: int, batch: int, seq_k: int, tile: tuple[int, int, int]
) -> None:
    operation = options(lengths=True, cache=cache, mask="causal")
    shape = DecodeShape(batch, 32, 8, rows, seq_k)
    found = dispatch.tabled(operation, shape, NO_GPU).spec.schedule
    assert (found.rows, found.keys, found.cluster) == tile


def test_few_rows_are_not_padded_to_many() -> None:
    suits, (few, more) = FAMILY.table.suits, (DecodeShape(1, n, 1, 1, 9) for n in (15, 16))
    wide = spec({**TILE, "rows": 32}).schedule
    assert suits(spec().schedule, few) and suits(wide, more) and not suits(wide, few)


def test_a_wider_mask_serves() -> None:
    serves = FAMILY.table.serves
    window, causal = options(mask="window"), options(mask="causal")
    assert serves(window, causal) and serves(causal, options()) and not serves(causal, window)
    assert not serves(causal, options(lengths=True))


def test_there_are_no_more_blocks_than_tiles_nor_many_of_few_keys() -> None:
    few = sample(options(), lengths=[200], heads=8, kv_heads=2, seq_q=1, seq_k=200).problem
    many = sample(options(), lengths=[900] * 5, heads=8, kv_heads=2, seq_q=1, seq_k=900).problem
    one = spec({**TILE, "keys": 64, "ctas_per_sm": 2})
    for problem, blocks in ((few, 2 * 4), (many, 60)):  # of 2 * 5 * 15, alike
        (launch,) = FAMILY.launches(one, problem, NO_GPU)
        assert launch.grid == blocks and launch.early


@pytest.mark.parametrize(
    ("batch", "kv_heads", "blocks"),
    [
        *((1, 8, 128), (2, 8, 128), (1, 12, 132), (1, 15, 132), (8, 8, 128), (7, 8, 132)),
        *((64, 8, 128), (66, 8, 132), (65, 8, 130), (31, 8, 124), (30, 8, 132)),
    ],
)
def test_blocks_share_items_evenly(batch: int, kv_heads: int, blocks: int) -> None:
    """132 of them, or as many as each have the same; unless that takes many of them away."""
    shape = DecodeShape(batch, 8 * kv_heads, kv_heads, 1, 32768)
    assert work.blocks(spec().schedule, shape, 132) == blocks


@pytest.mark.parametrize(
    ("batch", "kv_heads", "seq_k", "blocks"),
    [(4, 8, 512, 32), (4, 8, 513, 80), (8, 8, 1024, 64), (2, 8, 512, 64), (1, 200, 512, 132)],
)
def test_short_items_are_not_shared(batch: int, kv_heads: int, seq_k: int, blocks: int) -> None:
    """What a block would save by sharing one is less than what adding up takes."""
    shape = DecodeShape(batch, kv_heads, kv_heads, 1, seq_k)
    assert work.blocks(spec().schedule, shape, 132) == blocks


def test_clusters_have_whole_items_and_no_workspace() -> None:
    one = spec({**TILE, "cluster": 4}, batch_invariant=True)
    for sequences, clusters in ((1, 2), (40, 33)):
        call = {"lengths": [900] * sequences, "heads": 8, "kv_heads": 2, "seq_q": 1, "seq_k": 900}
        problem = sample(one.operation, **call).problem
        (launch,) = FAMILY.launches(one, problem, NO_GPU)
        assert (launch.grid, launch.cluster) == (4 * clusters, 4)
        assert not FAMILY.workspaces(one, problem)


def test_workspaces_have_room_for_two_parts_of_every_block() -> None:
    call = {"lengths": [9000], "heads": 8, "kv_heads": 2, "seq_q": 1, "seq_k": 9000}
    whole, cut = spec(), spec(batch_invariant=True)
    problem = sample(whole.operation, **call).problem
    (launch,) = FAMILY.launches(whole, problem, NO_GPU)
    parts, sums, counters = FAMILY.workspaces(whole, problem)
    assert parts.bytes >= 2 * launch.grid * 4 * 128 * 4 and sums.bytes * 64 == parts.bytes
    assert counters.kept and counters.bytes == 2 * 4 * 4  # heads, warps
    assert work.chunks(cut.operation, cut.schedule, problem) == 16
    assert FAMILY.workspaces(cut, problem)[0].bytes == 2 * 16 * 4 * 128 * 4


@pytest.mark.parametrize(
    ("tile", "fields", "chunks"),
    [
        ({}, {}, (1, 4, 8, 8, 16)),
        ({"keys": 64}, {}, (1, 4, 8, 8, 16)),
        ({"rows": 32}, {}, (1, 2, 4, 8, 16)),
        ({"keys": 256}, {"cache": "e4m3"}, (1, 2, 4, 8, 16)),
    ],
)
def test_chunks_grow_with_a_sequence(
    tile: dict[str, Any], fields: dict[str, Any], chunks: tuple[int, ...]
) -> None:
    """Up to 512 keys one, whose result no block waits for; never more than 16."""
    one = spec({**TILE, **tile}, batch_invariant=True, **fields)
    shapes = [DecodeShape(64, 8, 8, 1, keys) for keys in (512, 1024, 2048, 8192, 32768)]
    assert tuple(work.chunks(one.operation, one.schedule, at) for at in shapes) == chunks


def test_what_takes_more_than_32_bits_is_refused() -> None:
    problem = sample(options(), lengths=[1], heads=1, kv_heads=1, seq_q=1, seq_k=1).problem
    for name in ("seq_k", "entry_rows", "total_q"):
        with pytest.raises(ProblemError, match="must be smaller"):
            FAMILY.launches(spec(), replace(problem, **{name: LARGEST + 1}), NO_GPU)


def test_the_model_knows_launches_memory_and_parts() -> None:
    def seconds(batch: int, seq_k: int, **fields: Any) -> float:
        one = spec(**fields)
        return rank(None, [one], DecodeShape(batch, 32, 8, 1, seq_k), 132)[0].seconds

    assert 4e-6 < seconds(1, 512) < 8e-6
    assert 4.8e-4 < seconds(64, 8192) < 5.6e-4  # 2.1 GB
    assert seconds(64, 2048, batch_invariant=True) > 1.1 * seconds(64, 2048)
    assert seconds(64, 8192, cache="e4m3") < 0.9 * seconds(64, 8192)
