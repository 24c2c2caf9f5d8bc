"""On CPU tensors decoding is exact: lengths, pages, masks, heads, packed rows, no extent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from decode_calls import BF16, E4M3, FP16, INF, Case, ends, fixed, ints, paged, random

import warploom
from warploom.errors import ProblemError

LENGTHS = (17, 0, 40, 1)
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "none": {"causal": False},
    "window": {"window": (7, None)},
    "window of both sides": {"causal": False, "window": (3, 1)},
    "its own key only": {"window": (0, 0)},
    "wider than the sequence": {"window": (1000, 1 << 40)},
    "softcap": {"softcap": 0.7},
    "starts": {"cache_leftpad": ints(3, 0, 39, 5)},
    "sinks": {"sinks": torch.tensor([0.5, -3.0, 9.0, 0.0])},
    "sinks of the type of q": {"sinks": torch.tensor([0.5, -3.0, 9.0, 0.0]).bfloat16()},
    "all": {
        "softcap": 2.0,
        "window": (5, 1),
        "cache_leftpad": ints(3, 0, 39, 5),
        "scale": 0.3,
        "sinks": torch.tensor([0.5, -3.0, 9.0, 0.0]),
    },
}


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", MASKS)
def test_each_sequence_attends_to_its_own_keys_as_the_words_say(name: str, rows: int) -> None:
    """Rows stand at the last keys: of a sequence with fewer keys than rows, the first see none."""
    fixed(LENGTHS, rows=rows).given(**MASKS[name]).assert_right()
    paged(LENGTHS, rows=rows).given(**MASKS[name]).assert_right()


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("page", [16, 32, 64, 128, 256])
def test_keys_of_a_sequence_are_in_the_pages_that_its_row_names(page: int, layout: str) -> None:
    """Pages that no row names, and keys past a length, reach no result: they are NaN here."""
    case = paged((page + 3, 1, 2 * page, 0), page=page, layout=layout)
    assert case.k.isnan().any()
    case.assert_right()


@pytest.mark.parametrize("dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_head_dimensions_and_types(dim: int, dtype: torch.dtype) -> None:
    paged((20, 33), dim=dim, dtype=dtype).assert_right()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "rows"), [(1, 1, 1), (6, 6, 2), (6, 2, 3), (64, 1, 4), (8, 8, 256)]
)
def test_consecutive_query_heads_share_a_head_of_keys(heads: int, kv_heads: int, rows: int) -> None:
    case = fixed((9,), rows=rows, heads=heads, kv_heads=kv_heads)
    case.assert_right()


@pytest.mark.parametrize("kind", ["tensor", "one", "head", "token", "two kinds"])
@pytest.mark.parametrize("cache", [E4M3, torch.int8], ids=str)
def test_caches_of_8_bits_are_times_their_scales(cache: torch.dtype, kind: str) -> None:
    for case in (fixed((17, 0, 40), cache=cache), paged((17, 0, 40), cache=cache)):
        extents: dict[str, tuple[int, ...]] = {
            "tensor": (),
            "one": (1,),
            "head": (2,),
            "token": tuple(case.k.shape[:-1]),
        }
        of_k, of_v = ("token", "head") if kind == "two kinds" else (kind, kind)
        scale_k = torch.rand(extents[of_k]) / 20 + 0.01
        scale_v = torch.rand(extents[of_v]) / 20 + 0.01
        found = case.given(scale_k=scale_k, scale_v=scale_v).run()
        wide = [
            tensor.float() * _as_the_cache(scale, tensor)
            for tensor, scale in ((case.k, scale_k), (case.v, scale_v))
        ]
        q = case.q.float()
        exact = _exactly(Case(q, wide[0], wide[1], case.keywords))
        assert torch.allclose(found[0].float(), exact[0], rtol=2**-8, atol=1e-5)
        assert torch.allclose(found[1], exact[1], rtol=1e-5, atol=1e-5)


def _as_the_cache(scale: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    if scale.dim() == cache.dim() - 1:
        return scale[..., None]
    return scale[None, :, None, None] if scale.shape == (2,) else scale.reshape(1, 1, 1, 1)


def _exactly(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """By float64, of a cache that no kernel could read."""
    out, lse = torch.zeros(case.q.shape), torch.full(case.q.shape[:-1], -INF)
    table = case.keywords.get("page_table")
    for i, length in enumerate(case.keywords["cache_seqlens"].tolist()):
        k, v = (
            t[i] if table is None else t[table[i].long()].transpose(0, 1).flatten(1, 2)
            for t in (case.k, case.v)
        )
        if length:
            q = case.q[i].unflatten(0, (2, -1)).double()
            s = q @ k[:, None, :length].double().mT * case.q.shape[-1] ** -0.5
            out[i] = (s.softmax(-1) @ v[:, None, :length].double()).flatten(0, 1)
            lse[i] = s.logsumexp(-1).flatten(0, 1)
    return out, lse


def test_an_e4m3_cache_without_scales_is_what_it_holds() -> None:
    fixed((17, 3), cache=E4M3).assert_right()


def test_lengths_that_are_left_out_are_all_there_is_room_for() -> None:
    for case in (fixed((40, 40)), paged((48, 48))):
        del case.keywords["cache_seqlens"]
        case.assert_right()


def test_the_longest_may_be_said() -> None:
    """It bounds what is launched, and no length may be beyond it."""
    fixed((17, 3)).given(max_seqlen_k=20).assert_right()
    paged((17, 3)).given(max_seqlen_k=20).assert_right()
    with pytest.raises(ProblemError, match=r"cache_seqlens \[17, 3\].*between 0 and 16"):
        paged((17, 3)).given(max_seqlen_k=16).run()


@pytest.mark.parametrize("keys", ["fixed", "paged", "packed"])
def test_packed_queries_are_rows_of_their_own_sequences(keys: str) -> None:
    """Some have no row, some fewer keys than rows; rows past the last sequence stay as they are."""
    rows, lengths = (3, 0, 1, 4), (17, 5, 40, 2)
    case = paged(lengths) if keys == "paged" else fixed(lengths)
    q = random(sum(rows) + 2, 4, 64)
    starts = ends(*rows)
    alone = [
        (q[starts[i] : starts[i + 1]].transpose(0, 1), k, v)
        for i, (_, k, v) in enumerate(case.alone)
    ]
    given = {**case.keywords, "cu_seqlens_q": starts, "max_seqlen_q": 4}
    k, v = case.k, case.v
    if keys == "packed":
        k, v = (
            torch.cat([one[at] for one in case.alone], 1).transpose(0, 1).bfloat16()
            for at in (1, 2)
        )
        given = {"cu_seqlens_q": starts, "max_seqlen_q": 4, "cu_seqlens_k": ends(*lengths)}
    packed = Case(q, k, v, given, alone)
    packed.assert_right()
    out = torch.full_like(q, 7)
    packed.given(out=out).run()
    assert (out[-2:] == 7).all()
    assert not (out[:-2] == 7).all(-1).any()


def test_packed_keys_of_fixed_queries() -> None:
    """Of as many rows each, whose keys lie one sequence after the other."""
    case = fixed((17, 0, 40), rows=2)
    k, v = (
        torch.cat([one[at] for one in case.alone], 1).transpose(0, 1).bfloat16() for at in (1, 2)
    )
    given = {"cu_seqlens_k": ends(17, 0, 40)}
    Case(case.q, k, v, given, case.alone).assert_right()
    Case(case.q, k, v, {**given, "max_seqlen_k": 40}, case.alone).assert_right()


@pytest.mark.parametrize("extent", ["batch", "rows", "keys", "pages", "heads"])
@pytest.mark.parametrize("sinks", [False, True])
def test_an_extent_of_0_gives_nothing_or_zeros(extent: str, sinks: bool) -> None:
    q, k = random(2, 4, 1, 64), random(5, 2, 16, 64)
    given: dict[str, Any] = {
        "page_table": ints(0, 1, 2, 3).reshape(2, 2),
        "cache_seqlens": ints(0, 0),
    }
    if extent == "batch":
        q, given = q[:0], {name: value[:0] for name, value in given.items()}
    elif extent == "rows":
        q = q[:, :, :0]
    elif extent == "keys":
        given["page_table"] = given["page_table"][:, :0]
    elif extent == "pages":
        k = k[:0]
    else:
        q, k = q[:, :0], k[:, :0]
    told = torch.arange(q.shape[1]).float() if sinks else None
    out, lse = warploom.attention_decode(q, k, k, sinks=told, return_lse=True, **given)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert (out == 0).all()
    wanted = torch.full(lse.shape, -INF) if told is None else told[:, None].expand(lse.shape)
    assert torch.equal(lse, wanted)


def test_views_are_read_as_they_lie_and_the_result_lies_as_q_does() -> None:
    """Slices of a larger cache, of a larger table, and of one projection."""
    case = paged((17, 0, 40))
    room = torch.full((case.k.shape[0], 2, 2, 16, 64), torch.nan).bfloat16()
    room[:, 0], room[:, 1] = case.k, case.v
    table = torch.full((3, 7), 1 << 20, dtype=torch.int32)
    table[:, :3] = case.keywords["page_table"]
    together = random(3, 1, 12, 64)
    together[:, :, :4] = case.q.transpose(1, 2)
    q = together[:, :, :4].transpose(1, 2)
    viewed = Case(q, room[:, 0], room[:, 1], {**case.keywords, "page_table": table}, case.alone)
    viewed.assert_right()
    out, _ = viewed.given(page_table=table[:, :3]).run()
    assert torch.equal(out, case.run()[0])
    two = fixed((9, 9), rows=2)
    assert two.run()[0].stride() == two.q.stride()
    assert not two.q.is_contiguous()


def test_queries_that_no_kernel_can_read_are_copied_and_told() -> None:
    case = fixed((9, 20))
    odd = torch.empty(2, 4, 1, 65).bfloat16()[..., :64]
    odd.copy_(case.q)
    assert torch.equal(Case(odd, case.k, case.v, case.keywords).run()[0], case.run()[0])
    told = warploom.explain(warploom.attention_decode, odd, case.k, case.v, **case.keywords)
    assert told.copies == ("q",)


def test_the_result_goes_where_it_is_told() -> None:
    case = fixed((9, 20), rows=3)
    out = torch.empty_like(case.q)
    found = warploom.attention_decode(case.q, case.k, case.v, out=out, **case.keywords)
    assert found is out
    assert torch.equal(out, case.run()[0])


def test_what_is_past_a_length_may_be_anything() -> None:
    """Entries of a table that lead nowhere, as schedulers leave them, are not looked at."""
    case = paged((17, 0, 16))
    table = case.keywords["page_table"].clone()
    table[0, 2:], table[1], table[2, 1:] = -1, 1 << 30, -7
    case.given(page_table=table).assert_right()


@pytest.mark.parametrize("keys", [fixed, paged])
@pytest.mark.parametrize("given", [{"cache_leftpad": ints(5, 30)}, {"window": (7, None)}], ids=str)
def test_what_is_before_all_that_rows_see_may_be_anything(
    keys: Callable[..., Case], given: dict[str, Any]
) -> None:
    """Padding on the left that was never written, and scales of it, are NaN times a weight of 0."""
    case = keys((17, 40), rows=2).given(**given)
    case.assert_right()
    for i, length in enumerate((17, 40)):
        hidden = length - 2 - 7 if "window" in given else int(given["cache_leftpad"][i])
        table = case.keywords.get("page_table")
        for at in range(hidden):
            where = (
                (i, slice(None), at)
                if table is None
                else (table[i, at // 16], slice(None), at % 16)
            )
            case.k[where], case.v[where] = torch.nan, torch.nan
    case.assert_right()
    scales = torch.ones(case.k.shape[:-1])
    scales[case.k.isnan().any(-1)] = torch.nan
    quantized = Case(case.q, case.k.to(E4M3), case.v.to(E4M3), case.keywords)
    out, lse = quantized.given(scale_k=scales, scale_v=scales).run()
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_autocast_converts_queries_and_no_cache() -> None:
    case = fixed((9, 20))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = warploom.attention_decode(case.q.float(), case.k, case.v, **case.keywords)
    assert torch.equal(out, case.run()[0])


def test_a_sequence_is_what_it_is_alone() -> None:
    """The reference of batch_invariant, and of all: neighbours change nothing."""
    case = paged((17, 40, 3)).given(batch_invariant=True)
    whole = case.run()[0]
    for i in range(3):
        given = {name: value[i : i + 1] for name, value in paged((17, 40, 3)).keywords.items()}
        out = warploom.attention_decode(case.q[i : i + 1], case.k, case.v, **given)
        assert torch.equal(out, whole[i : i + 1])
