"""Calls on the CPU: what they write and return, what is copied and planned."""

from __future__ import annotations

import append_reference
import pytest
import torch
from append_arguments import BF16, CASES, E4M3, INTEGERS, assert_appended, given

import warploom
from warploom.generator.families.attention_append import AttentionAppendShape
from warploom.runtime import plan
from warploom.runtime.families import family
from warploom.runtime.families.attention_append.call import AttentionAppendCall

REQUIRED = AttentionAppendCall.declaration.required

# ---- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_where_it_belongs_and_nothing_else_changes(name: str) -> None:
    assert_appended(given(**CASES[name]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("packed", [(), (2, 0, 3, 1)], ids=str)
def test_q_is_turned_by_its_positions_like_k(packed: tuple[int, ...], interleaved: bool) -> None:
    arguments = given(packed=packed, rotary=16, interleaved=interleaved)
    call = AttentionAppendCall(**arguments)
    found = warploom.append_kv_cache(**arguments)
    assert found is not None and found.is_contiguous() and found.shape == call.q.shape  # type: ignore[union-attr]
    for sequence, index, token in append_reference.tokens(call):
        for head in range(4):
            row = append_reference.of(call.q, call, sequence, index, token, head)  # type: ignore[arg-type]
            wanted = append_reference.turned(
                row.float(), call, int(call.lengths[sequence]) + index
            ).to(BF16)
            got = append_reference.of(found, call, sequence, index, token, head)
            assert torch.equal(got, wanted)


def test_q_may_have_other_rows_than_k_and_is_turned_in_its_place() -> None:
    for seq_q in (1, 5):
        arguments = given(rotary=32)
        q = torch.randn(4, 3, seq_q, 32).to(BF16)
        wider = {**given(seq=5, rotary=32), "q": torch.randn(4, 3, 5, 32).to(BF16)}
        wider["q"][:, :, :seq_q] = q
        wider |= {name: arguments[name] for name in ("cos", "sin")}
        expected = warploom.append_kv_cache(**wider)
        found = warploom.append_kv_cache(**{**arguments, "q": q, "out": q})
        assert expected is not None and found is q
        assert torch.equal(found, expected[:, :, :seq_q])


def test_q_in_its_place_may_lie_beside_k_and_v() -> None:
    """As a product of all three leaves them."""
    arguments = given(rotary=32, seq=1)
    whole = torch.randn(4, 1, 8, 32).to(BF16)
    q, k, v = (one.transpose(1, 2) for one in whole.split([4, 2, 2], 2))
    arguments |= {"q": q, "k": k, "v": v}
    expected = warploom.append_kv_cache(**arguments)
    found = warploom.append_kv_cache(**arguments, out=q)
    assert found is q and expected is not None and torch.equal(found, expected)


def test_a_rotation_is_the_one_of_complex_numbers() -> None:
    """Held against float64, beside the reference that has our own order of roundings."""
    arguments = given(rotary=32, interleaved=True)
    call = AttentionAppendCall(**arguments)
    found = warploom.append_kv_cache(**arguments)
    assert found is not None and call.q is not None and call.cos is not None
    angle = torch.complex(call.cos.double(), call.sin.double())  # type: ignore[union-attr]
    for sequence, length in enumerate(call.lengths.tolist()):
        turn = angle[length : length + 2]
        pairs = torch.view_as_complex(call.q[sequence].double().unflatten(-1, (-1, 2)))  # type: ignore[no-untyped-call]
        wanted = torch.view_as_real(pairs * turn).flatten(-2)
        torch.testing.assert_close(found[sequence].double(), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("cache", [E4M3, torch.int8])
def test_scales_of_tokens_bring_rows_back(cache: torch.dtype) -> None:
    arguments = given(cache=cache, scales="token", seq=5, rows=32)
    arguments["k"] *= torch.tensor([1e-4, 1.0, 30.0, 0.0, 1e4])[:, None]
    warploom.append_kv_cache(**arguments)
    for sequence, length in enumerate(arguments["lengths"].tolist()):
        rows = slice(length, length + 5)
        cached = arguments["k_cache"][sequence, :, rows].float()
        back = cached * arguments["scale_k"][sequence, :, rows, None]
        new = arguments["k"][sequence].float()
        off = (back - new).abs() / new.abs().amax(-1, keepdim=True).clamp_min(1e-30)
        assert off.max() <= (1 / 254 if cache == torch.int8 else 2**-4) * 1.001


def test_what_is_no_number_or_too_large_is_kept_apart() -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, 500.0, -1e4, -0.0, 2**-10])
    for cache, wanted in (
        (E4M3, [torch.nan, 448.0, -448.0, 448.0, -448.0, -0.0, 2**-9]),
        (torch.int8, [0.0, 127.0, -128.0, 127.0, -128.0, 0.0, 0.0]),
    ):
        arguments = given((0,), 1, cache=cache, kv_heads=1, scales="tensor")
        arguments["scale_k"] = arguments["scale_v"] = torch.tensor(1.0)
        arguments["v"][..., :7] = special
        warploom.append_kv_cache(**arguments)
        found = arguments["v_cache"][0, 0, 0, :7].float()
        torch.testing.assert_close(found[:6], torch.tensor(wanted[:6]), equal_nan=True)
        assert found[6] in (0.0, wanted[6])  # half of the smallest: to even
        arguments = given((0,), 1, cache=cache, kv_heads=1, scales="token")
        arguments["k"][..., :3] = special[:3]
        warploom.append_kv_cache(**arguments)
        assert arguments["scale_k"][0, 0, 0].isfinite()
        assert (arguments["k_cache"][0, 0, 0, 3:].float().abs() <= 1).all()


def test_pages_that_there_are_not_are_not_written() -> None:
    for wrong in (-1, 99, 15, 2**31 - 1, -(2**31)):  # of 15 pages
        arguments = given(page=8)
        arguments["page_table"][2, 2] = wrong  # where row 17 is
        assert_appended(arguments)


def test_tokens_past_the_last_sequence_are_not_written() -> None:
    """A captured graph has room for more tokens than there may be."""
    for starts in ([0, 1, 3, 3, 5], [0, 0, 0, 0, 0], [2, 3, 4, 5, 6]):
        arguments = given(packed=(2, 2, 2, 2))
        arguments["cu_seqlens"] = torch.tensor(starts, dtype=torch.int32)
        assert_appended(arguments)


def test_lengths_with_the_new_rows_are_written_too() -> None:
    for packed, wanted in (((), [6, 3, -1, 12]), ((1, 0, 5, 2), [4, 0, -1, 11])):
        arguments = given(packed=packed, seq=3)
        arguments["lengths"][2] = -1
        after = torch.zeros(4, dtype=torch.int32)
        assert warploom.append_kv_cache(**arguments, lengths_after=after) is None
        assert after.tolist() == wanted


def test_caches_may_lie_between_each_others_rows() -> None:
    """As vLLM's do, of one tensor."""
    room = torch.zeros(15, 2, 8, 2, 32).to(BF16)
    arguments = {**given(page=8), "k_cache": room[:, 0].mT.mT.transpose(1, 2)}
    arguments |= {"k_cache": room[:, 0].transpose(1, 2), "v_cache": room[:, 1].transpose(1, 2)}
    assert_appended(arguments)


def test_a_whole_cache_as_one_page_is_an_index_of_sequences() -> None:
    arguments = given(seq=1)
    order = torch.tensor([[2], [0], [3], [1]], dtype=torch.int32)
    assert_appended({**arguments, "page_table": order})


# ---- Plans ---------------------------------------------------------------------------------------


def test_only_what_cannot_be_read_is_copied() -> None:
    plan.forget()
    arguments = given(rotary=32, page=8)
    wide = torch.randn(4, 2, 2, 40).to(BF16)
    cos_sin = torch.cat((arguments["cos"], arguments["sin"]), -1)
    arguments |= {"cos": cos_sin[:, :16], "sin": cos_sin[:, 16:], "k": wide[..., 3:35]}
    arguments |= {"lengths": arguments["lengths"].repeat_interleave(2)[::2]}
    arguments |= {"page_table": arguments["page_table"].t().contiguous().t()}
    assert_appended(arguments)
    (planned,) = plan.known.values()
    assert planned.copies == ("k", "lengths", "page_table")


def test_plans_are_kept_by_all_that_decides_them() -> None:
    plan.forget()
    for _ in range(2):
        for case in ("plain", "one token", "pages", "packed", "halves", "interleaved", "e4m3"):
            warploom.append_kv_cache(**given(**CASES[case]))
    assert len(plan.known) == 7


def test_a_call_is_explained_for_a_gpu_that_is_not_here() -> None:
    arguments = {
        name: one.to("meta") if isinstance(one, torch.Tensor) else one
        for name, one in given(page=8, rotary=32, cache=E4M3, scales="token").items()
    }
    operands = [arguments.pop(name) for name in REQUIRED]
    told = warploom.explain(warploom.append_kv_cache, *operands, gpu="h200", **arguments)
    name = "bf16_d32_e4m3_scales_token_rotary_halves_queries_paged_threads128_"
    assert told.kernel.startswith(f"attention_append_sm90a_{name}")


def test_a_trial_holds_all_that_is_written() -> None:
    runtime = family("attention_append")
    call = AttentionAppendCall(**given(page=8, rotary=32, cache=E4M3, scales="token"))
    spec = call.draft(plan.targets.at_hand(-1)).choice.spec
    for shape in (AttentionAppendShape(3, 2, 4), AttentionAppendShape(300, 1, 1)):
        trial = runtime.trial(spec.operation, shape, "cpu", 1)
        assert trial.error_share(spec) == 0
        assert len(trial.results) == 5
        for result in trial.results:
            before = result.clone()
            result.view(INTEGERS[result.dtype.itemsize])[0, 0, 0] += 1
            assert trial.held_share() > 1
            result.copy_(before)
