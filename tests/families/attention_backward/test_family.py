"""The attention backward's layout, names and launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from attention_backward_specs import ARCH, FAMILY, OPERATION, SCHEDULE, SMALL

from warploom.errors import UnknownNameError
from warploom.generator.families._attention import DIMS, UNBOUNDED
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardProblem,
    AttentionBackwardSchedule,
    attention_backward_layout,
)
from warploom.generator.launches import Address, Argument, DeviceLimits, Launch
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec, parse_name
from warploom.generator.tensor_maps import TensorMap


def spec(
    operation: AttentionBackwardOperation = OPERATION,
    schedule: AttentionBackwardSchedule = SCHEDULE,
) -> KernelSpec:
    return KernelSpec("sm_90a", operation, schedule)


def changed(**fields: Any) -> AttentionBackwardOperation:
    return replace(OPERATION, **fields)


def _problem(*extents: int, batches: bool, **changes: Any) -> AttentionBackwardProblem:
    batch, heads, kv_heads, seq_q, seq_k, dim, total_q, total_k = extents
    q = (seq_q * heads * dim * batches, dim, heads * dim)
    k = (seq_k * kv_heads * dim * batches, dim, kv_heads * dim)
    given = dict.fromkeys(("q", "o", "do", "dq"), q) | dict.fromkeys(("k", "v", "dk", "dv"), k)
    return AttentionBackwardProblem(
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_k=seq_k,
        dim=dim,
        total_q=total_q,
        total_k=total_k,
        **{f"strides_{name}": strides for name, strides in given.items()},
        **changes,
    )


def problem(**changes: Any) -> AttentionBackwardProblem:
    """[3, 8, 300, 128] by [3, 2, 500, 128], in memory [batch, seq, heads, dim]."""
    return _problem(3, 8, 2, 300, 500, 128, 300, 500, batches=True, **changes)


def packed(**changes: Any) -> AttentionBackwardProblem:
    """Three sequences of up to 300 rows and 500 columns; 700 and 1100 in all."""
    return _problem(3, 8, 2, 300, 500, 128, 700, 1100, batches=False, **changes)


def launches(kernel: KernelSpec, told: AttentionBackwardProblem) -> list[Launch]:
    return FAMILY.launches(kernel, told, DeviceLimits(132))


# ---- Layout --------------------------------------------------------------------------------------


def test_shared_memory_is_k_v_stages_of_q_and_do_ds_and_dq() -> None:
    layout = attention_backward_layout(ARCH, OPERATION, SCHEDULE)
    q, kv, ds, sums = 64 * 128 * 2, 128 * 128 * 2, 64 * 128 * 2, 64 * 128 * 4
    assert layout.shared_bytes == 2 * kv + 2 * (2 * q + 2 * 4 * 64) + 2 * ds + sums + 1024
    direct = attention_backward_layout(ARCH, OPERATION, replace(SCHEDULE, accumulate="direct"))
    assert direct.shared_bytes == layout.shared_bytes - sums


def test_blocks_that_share_rows_hold_half_of_k_and_v_p_twice_and_some_of_the_peers_k() -> None:
    wide = changed(dim=256)
    schedule = replace(SCHEDULE, cluster_split="rows", stages=1)  # type: ignore[arg-type]
    layout = attention_backward_layout(ARCH, wide, schedule)
    q, kv, ds, sums = 64 * 256 * 2, 64 * 256 * 2, 64 * 128 * 2, 64 * 128 * 4
    kept = 2 * kv + kv // 2 + 2 * ds + sums + 1024
    assert layout.shared_bytes == kept + 2 * q + 1024  # of lse and delta half, by whole tiles
    assert (layout.kv_rows, layout.q_rows, layout.ds_stages) == (64, 32, 1)
    direct = replace(schedule, stages=2, accumulate="direct")
    twice, single = (
        attention_backward_layout(ARCH, wide, replace(direct, single_do=single)).shared_bytes
        for single in (False, True)
    )
    assert twice - single == q
    assert single <= 232_448 < twice


@pytest.mark.parametrize(("held", "steps"), [("none", 0), ("half", 4), ("all", 8)])
def test_what_is_held_of_v_takes_four_registers_for_16_columns(held: str, steps: int) -> None:
    layout = attention_backward_layout(ARCH, OPERATION, replace(SCHEDULE, v_in_registers=held))  # type: ignore[arg-type]
    alone = attention_backward_layout(ARCH, OPERATION, SCHEDULE)
    assert layout.held_steps == steps
    assert layout.registers == alone.registers + (4 * steps + 12 if steps else 0)
    assert layout.shared_bytes == alone.shared_bytes


def test_ds_has_two_stages_where_there_is_room_and_a_warpgroup_does_not_run_ahead() -> None:
    wide = attention_backward_layout(ARCH, changed(dim=256), replace(SCHEDULE, stages=1))
    overlapped = attention_backward_layout(ARCH, OPERATION, replace(SCHEDULE, overlap=True))
    alone = attention_backward_layout(ARCH, OPERATION, SCHEDULE)
    assert (alone.ds_stages, overlapped.ds_stages, wide.ds_stages) == (2, 1, 1)


@pytest.mark.parametrize(
    ("dim", "kv_tile", "parts", "span", "boxes"),
    [
        (32, 64, 1, 64, 1), (32, 128, 1, 32, 2), (64, 64, 1, 128, 1), (64, 128, 1, 64, 2),
        (96, 64, 1, 64, 3), (96, 128, 1, 32, 6), (128, 64, 1, 128, 2), (128, 128, 1, 128, 2),
        (192, 64, 2, 64, 6), (192, 128, 2, 32, 12), (256, 64, 2, 128, 4), (256, 128, 2, 128, 4),
    ],
)  # fmt: skip
def test_boxes_end_where_a_part_and_a_warpgroups_share_of_dq_do(
    dim: int, kv_tile: int, parts: int, span: int, boxes: int
) -> None:
    schedule = replace(SMALL, kv_tile=kv_tile)  # type: ignore[arg-type]
    layout = attention_backward_layout(ARCH, changed(dim=dim), schedule)
    assert (layout.parts, layout.span, layout.boxes) == (parts, span, boxes)
    assert layout.box_columns * layout.boxes == dim
    assert layout.query_n % layout.box_columns == layout.columns % layout.box_columns == 0


@pytest.mark.parametrize(
    ("dim", "q_tile", "kv_tile", "swap", "blocks", "splits", "query_n"),
    [
        (128, 64, 128, False, 1, 2, 64), (128, 80, 128, True, 2, 1, 80),
        (64, 96, 128, True, 1, 2, 48), (32, 128, 128, False, 2, 1, 32),
        (256, 64, 64, False, 1, 1, 128), (192, 64, 128, False, 1, 2, 48),
    ],
)  # fmt: skip
def test_warpgroups_share_the_product_dq(
    dim: int, q_tile: int, kv_tile: int, swap: bool, blocks: int, splits: int, query_n: int
) -> None:
    schedule = AttentionBackwardSchedule(q_tile, kv_tile)  # type: ignore[arg-type]
    layout = attention_backward_layout(ARCH, changed(dim=dim), schedule)
    assert (layout.swap, layout.blocks, layout.splits) == (swap, blocks, splits)
    assert layout.query_n == query_n


# ---- Names ---------------------------------------------------------------------------------------


def test_a_name_has_every_field_that_is_not_usual_and_parses_back() -> None:
    operation = AttentionBackwardOperation("fp16", 32, "window", True, "packed", True)
    kernel = spec(operation, AttentionBackwardSchedule(64, 64, 3))
    assert kernel.name.startswith(
        "attention_backward_sm90a_fp16_dim32_window_softcap_packed_deterministic_64x64_stages3_overlap_"
    )
    assert parse_name(kernel.name) == kernel
    clustered = spec(schedule=replace(SCHEDULE, cluster=4))
    assert "_64x128_cluster4_" in clustered.name
    assert "cluster" not in spec().name
    assert parse_name(clustered.name) == clustered
    pair = AttentionBackwardSchedule(
        64, 128, accumulate="direct", cluster_split="rows", single_do=True
    )
    wide = spec(changed(dim=256), pair)
    assert "_64x128_single_do_rows_overlap_direct_" in wide.name
    assert parse_name(wide.name) == wide
    with pytest.raises(UnknownNameError, match="its digest is"):
        parse_name(spec().name[:-8] + "00000000")


# ---- Launches ------------------------------------------------------------------------------------


def test_there_are_three_launches_and_each_may_start_early() -> None:
    before, main, after = launches(spec(), problem())
    name = spec().name
    assert [x.entry for x in (before, main, after)] == [
        f"{name}_preprocess", name, f"{name}_postprocess"
    ]  # fmt: skip
    assert before.grid == after.grid == 5 * 8 * 3  # q tiles, query heads, batches
    assert (main.grid, main.block) == (4 * 2 * 3, 384)  # kv tiles, kv heads, batches
    assert before.early and main.early and after.early


def test_a_wide_head_takes_two_blocks_for_a_kv_tile() -> None:
    _, main, _ = launches(spec(changed(dim=256), SMALL), problem())
    assert main.grid == 2 * 8 * 2 * 3


@pytest.mark.parametrize("cluster", [2, 4, 8])
def test_a_cluster_has_a_kv_tile_of_a_kv_head(cluster: int) -> None:
    schedule = replace(SCHEDULE, cluster=cluster)  # type: ignore[arg-type]
    before, main, after = launches(spec(schedule=schedule), problem())
    assert (main.grid, main.cluster) == (4 * 2 * 3 * cluster, cluster)
    assert before.cluster == after.cluster == 1
    assert before.grid == after.grid == 5 * 8 * 3


def test_two_blocks_that_share_rows_are_a_cluster_and_load_64_rows() -> None:
    pair = AttentionBackwardSchedule(64, 128, 1, False, cluster_split="rows")
    alone = replace(pair, q_tile=32, cluster_split="columns")
    _, main, _ = launches(spec(changed(dim=256), pair), problem())
    _, other, _ = launches(spec(changed(dim=256), alone), problem())
    assert main.grid == other.grid == 2 * 4 * 2 * 3
    assert (main.cluster, other.cluster) == (2, 1)
    for launch, rows in ((main, 64), (other, 128)):
        for name in ("k_map", "v_map"):
            box = launch.parameters[name]
            assert isinstance(box, TensorMap) and box.box[1] == rows


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
def test_only_a_cluster_writes_dk_and_dv_without_tma(lengths: str) -> None:
    told = packed() if lengths == "packed" else problem()
    for cluster in (1, 2):
        schedule = replace(SCHEDULE, cluster=cluster)  # type: ignore[arg-type]
        values = launches(spec(changed(lengths=lengths), schedule), told)[1].parameters
        for name in ("dk", "dv"):
            assert (f"{name}_map" in values) is (cluster == 1)
            assert (f"{name}_rows" in values) is (cluster > 1)
        if cluster > 1:
            assert values["dk_rows"] == Address("dk")
            assert values["dv_seq"] == told.strides_dv[2]


def test_packed_tiles_are_enough_for_any_lengths_and_for_what_follows_them() -> None:
    kernel = spec(changed(lengths="packed"))
    values = launches(kernel, packed())[1].parameters
    for count, tile, total in (("q_tiles", 64, 700), ("kv_tiles", 128, 1100)):
        tiles = values[count]
        assert isinstance(tiles, int)
        for lengths in ((300, 300, 100), (1, 299, 300), (129, 257, 256), (0, 0, 0), (1, 0, 62)):
            end = sum(lengths)
            first = end // tile + len(lengths)  # of the tiles that follow the last sequence
            assert first - (-(total - end) // tile) <= tiles


@pytest.mark.parametrize("lengths", ["fixed", "packed"])
@pytest.mark.parametrize("mask", ["none", "causal", "window"])
@pytest.mark.parametrize("softcap", [False, True])
@pytest.mark.parametrize(
    ("deterministic", "cluster"), [(False, 1), (True, 1), (False, 4), (True, 4)]
)
def test_a_launch_has_exactly_the_values_of_the_parameter_block(
    deterministic: bool, cluster: int, softcap: bool, mask: str, lengths: str
) -> None:
    fields = {"mask": mask, "softcap": softcap, "lengths": lengths}
    schedule = replace(SCHEDULE, cluster=cluster)  # type: ignore[arg-type]
    kernel = spec(changed(**fields, deterministic=deterministic), schedule)
    told = packed(left=70, right=5, bottom_right=True) if lengths == "packed" else problem(right=5)
    block = FAMILY.parameters(kernel)
    workspaces = {workspace.tensor for workspace in FAMILY.workspaces(kernel, told)}
    for launch in launches(kernel, told):
        values = launch.parameters
        assert set(values) == {field.name for field in block.fields}
        assert values["scale"] == Argument("scale")
        assert values["dlse"] == Address("dlse")
        assert values.get("right", 5) == 5
        assert values.get("left") == (
            {"fixed": UNBOUNDED, "packed": 70}[lengths] if mask == "window" else None
        )
        assert workspaces <= {v.tensor for v in values.values() if isinstance(v, Address)}
        resolved = {
            name: bytes(128) if isinstance(v, TensorMap) else v if isinstance(v, int) else 1
            for name, v in values.items()
        }
        assert len(block.pack(resolved)) == block.size


def test_deterministic_kv_tiles_take_their_turns_in_the_order_that_keeps_fewest_waiting() -> None:
    def order(spec: KernelSpec, batch: int, seq: int) -> tuple[object, object]:
        extents = (batch, 8, 2, seq, seq, 128, seq, seq)
        values = launches(spec, _problem(*extents, batches=True))[1].parameters
        return values["section"], values.get("leftward")

    ordered = spec(changed(deterministic=True))
    causal = spec(changed(deterministic=True, mask="causal"))
    assert order(ordered, 16, 16_384) == (32, False)  # all heads: each runs few tiles at a time
    assert order(ordered, 132, 16_384) == (33, False)
    assert order(ordered, 132, 128) == (64, False)  # what fits L2
    assert order(causal, 1, 16_384) == (2, False)  # 1.9 rounds of 132 blocks: the longest first
    assert order(causal, 132, 2048) == (4, True)  # 32 rounds, four heads in L2 at a time
    assert order(causal, 16, 16_384) == (32, False)  # not one in L2
    assert order(spec(changed(mask="causal")), 16, 16_384) == (1, None)


def test_lists_of_several_heads_are_begun_together_so_that_no_long_one_is_alone_at_the_end() -> (
    None
):
    extents = (16, 8, 2, 2048, 2048, 128, 2048, 2048)

    def section(**fields: object) -> object:
        kernel = spec(changed(**fields))
        return launches(kernel, _problem(*extents, batches=True))[1].parameters["section"]

    assert section(blocks=True) == 4  # what fits L2
    assert section() == 1


def test_workspaces_are_of_whole_tiles_and_nothing_is_kept_in_them() -> None:
    tiles = 5 * 8 * 3
    plain = FAMILY.workspaces(spec(), problem())
    assert [(w.tensor, w.bytes, w.kept) for w in plain] == [
        ("statistics", tiles * 64 * 2 * 4, False),
        ("dq_sum", tiles * 64 * 128 * 4, False),
    ]
    biased = FAMILY.workspaces(spec(changed(bias="bf16")), problem())
    assert [(w.tensor, w.bytes) for w in biased if w.tensor != "dq_sum"] == [
        ("statistics", tiles * 64 * 3 * 4),
        ("non_finite", tiles * 4),
    ]
    ordered = FAMILY.workspaces(spec(changed(deterministic=True)), problem())
    assert [(w.tensor, w.bytes, w.kept) for w in ordered[2:]] == [
        ("turns", tiles * 4, False),
        ("counter", 4, False),
    ]


# ---- Text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dim", DIMS)
def test_a_kernel_has_only_the_parts_of_its_choices(dim: int) -> None:
    words = ("tanh.approx", "cu_seqlens", "p.left", "p.right", "atomicAdd", "ld.acquire")
    plain = render(spec(changed(dim=dim), SMALL))
    assert [word for word in words if word in plain] == []
    fields = {"dim": dim, "mask": "window", "softcap": True, "lengths": "packed"}
    full = render(spec(changed(**fields, deterministic=True), SMALL))
    assert [word for word in words if word not in full] == []
    distributed = ("mapa", "barrier.cluster", "dk_rows")
    clustered = render(spec(changed(dim=dim), replace(SMALL, cluster=2)))
    assert [word for word in distributed if word in plain] == []
    assert [
        word for word in (*distributed, "dk_map") if (word in clustered) is (word == "dk_map")
    ] == []
    distributed = ("mapa", "cp.async.bulk.shared::cluster.shared::cta", "peer_k")
    if dim > 128:
        pair = AttentionBackwardSchedule(64, 128, 1, False, cluster_split="rows")
        shared = render(spec(changed(dim=dim), pair))
        assert [word for word in distributed if word in plain or word not in shared] == []
        assert "st.async" not in shared  # a ticket
        assert "st.async" in render(spec(changed(dim=dim, deterministic=True), pair))
