"""Every attention gets a legal kernel from the table; what TMA is told fits the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, cast

import pytest
import torch

from warploom.errors import ProblemError
from warploom.generator.architectures import architecture
from warploom.generator.families import family
from warploom.generator.families._attention import (
    DIMS,
    GRADIENT_DIMS,
    UNBOUNDED,
    UNLIKE_DIMS,
)
from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardSchedule,
)
from warploom.generator.families.attention_forward import AttentionOperation, AttentionProblem
from warploom.generator.families.attention_forward.rules import DIMS_OF_EIGHT, usual_sums
from warploom.generator.launches import NO_GPU
from warploom.runtime.dispatch import choose, fitting, portfolio
from warploom.runtime.families._attention.mask import Band, band, operation, shape
from warploom.runtime.families._attention.operands import in_place, strides
from warploom.runtime.families._attention.problem import Extents, extents
from warploom.runtime.families.attention_forward.call import AttentionCall

LENGTHS = (1, 512, 1024, 1025, 4096, 65_536, 2**31 - 1)
FAMILIES = ("attention_forward", "attention_backward")


def sizes(dim: int, seq_q: int, seq_k: int, *, packed: bool = False, sharing: int = 4) -> Extents:
    return Extents(2, 2 * sharing, 2, seq_q, seq_k, dim, seq_q, seq_k, packed)


def operations(dim: int, packed: bool) -> Iterator[AttentionOperation | AttentionBackwardOperation]:
    """Every operation of both families for a head dimension."""
    lengths: Any = "packed" if packed else "fixed"
    for element, mask, softcap, dropout in product(
        ("fp16", "bf16"), ("none", "causal", "window"), (False, True), (False, True)
    ):
        shared: Any = (element, sizes(dim, 1, 1).kernel_dims[0], mask, softcap, lengths)
        yield AttentionOperation(*shared, dropout=dropout)
        if not dropout and shared[1] in DIMS_OF_EIGHT:
            yield from of_8_bits(shared)
        for deterministic in (False, True):
            yield AttentionBackwardOperation(*shared, deterministic=deterministic, dropout=dropout)
        dropped: dict[str, Any] = {"dropout": dropout}
        if element == "bf16" and (dropout or not softcap):
            for scores in ({"alibi": True}, {"masked": True}):
                yield AttentionOperation(*shared, **scores, **dropped)
                yield AttentionBackwardOperation(*shared, **scores, **dropped)
        if mask == "none" and not packed:
            yield AttentionOperation(*shared, blocks=True, **dropped)
            for deterministic in (False, True):
                yield AttentionBackwardOperation(*shared, deterministic, blocks=True, **dropped)


def of_8_bits(shared: tuple[Any, ...]) -> Iterator[AttentionOperation]:
    """The same on q and k of 8 bits."""
    dim, lengths = shared[1], shared[4]
    for scores, weights in product(("e4m3", "int8"), ("e4m3", "same")):
        sums = usual_sums(weights, dim)
        for scales in ("heads",) if lengths == "packed" else ("heads", "blocks"):
            yield AttentionOperation(
                *shared,
                scores=scores,  # type: ignore[arg-type]
                weights=weights,  # type: ignore[arg-type]
                sums=sums,
                scales=scales,  # type: ignore[arg-type]
            )


@pytest.mark.usefixtures("rules_asked_once")
@pytest.mark.parametrize("packed", [False, True], ids=["fixed", "packed"])
@pytest.mark.parametrize("dim", [8, 32, 40, 64, 72, 96, 128, 136, 192, 200, 256])
def test_no_legal_operation_is_without_a_kernel(dim: int, packed: bool) -> None:
    for wanted, length, sharing in product(operations(dim, packed), LENGTHS, (1, 64)):
        told = sizes(dim, length, length, packed=packed, sharing=sharing)
        choice = choose(wanted, shape(told, Band()))
        assert choice.spec.operation == wanted
        described = family(wanted.family)
        assert isinstance(choice.spec.schedule, described.schedule)
        arch = architecture(choice.spec.arch)
        assert described.reasons(arch, wanted, choice.spec.schedule) == []


def test_the_dim_of_a_kernel_is_the_next_there_is() -> None:
    found = {dim: sizes(dim, 5, 5).kernel_dims[0] for dim in (8, 32, 40, 72, 104, 136, 200, 256)}
    assert found == {8: 32, 32: 32, 40: 64, 72: 96, 104: 128, 136: 192, 200: 256, 256: 256}
    assert DIMS == (32, 64, 96, 128, 192, 256)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_schedule_of_the_table_is_legal_for_some_operation(name: str) -> None:
    described = family(name)
    for row in family(name).table.classes:
        keys = {"dim", "mask", "lengths", "deterministic", "dropout", "sharing", "seq", "schedules"}
        assert set(row) <= keys | {"blocks", "hides", "alibi", "scores"}
        dims = row["dim"] if isinstance(row["dim"], list) else [row["dim"]]
        unlike = str(dims[-1]).split("x")  # 192x128: of q and k, and of v
        given = ("blocks", "alibi", "dropout", "deterministic")
        fields = {name: row[name] for name in given if name in row}
        fields |= {"masked": True} if row.get("hides") else {}
        fields |= {"dim_v": int(unlike[1])} if len(unlike) > 1 else {}
        if "scores" in row:
            sums = usual_sums("e4m3", row["dim"])
            fields |= {"scores": row["scores"][0], "weights": "e4m3", "sums": sums}
        wanted = described.operation("bf16", int(unlike[0]), row.get("mask", ["none"])[0], **fields)
        legal = []
        for one in row["schedules"]:
            said = {name: one[name] for name in given if name in one}
            asked = replace(wanted, **said)
            schedule = {name: value for name, value in one.items() if name not in said}
            whole = described.complete("sm_90a", asked, schedule)
            legal.append(described.reasons(architecture("sm_90a"), asked, whole) == [])
            assert legal[-1] or not said
        assert any(legal)


def unlike(name: str) -> Iterator[tuple[Any, Any]]:
    """Operations and shapes whose v has another dimension than q and k."""
    of_gradients = name == "attention_backward"
    changes = ({}, {"dropout": True}, {"masked": True}, {"bias": "fp32", "dropout": True})
    kind: Any = family(name).operation
    for (dim, dim_v), packed in product(
        GRADIENT_DIMS if of_gradients else UNLIKE_DIMS, (False, True)
    ):
        for mask, length, change in product(("none", "causal", "window"), LENGTHS, changes):
            lengths = "packed" if packed else "fixed"
            told = shape(sizes(dim, length, length, packed=packed), Band())
            wanted = kind("bf16", dim, mask, lengths=lengths, dim_v=dim_v, **change)
            yield wanted, told
            if of_gradients:
                yield replace(wanted, deterministic=True), told


@pytest.mark.usefixtures("rules_asked_once")
@pytest.mark.parametrize("name", FAMILIES)
def test_no_pair_of_dimensions_is_without_a_kernel(name: str) -> None:
    for wanted, told in unlike(name):
        found = choose(wanted, told).spec
        assert found.operation == wanted
        reasons = family(name).reasons(architecture(found.arch), wanted, found.schedule)
        assert reasons == []


def test_kernels_of_the_dimensions_of_a_call_take_the_least_work() -> None:
    def dims(dim: int, dim_v: int) -> tuple[int, int]:
        return replace(sizes(dim, 5, 5), dim_v=dim_v).kernel_dims

    found = {(dim, dim_v): dims(dim, dim_v) for dim, dim_v in ((192, 128), (160, 120), (72, 64))}
    assert found == {(192, 128): (192, 128), (160, 120): (192, 128), (72, 64): (96, 64)}
    # One dimension for both where a pair would be as much work, or there is none.
    assert [dims(40, 64), dims(104, 112), dims(256, 128)] == [(64, 0), (128, 0), (256, 0)]
    assert replace(sizes(96, 5, 5), dim_v=64).gradient_dims() == (192, 128)
    assert sizes(96, 5, 5).gradient_dims() == (96, 0)
    for dim, dim_v in ((256, 128), (64, 128), (192, 160)):
        with pytest.raises(ProblemError, match=f"dim {dim} and v of dim {dim_v}"):
            replace(sizes(dim, 5, 5), dim_v=dim_v).gradient_dims()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_class_of_the_table_is_the_first_for_some_call(name: str) -> None:
    found = {
        id(
            family(name).table.first(
                wanted,
                shape(sizes(dim, length, length, packed=packed, sharing=sharing), Band()),
            )
        )
        for dim, packed, sharing in product(DIMS, (False, True), (1, 4, 8))
        for wanted, length in product(operations(dim, packed), [*LENGTHS, 600, 10_000])
        if wanted.family == name
    }
    found |= {id(family(name).table.first(*of)) for of in unlike(name)}
    # Those that a head dimension alone tells are what the model chooses among.
    listed = [row for row in family(name).table.classes if "seq" in row]
    assert [row for row in listed if id(row) not in found] == []


def test_heads_that_share_may_take_a_cluster() -> None:
    wanted = AttentionBackwardOperation("bf16", 128, "causal")

    def cluster(told: Extents) -> int:
        return choose(wanted, shape(told, Band(right=0))).spec.schedule.cluster  # type: ignore[attr-defined]

    clusters = {sharing: cluster(sizes(128, 4096, 4096, sharing=sharing)) for sharing in (1, 2, 8)}
    assert clusters == {1: 1, 2: 2, 8: 4}  # few blocks idle, many share out much
    no_heads = Extents(2, 0, 0, 5, 5, 128, 5, 5, packed=False)
    assert cluster(no_heads) == 1


def test_a_cluster_is_not_for_heads_that_share_nothing() -> None:
    # The record of a shape with grouped heads may lie near one without: its cluster would idle.
    wanted = AttentionBackwardOperation("bf16", 128, "causal")
    clustered = AttentionBackwardSchedule(64, 128, overlap=False, cluster=4)
    alone, two, four = (shape(sizes(128, 64, 64, sharing=n), Band()) for n in (1, 2, 4))
    none = replace(alone, heads=0, kv_heads=0)
    assert fitting(wanted, alone, clustered, NO_GPU.arch) is None
    assert fitting(wanted, none, clustered, NO_GPU.arch) is None
    found = fitting(wanted, two, clustered, NO_GPU.arch)
    assert found and found.schedule == clustered
    for at, clusters in ((alone, {1}), (four, {1, 2, 4, 8})):
        specs = portfolio(wanted, at, NO_GPU)
        assert {spec.schedule.cluster for spec in specs} == clusters  # type: ignore[attr-defined]


# ---- Masks ---------------------------------------------------------------------------------------


def masked(seq_q: int, seq_k: int, **keywords: Any) -> tuple[str, int, int]:
    """The mask and the bounds of column - row that a kernel is given."""
    q, k = torch.empty(1, 1, seq_q, 64).half(), torch.empty(1, 1, seq_k, 64).half()
    call = AttentionCall(q, k, k, **keywords)
    found = band(call, extents(call))
    return (found.mask, *found.shifted(extents(call)))


@pytest.mark.parametrize(
    ("lengths", "keywords", "expected"),
    [
        ((9, 9), {"causal": True}, ("causal", UNBOUNDED, 0)),
        ((5, 9), {"causal": "bottom_right"}, ("causal", UNBOUNDED, 4)),
        ((9, 5), {"causal": "bottom_right"}, ("causal", UNBOUNDED, -4)),
        ((5, 9), {"causal": "top_left"}, ("causal", UNBOUNDED, 0)),
        ((5, 9), {"window": (2, 1)}, ("window", -2, 5)),
        ((9, 5), {"window": (2, 1)}, ("window", 6, -3)),
        ((5, 9), {"window": (2, 1), "causal": "top_left"}, ("window", 2, 0)),
        ((5, 9), {"window": (2, None)}, ("window", -2, UNBOUNDED)),
        ((5, 9), {"window": (None, 1)}, ("causal", UNBOUNDED, 5)),
        # Bounds that leave out nothing are none.
        ((1, 9), {"causal": "bottom_right"}, ("none", UNBOUNDED, UNBOUNDED)),
        ((1, 9), {"causal": "top_left"}, ("causal", UNBOUNDED, 0)),
        ((5, 9), {"window": (8, 4)}, ("none", UNBOUNDED, UNBOUNDED)),
        ((5, 9), {"window": (7, 4)}, ("window", 3, UNBOUNDED)),
        ((5, 9), {"window": (8, 3)}, ("causal", UNBOUNDED, 7)),
        ((9, 9), {"window": (1 << 40, None)}, ("none", UNBOUNDED, UNBOUNDED)),
    ],
    ids=str,
)
def test_a_mask_becomes_bounds_of_column_minus_row(
    lengths: tuple[int, int], keywords: dict[str, Any], expected: tuple[str, int, int]
) -> None:
    assert masked(*lengths, **keywords) == expected


# ---- Memory --------------------------------------------------------------------------------------


def problem_of(call: AttentionCall) -> AttentionProblem:
    """What a kernel is told about a call."""
    return cast("AttentionProblem", call.draft(NO_GPU).problem)


def test_strides_are_those_of_batch_head_and_seq() -> None:
    q = torch.empty(2, 7, 4, 40).bfloat16().transpose(1, 2)
    k = torch.empty(2, 9, 3, 2, 40).bfloat16()
    told = problem_of(AttentionCall(q, k[:, :, 0].transpose(1, 2), k[:, :, 1].transpose(1, 2)))
    assert (told.strides_q, told.strides_o) == ((1120, 40, 160), (1120, 40, 160))
    assert told.strides_k == told.strides_v == (2160, 40, 240)
    assert (told.batch, told.heads, told.kv_heads, told.seq_q, told.seq_k) == (2, 4, 2, 7, 9)
    assert (told.dim, told.total_q, told.total_k) == (40, 7, 9)


def test_a_copy_is_contiguous() -> None:
    q = torch.empty(2, 4, 7, 40).bfloat16()
    odd = torch.empty(2, 2, 9, 41).bfloat16()[..., :40]
    told = problem_of(AttentionCall(q, odd, odd.transpose(1, 2).contiguous().transpose(1, 2)))
    assert told.strides_k == (720, 360, 40)
    assert told.strides_v == (720, 40, 80)


def test_packed_tensors_have_one_batch_and_their_own_alignment() -> None:
    q, k = torch.empty(11, 4, 40).half(), torch.empty(13, 2, 40).half()
    offsets = torch.tensor([0, 5, 11], dtype=torch.int32)
    given: dict[str, Any] = {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets,
        "max_seqlen_q": 6,
        "max_seqlen_k": 8,
    }
    told = problem_of(AttentionCall(q, k, k, causal="bottom_right", window=(3, None), **given))
    assert (told.strides_q, told.strides_k) == ((0, 40, 160), (0, 40, 80))
    assert (told.batch, told.seq_q, told.seq_k, told.total_q, told.total_k) == (2, 6, 8, 11, 13)
    assert (told.left, told.right, told.bottom_right) == (3, 0, True)
    assert not problem_of(AttentionCall(q, k, k, causal="top_left", **given)).bottom_right


@pytest.mark.parametrize(
    ("shape", "steps", "fits"),
    [
        ((2, 4, 7, 40), (1120, 280, 40, 1), True),
        ((2, 4, 7, 40), (1120, 40, 160, 1), True),
        ((1, 4, 1, 40), (3, 40, 5, 1), True),  # where there is one, its stride is never used
        ((2, 4, 7, 40), (1148, 287, 41, 1), False),
        ((2, 4, 7, 40), (2240, 560, 80, 2), False),
        ((2, 4, 7, 40), (280, 0, 40, 1), False),
    ],
)
def test_tma_reads_16_byte_strides_and_no_broadcast(
    shape: tuple[int, ...], steps: tuple[int, ...], fits: bool
) -> None:
    tensor = torch.empty(8000).bfloat16().as_strided(shape, steps)
    assert in_place(tensor) is fits
    if fits:
        assert all(step % 8 == 0 and step > 0 for step in strides(tensor, packed=False))


def test_a_misaligned_base_is_not_read_in_place() -> None:
    room = torch.empty(2 * 4 * 7 * 40 + 8).bfloat16()
    for first, fits in ((0, True), (4, False), (8, True)):
        view = room[first : first + 2240].view(2, 4, 7, 40)
        assert in_place(view) is (fits and room.data_ptr() % 16 == 0)


def test_the_operation_of_a_call_is_the_narrowest_that_computes_it() -> None:
    q, k = torch.empty(1, 1, 5, 72).half(), torch.empty(1, 1, 9, 72).half()
    call = AttentionCall(q, k, k, causal="bottom_right", softcap=3.0)
    checked = extents(call)
    dims, masked = checked.kernel_dims, band(call, checked)
    found = operation(AttentionOperation, "fp16", checked, dims, masked, {"softcap": True})
    assert found == AttentionOperation("fp16", 96, "causal", softcap=True)
