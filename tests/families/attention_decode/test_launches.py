"""What a kernel is chosen for and told: operations with the least work, and where tensors lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_calls import E4M3, Case, ends, fixed, ints, paged, random

import warploom
from warploom.generator.families._attention import UNBOUNDED
from warploom.generator.families.attention_decode import DecodeOperation, DecodeProblem
from warploom.generator.launches import NO_GPU
from warploom.runtime.call import Draft
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall, Details


def drafted(case: Case) -> Draft[Details]:
    return AttentionDecodeCall(case.q, case.k, case.v, **case.keywords).draft(NO_GPU)


def operation(case: Case) -> DecodeOperation:
    found = drafted(case).choice.spec.operation
    assert isinstance(found, DecodeOperation)
    return found


def problem(case: Case) -> DecodeProblem:
    found = drafted(case).problem
    assert isinstance(found, DecodeProblem)
    return found


@pytest.mark.parametrize(
    ("given", "rows", "mask"),
    [
        ({}, 1, "none"),  # one row attends to all keys
        ({}, 2, "causal"),
        ({"causal": False}, 2, "none"),
        ({"causal": False, "window": (None, 1)}, 2, "none"),
        ({"causal": False, "window": (None, 1)}, 3, "causal"),
        ({"window": (39, None)}, 1, "none"),  # as many as there can be
        ({"window": (38, None)}, 1, "window"),
        ({"window": (0, 0)}, 1, "window"),
    ],
)
def test_a_bound_that_leaves_nothing_out_is_none(
    given: dict[str, Any], rows: int, mask: str
) -> None:
    assert operation(fixed((17, 40), rows=rows).given(**given)).mask == mask


def test_an_operation_has_what_a_call_has_and_nothing_else() -> None:
    assert operation(fixed((40,)).given(cache_seqlens=None)) == DecodeOperation("bf16", 64)
    full = paged((17, 40), cache=E4M3, page=32).given(
        cache_leftpad=ints(0, 1),
        scale_k=torch.ones(2),
        scale_v=torch.ones(2),
        softcap=2.0,
        window=(3, None),
        sinks=torch.ones(4).bfloat16(),
        batch_invariant=True,
    )
    assert operation(full) == DecodeOperation(
        "bf16",
        64,
        cache="e4m3",
        scales="head",
        page=32,
        lengths=True,
        starts=True,
        mask="window",
        softcap=True,
        sinks="same",
        batch_invariant=True,
    )
    assert operation(full.given(sinks=torch.ones(4))).sinks == "fp32"
    packed = Case(
        random(3, 4, 64),
        *(random(23, 2, 64) for _ in "kv"),
        {"cu_seqlens_q": ends(2, 1), "max_seqlen_q": 2, "cu_seqlens_k": ends(17, 6)},
    )
    found = operation(packed)
    assert (found.queries, found.keys, found.lengths, found.mask) == (
        *["packed"] * 2,
        False,
        "causal",
    )


def test_scales_of_two_kinds_are_those_of_tokens() -> None:
    """A kernel has scales of one kind; strides of 0 make one of another."""
    one, heads, tokens = torch.ones(1), torch.ones(4)[::2], torch.ones(2, 40, 2).transpose(1, 2)
    case = fixed((17, 40), cache=torch.int8)
    kinds = {"tensor": one, "head": heads, "token": tokens}
    steps = {"tensor": (0, 0, 0), "head": (0, 2, 0), "token": (80, 1, 2)}
    for of_k in kinds:
        for of_v in kinds:
            told = case.given(scale_k=kinds[of_k], scale_v=kinds[of_v])
            found, scales = problem(told), operation(told).scales
            if of_k == of_v != "token":
                assert scales == "head"
                assert found.head_scale_stride == (2 if of_k == "head" else 0)
                assert found.strides_scale_k == (0, 0, 0)
            else:
                assert scales == "token"
                assert found.strides_scale_k == steps[of_k]
                assert found.strides_scale_v == steps[of_v]


def test_the_layout_of_pages_is_in_their_strides() -> None:
    hnd, nhd = problem(paged((17, 40))), problem(paged((17, 40), layout="NHD"))
    assert hnd.strides_k == hnd.strides_v == (2 * 16 * 64, 16 * 64, 64)
    assert nhd.strides_k == nhd.strides_v == (2 * 16 * 64, 64, 2 * 64)
    for found in (hnd, nhd):
        assert (found.entries, found.entry_rows, found.seq_k) == (8, 16, 48)
        assert (found.table_stride, found.total_q) == (3, 0)
    assert problem(paged((17, 40)).given(max_seqlen_k=41)).seq_k == 41
    wide = paged((17, 40))
    table = torch.zeros(2, 9, dtype=torch.int32)[:, :3]
    assert problem(wide.given(page_table=table)).table_stride == 9


def test_a_fixed_cache_is_an_entry_for_each_sequence() -> None:
    case = fixed((17, 40), rows=3)
    found = problem(case)
    assert (found.entries, found.entry_rows, found.seq_k, found.table_stride) == (2, 40, 40, 0)
    assert found.strides_q == found.strides_o == (3 * 4 * 64, 64, 4 * 64)
    assert found.strides_k == (2 * 40 * 64, 40 * 64, 64)
    assert (found.left, found.right) == (UNBOUNDED, 0)
    bounded = problem(case.given(max_seqlen_k=40, window=(5, 9)))
    assert (bounded.left, bounded.right, bounded.seq_k) == (5, 0, 40)
    small = Case(case.q, case.k[:, :, :20], case.v, {**case.keywords, "cache_seqlens": ints(1, 2)})
    small.v = small.v[:, :, :20]
    assert (problem(small).seq_k, problem(small).strides_k) == (20, (2 * 40 * 64, 40 * 64, 64))


def test_packed_tensors_are_one_entry() -> None:
    q, k = random(9, 4, 64), random(23, 2, 128)[..., :64]
    given = {"cu_seqlens_q": ends(2, 4), "max_seqlen_q": 4, "cu_seqlens_k": ends(17, 6)}
    found = problem(Case(q, k, k, given))
    assert (found.batch, found.seq_q, found.total_q) == (2, 4, 9)
    assert (found.entries, found.entry_rows, found.seq_k) == (1, 23, 23)
    assert found.strides_q == found.strides_o == (0, 64, 4 * 64)
    assert found.strides_k == (0, 128, 2 * 128)


def test_extents_of_1_have_strides_that_tma_takes() -> None:
    """Torch says anything of them: strides of 1, or of numbers that are no multiple of 16 bytes."""
    k = random(40, 64).as_strided((1, 1, 40, 64), (3, 7, 64, 1))
    q = random(4, 64).as_strided((1, 4, 1, 64), (5, 64, 9, 1))
    found = problem(Case(q, k, k, {"cache_seqlens": ints(17)}))
    for steps in (found.strides_q, found.strides_k, found.strides_v, found.strides_o):
        assert [step % 8 for step in steps] == [0, 0, 0]
    assert drafted(Case(q, k, k, {"cache_seqlens": ints(17)})).copies == ()


def test_a_batch_does_not_choose_the_kernel_of_results_that_must_not_depend_on_it() -> None:
    """Another kernel rounds otherwise: one sequence alone would not be what it is among others."""
    alone = paged((17,), columns=2, cache=E4M3)
    among = paged((17, 3, 400) * 40, columns=40, cache=E4M3)
    kernels = [drafted(one).choice.spec for one in (alone, among)]
    assert kernels[0] != kernels[1]
    kernels = [drafted(one.given(batch_invariant=True)).choice.spec for one in (alone, among)]
    assert kernels[0] == kernels[1]


@pytest.mark.parametrize("case", ["fixed", "paged", "packed"])
def test_launches_are_given_the_addresses_of_what_they_name(case: str) -> None:
    """One address too many, or two in another order, and a kernel reads pages as lengths."""
    one = {
        "fixed": fixed((17, 40)).given(cache_leftpad=ints(0, 1), sinks=torch.ones(4)),
        "paged": paged((17, 40), cache=E4M3).given(
            scale_k=torch.ones(2), scale_v=torch.ones(2), softcap=2.0, scale=0.5
        ),
        "packed": Case(
            random(3, 4, 64),
            *(random(23, 2, 64) for _ in "kv"),
            {"cu_seqlens_q": ends(2, 1), "max_seqlen_q": 2, "cu_seqlens_k": ends(17, 6)},
        ),
    }[case]
    call = AttentionDecodeCall(one.q, one.k, one.v, **one.keywords)
    found = call.draft(NO_GPU)
    results = call.results(found.details)
    addresses, scalars = call.arguments(found.details, results)
    kernels = call.declaration.kernels  # names of tensors in kernels, by those of keywords
    handed = {kernels[n]: x for n, x in one.keywords.items() if isinstance(x, torch.Tensor)}
    tensors = {"q": one.q, "k": one.k, "v": one.v, "o": results[0], "lse": results[1], **handed}
    assert addresses == tuple(tensors[name].data_ptr() for name in found.tensors)
    assert set(found.tensors) == set(tensors)
    told = dict(zip(found.scalars, scalars, strict=True))
    assert told == {"scale": 64**-0.5} | {
        name: one.keywords[name] for name in ("scale", "softcap") if name in one.keywords
    }


def test_explain_tells_of_a_gpu_that_is_not_here() -> None:
    """On tensors without memory, as a fleet is prepared."""
    case = paged((17, 40))
    given = {name: one.to("meta") for name, one in case.keywords.items()}
    q, k, v = (one.to("meta") for one in (case.q, case.k, case.v))
    told = warploom.explain(warploom.attention_decode, q, k, v, gpu="NVIDIA H200", **given)
    assert told.kernel.startswith("attention_decode_sm90a_bf16_dim64")
    assert "page16" in told.kernel
    assert told.grid > 0
    assert told.gradients is None
