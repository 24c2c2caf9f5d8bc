"""Which schedules there are, and that what is launched has room for what its kernel leaves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.generator.architectures import architecture
from warploom.generator.epilogue import Activation, Amax, Bias, Residual, Scale
from warploom.generator.families import family
from warploom.generator.families._product.launch import MOST_PARTS
from warploom.generator.families.mixed_gemm import (
    Format,
    MixedGemmOperation,
    MixedGemmProblem,
    MixedGemmSchedule,
    MixedGemmShape,
)
from warploom.generator.families.mixed_gemm.launch import cut
from warploom.generator.families.mixed_gemm.layout import mixed_gemm_layout, room
from warploom.generator.formats import FORMATS, activations_of
from warploom.generator.launches import NO_GPU, DeviceLimits
from warploom.generator.shapes import LARGEST
from warploom.generator.specification import KernelSpec
from warploom.runtime.dispatch import tabled

FAMILY = family("mixed_gemm")
ROWS = (1, 9, 17, 33, 65, 129, 4096)
ARCH = architecture("sm_90a")
BF16 = MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16")
FEW = MixedGemmSchedule((16, 128, 256), "mma", "sums", 4, stream_k=True)
SHARED = replace(FEW, tile=(16, 64, 256), warp_split_k=2)
SOME = MixedGemmSchedule((64, 128, 256), "wgmma", "sums", 4, stream_k=True)
MANY = MixedGemmSchedule((256, 128, 128), "wgmma", "weights", 3, store="tma")
SPLIT = MixedGemmSchedule((16, 64, 128), "mma", "sums", 8, consumers=1, cluster_split_k=8)
PAIRED = replace(FEW, tile=(8, 128, 256), warp_split_k=2, ctas_per_sm=2)
AHEAD = MixedGemmSchedule((128, 128, 256), "wgmma", "sums", 4, lookahead=2)
E4M3 = MixedGemmOperation("e4m3", "int4", "bf16", 128, "bf16")
SCHEDULES = (FEW, SHARED, SOME, MANY, SPLIT, PAIRED, replace(MANY, stream_k=True))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_these_are_legal(schedule: MixedGemmSchedule) -> None:
    assert FAMILY.reasons(ARCH, BF16, schedule) == []


@pytest.mark.parametrize(
    ("schedule", "change", "said"),
    [
        (FEW, {"tile": (40, 128, 256)}, "tile m with multiply mma 40: must be one of 8, 16, 24"),
        (FEW, {"tile": (16, 64, 256)}, "tile n 64: must be a positive multiple of 128"),
        (FEW, {"tile": (16, 128, 64)}, "tile k 64: must be a positive multiple of 128"),
        (SHARED, {"tile": (16, 64, 128)}, "tile k 128: must be a positive multiple of 256"),
        (FEW, {"warp_split_k": 4}, "warp_split_k 4 of 2 consumers: must divide them"),
        (SPLIT, {"stream_k": True}, "cluster_split_k 8 with stream_k: must be 1"),
        (SPLIT, {"tile": (8, 64, 128)}, "8 finish 1 fragments of 64 rows"),
        (SHARED, {"store": "tma"}, "2 that share a tile's sums"),
        (MANY, {"scaled": "sums"}, "registers expected"),
        (MANY, {"stages": 4}, "shared memory"),
        (FEW, {"ctas_per_sm": 2, "stages": 5}, "ctas_per_sm 2: must be at most 115712"),
        (SOME, {"ctas_per_sm": 2, "stages": 2}, "registers expected, 96 to have"),
    ],
)
def test_what_does_not_fit_is_told(
    schedule: MixedGemmSchedule, change: dict[str, Any], said: str
) -> None:
    assert said in "; ".join(FAMILY.reasons(ARCH, BF16, replace(schedule, **change)))


@pytest.mark.parametrize(
    ("operation", "change", "said"),
    [
        (E4M3, {}, ""),
        (E4M3, {"tile": (160, 128, 256), "stages": 3, "lookahead": 1}, ""),
        (replace(E4M3, group=32), {"tile": (128, 128, 128)}, ""),
        (BF16, {}, "lookahead 2 of a bf16, multiply wgmma: must be 0"),
        (E4M3, {"tile": (128, 128, 128)}, "must be 256 or 512, two groups"),
        (E4M3, {"warp_split_k": 2}, "must be 512 or 1024"),
        (replace(E4M3, group=32), {}, "tile k 256: must be 64 or 128"),
        (replace(E4M3, scale="fp32"), {"tile": (160, 128, 256), "stages": 3}, "registers expected"),
        (E4M3, {"tile": (72, 128, 256)}, "a part of tile m 72, lookahead 2 36"),
        (E4M3, {"tile": (192, 128, 256), "stages": 2}, "registers expected"),
        (E4M3, {"tile": (160, 128, 256), "stages": 3, "stream_k": True}, "registers expected"),
    ],
)
def test_what_is_decoded_ahead_has_two_groups_a_stage_and_registers_for_both(
    operation: MixedGemmOperation, change: dict[str, Any], said: str
) -> None:
    """One group would change its registers from stage to stage, which the compiler cannot name."""
    found = FAMILY.reasons(ARCH, operation, replace(AHEAD, **change))
    assert (said in "; ".join(found)) if said else found == []


@pytest.mark.parametrize("blocks", [1, 2])
def test_auto_is_as_many_stages_as_there_is_room_for(blocks: int) -> None:
    fields = {"tile": (16, 64, 256), "multiply": "mma", "scaled": "sums", "warp_split_k": 2}
    found = FAMILY.complete("sm_90a", BF16, {**fields, "ctas_per_sm": blocks})
    one_more = mixed_gemm_layout(BF16, replace(found, stages=found.stages + 1))
    assert mixed_gemm_layout(BF16, found).shared_bytes <= room(found) < one_more.shared_bytes


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from(SCHEDULES),
    st.tuples(st.integers(1, 5000), st.integers(1, 200_000), st.integers(1, 500_000)),
    st.integers(1, 200),
)
def test_what_is_launched_has_a_range_for_each_block_and_room_for_its_part(
    schedule: MixedGemmSchedule, extents: tuple[int, int, int], multiprocessors: int
) -> None:
    problem = MixedGemmProblem(*extents, pitch_a=-(-extents[2] // 8) * 8, pitch_d=extents[1])
    found = cut(schedule, problem, DeviceLimits(multiprocessors))
    assert 0 <= found.tiles <= found.all_tiles and found.clusters >= 1
    if schedule.cluster_split_k > 1:
        assert (found.tiles, found.clusters) == (0, found.all_tiles)
    if not found.tiles:
        return
    assert found.clusters <= found.tiles * found.k_tiles  # or a range is empty
    assert found.tiles * found.k_tiles * found.clusters <= LARGEST
    assert found.clusters <= MOST_PARTS * found.tiles
    spec = KernelSpec("sm_90a", BF16, schedule)
    rooms = {one.tensor: one.bytes for one in FAMILY.workspaces(spec, problem)}
    layout = mixed_gemm_layout(BF16, schedule)
    part = layout.fragments * 16 * 128 * schedule.consumers
    assert rooms["parts"] >= found.clusters * part
    assert rooms["raised"] >= found.clusters * 4 * 4 * schedule.consumers


@pytest.mark.usefixtures("rules_asked_once")
@pytest.mark.parametrize("a", ["bf16", "e4m3", "int8"])
@pytest.mark.parametrize("format", FORMATS)
def test_the_table_has_a_schedule_for_every_number_of_rows_and_long_epilogues(
    a: Literal["bf16", "e4m3", "int8"], format: Format
) -> None:
    if activations_of(a) not in FORMATS[format].orders:
        return
    steps = (Scale("row"), Bias("bf16"), Activation("gelu"), Residual("bf16"), Amax())
    row = FORMATS[format]
    for group, epilogue, m, n in product(row.groups, ((), steps), ROWS, (136, 4096, 28672)):
        operation = MixedGemmOperation(a, format, "bf16", group or 0, row.scales[0], epilogue)
        found = tabled(operation, MixedGemmShape(m, n, 4096), NO_GPU).spec.schedule
        assert found.tile[0] >= min(m, 32)
        if m > 512:
            assert found.cluster_split_k == 1


@pytest.mark.parametrize(
    ("a", "format", "group"), [("bf16", "int4", 128), ("int8", "int2", 128), ("int8", "ternary", 0)]
)
def test_many_rows_in_fp32_have_large_tiles(
    a: Literal["bf16", "int8"], format: Format, group: Literal[0, 128]
) -> None:
    """A row of the table that says how it stores came first, where all others store directly."""
    operation = MixedGemmOperation(a, format, "fp32", group, "bf16")
    found = tabled(operation, MixedGemmShape(4096, 28672, 4096), NO_GPU).spec.schedule
    assert found.tile[0] >= 128


def test_blocks_of_a_cluster_are_about_as_many_as_fit() -> None:
    """More would wait for each other's slots, and fewer would leave multiprocessors idle.

    From 65 rows on half of that is faster: a block's tile is as large as two.
    """
    for m, n in product((1, 16, 32, 64), (2112, 4096, 6144, 7168)):
        found = tabled(BF16, MixedGemmShape(m, n, 7168), NO_GPU).spec.schedule
        blocks = -(-n // found.tile[1]) * found.cluster_split_k
        assert (
            0.7 * NO_GPU.multiprocessors
            < blocks
            <= found.ctas_per_sm * NO_GPU.multiprocessors * 1.05
        )


@pytest.mark.parametrize(
    ("m", "n", "k", "group", "tile", "split"),
    [
        (64, 28672, 4096, 128, (64, 64, 256), 1),
        (64, 4096, 14336, 128, (64, 64, 256), 2),
        (64, 7168, 16384, 128, (64, 64, 256), 2),
        (256, 2112, 7168, 128, (64, 64, 256), 1),
        (512, 2112, 7168, 128, (64, 64, 256), 1),
        (1024, 2112, 7168, 128, (160, 128, 256), 1),
        (256, 4096, 4096, 128, (64, 128, 256), 1),
        (256, 4096, 14336, 128, (128, 128, 256), 2),
        (512, 4096, 4096, 128, (128, 128, 512), 1),
        (4096, 7168, 16384, 128, (128, 128, 512), 1),
        (4096, 28672, 4096, 128, (160, 128, 256), 1),
        # Of 512 of k the last stage would be empty in part, and groups of 64 have none.
        (512, 4096, 2304, 128, (128, 128, 256), 1),
        (512, 4096, 4096, 64, (128, 128, 256), 1),
    ],
)
def test_what_was_fastest_by_e4m3_is_chosen(
    m: int, n: int, k: int, group: int, tile: tuple[int, int, int], split: int
) -> None:
    """Blocks that split k store directly, and still come before whole tiles of TMA."""
    operation = replace(E4M3, group=group)
    found = tabled(operation, MixedGemmShape(m, n, k), NO_GPU, "tma").spec.schedule
    assert (found.tile, found.cluster_split_k) == (tile, split) and found.lookahead
    bf16 = tabled(replace(BF16, group=group), MixedGemmShape(m, n, k), NO_GPU, "tma").spec.schedule
    assert not bf16.lookahead


@pytest.mark.parametrize(
    ("schedule", "group", "more"),
    [
        # Compiled, they spilled 128, 180, 260, 148, 20 and 136 bytes of a thread.
        (MixedGemmSchedule((32, 256, 128), "mma", "sums", 3, consumers=4, stream_k=True), 32, {}),
        (MixedGemmSchedule((24, 512, 256), "mma", "sums", 2), 64, {"a": "fp16"}),
        (
            replace(PAIRED, multiply="wgmma", tile=(8, 256, 256), scaled="weights", stages=2),
            128,
            {},
        ),
        (
            MixedGemmSchedule(
                (8, 128, 512), "wgmma", "weights", 2, warp_split_k=2, ctas_per_sm=2, stream_k=True
            ),
            128,
            {"b": "uint4"},
        ),
        (
            MixedGemmSchedule(
                (48, 128, 256), "wgmma", "weights", 3, consumers=4, warp_split_k=2, stream_k=True
            ),
            128,
            {},
        ),
        (
            MixedGemmSchedule((40, 256, 128), "wgmma", "sums", 4, consumers=1, ctas_per_sm=2),
            0,
            {"d": "fp32"},
        ),
    ],
)
def test_what_would_spill_is_refused(
    schedule: MixedGemmSchedule, group: int, more: dict[str, Any]
) -> None:
    operation = replace(BF16, group=group, **more)
    (reason,) = FAMILY.reasons(ARCH, operation, schedule)
    assert "registers expected" in reason and "to have: use a smaller tile" in reason
