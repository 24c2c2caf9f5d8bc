"""Dropout on the CPU: a mask says what is dropped, in both passes, on every path, in every call."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import warploom
from warploom.errors import ProblemError
from warploom.runtime.families._attention.block_mask import of_dense
from warploom.runtime.families._attention.dropout import Dropout, keep_of

BF16 = torch.bfloat16
H200: dict[str, Any] = {"gpu": "NVIDIA H200"}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


SHOWN = random(2, 1, 19, 37) > -0.5
SCORES: dict[str, dict[str, Any]] = {  # what changes scores, or says which count
    "mask": {"mask": SHOWN},
    "mask of columns": {"mask": random(2, 1, 1, 37) > -0.5, "causal": "bottom_right"},
    "bias": {"bias": random(1, 4, 19, 37)},
    "bias, mask": {"bias": random(2, 1, 1, 37).to(BF16), "mask": SHOWN, "window": (9, 3)},
    "slopes": {"alibi_slopes": random(2, 4).abs(), "causal": "top_left"},
    "slopes, bias, mask": {
        "alibi_slopes": random(4).abs(),
        "bias": random(4, 19, 37),
        "mask": SHOWN,
    },
    "blocks": {"block_mask": of_dense(SHOWN, (16, 16))},
}
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": "bottom_right"},
    "window": {"window": (3, 1)},
    "softcap": {"softcap": 2.0, "causal": "top_left"},
    **SCORES,
}


def state(seed: int = 0) -> torch.Tensor:
    return torch.randint(1 << 62, (2,), generator=torch.Generator().manual_seed(seed))


def leaves() -> list[torch.Tensor]:
    """q, k and v: four query heads over two."""
    shapes = ((2, 4, 19, 40), (2, 2, 37, 40), (2, 2, 37, 40))
    given = [random(*shape, seed=i).to(BF16) for i, shape in enumerate(shapes)]
    return [one.requires_grad_() for one in given]


def shown(keywords: dict[str, Any]) -> torch.Tensor:
    """Which of 19 rows attends to which of 37 columns, by the words of the documentation."""
    row, column = torch.arange(19)[:, None], torch.arange(37)
    diagonal = row if keywords.get("causal") == "top_left" else row + 18
    left, right = keywords.get("window", (99, 0 if "causal" in keywords else 99))
    given = SHOWN if "block_mask" in keywords else keywords.get("mask", torch.tensor(True))
    return (column >= diagonal - left) & (column <= diagonal + right) & given


def expected(
    given: list[torch.Tensor], keywords: dict[str, Any], kept: torch.Tensor, keep: float
) -> torch.Tensor:
    q, k, v, *bias = given
    s = q @ k.repeat_interleave(2, 1).mT * 40**-0.5
    if cap := keywords.get("softcap"):
        s = cap * torch.tanh(s / cap)
    if "alibi_slopes" in keywords:
        distance = (torch.arange(19)[:, None] + 18 - torch.arange(37)).abs()
        s = s - keywords["alibi_slopes"].double()[..., None, None] * distance
    s = (s + bias[0] if bias else s).masked_fill(~shown(keywords), -torch.inf)
    p = torch.softmax(s, -1).nan_to_num(0.0)
    return (p * kept / keep) @ v.repeat_interleave(2, 1)


@pytest.mark.parametrize("name", CALLS)
def test_results_and_gradients_are_those_of_weights_that_the_mask_keeps(name: str) -> None:
    given, keywords = leaves(), dict(CALLS[name])
    told = {"dropout_p": 0.3, "dropout_state": state()}
    if "bias" in keywords:
        keywords["bias"] = keywords["bias"].clone().requires_grad_()
        given.append(keywords["bias"])
    out, lse = warploom.attention(*given[:3], return_lse=True, **keywords, **told)
    arriving = random(*out.shape).to(BF16)
    found = (out, *torch.autograd.grad(out, given, arriving))
    kept = warploom.dropout_mask(state(), 0.3, 2, 4, 19, 37)
    wide = [one.detach().double().requires_grad_() for one in given]
    result = expected(wide, keywords, kept, keep_of(0.3))
    gradients = torch.autograd.grad(result, wide, arriving.double())
    for one, wanted in zip(found, (result, *gradients), strict=True):
        assert one.shape == wanted.shape
        # A number of a bias has the sum of what out, in bf16, is off in each row that it is for.
        rows = 2 * 4 * 19 * 37 // wanted.numel() if one is found[-1] and len(given) > 3 else 1
        assert torch.allclose(one.double(), wanted, rtol=2e-2, atol=3e-2 * rows**0.5)
    assert torch.equal(lse, warploom.attention(*given[:3], return_lse=True, **keywords)[1])


def test_packed_sequences_are_batches_that_begin_at_0() -> None:
    lengths = [5, 0, 33]
    offsets = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    q, k, v = (random(38, 2, 40, seed=i).to(BF16) for i in range(3))
    told: dict[str, Any] = {"dropout_p": 0.5, "dropout_state": state()}
    packed = {"cu_seqlens_q": offsets, "cu_seqlens_k": offsets, "max_seqlen_q": 33}
    out = warploom.attention(q, k, v, max_seqlen_k=33, **packed, **told)
    whole = warploom.dropout_mask(state(), 0.5, 3, 2, 33, 33)
    for index, (first, last) in enumerate(itertools.pairwise(offsets.tolist())):
        if first == last:
            continue
        one = [t[first:last].double().transpose(0, 1) for t in (q, k, v)]
        p = torch.softmax(one[0] @ one[1].mT * 40**-0.5, -1)
        p = p * whole[index, :, : last - first, : last - first] * 2
        assert torch.allclose(out[first:last].double().transpose(0, 1), p @ one[2], atol=3e-2)


def test_the_mask_is_a_function_of_the_place_alone() -> None:
    whole = warploom.dropout_mask(state(), 0.4, 3, 5, 70, 90)
    part = Dropout(state(), keep_of(0.4), 5, batch=1, row=21, column=37)
    assert torch.equal(part.kept(slice(0, 2), slice(4, 40), 50), whole[1:, :, 25:61, 37:87])
    for other in (
        torch.stack([state()[0], state()[1] + 1]),
        torch.stack([state()[0] + 1, state()[1]]),
    ):
        assert not torch.equal(warploom.dropout_mask(other, 0.4, 3, 5, 70, 90), whole)
    planes = whole.flatten(0, 1).flatten(1).double()
    correlation = torch.corrcoef(planes) - torch.eye(15)
    assert float(correlation.abs().max()) < 5 / math.sqrt(70 * 90)


@pytest.mark.parametrize(
    "p", [2.0**-16, 0.05, 0.1, 1 / 3, 0.5, 0.999, 1 - 2.0**-9, 1 - 3 * 2.0**-16, 1 - 2.0**-16]
)
def test_so_many_are_kept_as_said(p: float) -> None:
    kept = warploom.dropout_mask(state(7), p, 2, 8, 512, 512).double()
    keep = keep_of(p)
    assert abs(keep - (1 - p)) <= 2.0**-17
    deviation = math.sqrt(keep * (1 - keep) / kept.numel())
    assert abs(float(kept.mean()) - keep) < 4 * deviation


def pairs(kept: torch.Tensor, *apart: int) -> int:
    """How many pairs are kept of those that differ in these dimensions alone."""
    together = kept.long().sum(apart)
    return int((together * (together - 1) // 2).sum())


def test_weights_that_share_bits_correlate_as_said_and_others_do_not() -> None:
    # Of 2^-9 each is kept where its 8 bits are 0 and what rounds rounds up, as it does half of the
    # time. Two are with 2^-18 where all of that is their own, with 2^-17 where they share what
    # rounds, and with 2^-15 where they share the two lowest bits, too.
    kept = warploom.dropout_mask(state(3), 1 - 2.0**-9, 1, 16, 1024, 1024)
    # [head, row of patches, 8 rows, which 4 of them, 2 of these, row, column of patches, 8 columns,
    # which 4 of them, column]
    places = kept.reshape(16, 64, 2, 2, 2, 2, 64, 2, 2, 4)
    of_four, of_all = pairs(places, 4, 8), pairs(places, 2, 4, 5, 7, 8, 9)
    groups = 16 * 64 * 64 * 2
    for found, expected in (
        (of_four, groups * 32 * 6 * 2.0**-15),
        (of_all - of_four, groups * (128 * 127 // 2 - 32 * 6) * 2.0**-17),
    ):
        assert abs(found - expected) < 6 * math.sqrt(expected)
    rows, columns = kept.roll(4, -2), kept.roll(16, -1)
    for other in (rows, columns, kept.roll(16, -2), kept.roll((16, 16), (-2, -1)), kept.roll(1, 1)):
        expected = kept.numel() * 2.0**-18
        assert abs(int((kept & other).sum()) - expected) < 6 * math.sqrt(expected)


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_no_two_weights_of_a_patch_tell_of_each_other(p: float) -> None:
    # A bit that two words share by mistake would be seen, and so would planes of one word.
    kept = warploom.dropout_mask(state(5), p, 1, 16, 1024, 1024)
    patches = kept.reshape(16, 64, 16, 64, 16).permute(2, 4, 0, 1, 3).flatten(2).flatten(0, 1)
    correlation = torch.corrcoef(patches.float()) - torch.eye(256)
    assert float(correlation.abs().max()) < 6 / math.sqrt(patches.shape[1])


def test_no_four_weights_of_a_patch_tell_of_each_other() -> None:
    # At a half one drawn bit says whether a weight is dropped. These come from one sequence of
    # numbers in the eight words of a patch: a few together must be as even as each.
    kept = warploom.dropout_mask(state(9), 0.5, 1, 4, 1024, 1024)
    # [head, row of patches, 8 rows, which 2 of them, row, column of patches, 8 columns, which 4 of
    # them, column]
    places = kept.reshape(4, 64, 2, 4, 2, 64, 2, 2, 4)
    words = places.permute(3, 7, 0, 1, 2, 4, 5, 6, 8).reshape(8, -1).float() * 2 - 1
    for count in (1, 2, 3, 4):
        for chosen in itertools.combinations(range(8), count):
            even = float(words[list(chosen)].prod(0).mean())
            assert abs(even) < 5.5 / math.sqrt(words.shape[1])


@pytest.mark.parametrize("p", [0.1, 1 / 3])
def test_sums_of_rows_and_of_columns_vary_as_those_of_independent_weights(p: float) -> None:
    kept = warploom.dropout_mask(state(11), p, 2, 8, 512, 512).double()
    variance = keep_of(p) * (1 - keep_of(p)) * 512
    for sums in (kept.sum(-1), kept.sum(-2)):
        assert abs(float(sums.var()) / variance - 1) < 6 * math.sqrt(2 / sums.numel())


def test_more_are_kept_of_the_same_where_fewer_are_dropped() -> None:
    most = warploom.dropout_mask(state(), 0.2, 1, 2, 40, 40)
    fewer = warploom.dropout_mask(state(), 0.6, 1, 2, 40, 40)
    assert bool((most | ~fewer).all())


def test_a_state_is_drawn_from_torchs_generator() -> None:
    given = leaves()
    torch.manual_seed(1)
    first, second = (warploom.attention(*given, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(warploom.attention(*given, dropout_p=0.5), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_drops_the_same_when_it_computes_again(reentrant: bool) -> None:
    given = leaves()

    def layer(*given: torch.Tensor) -> torch.Tensor:
        return warploom.attention(*given, dropout_p=0.4)

    torch.manual_seed(3)
    out = checkpoint(layer, *given, use_reentrant=reentrant)
    out.float().square().sum().backward()
    found = [one.grad for one in given]
    torch.manual_seed(3)
    plain = torch.autograd.grad(layer(*given).float().square().sum(), given)
    assert all(map(torch.equal, found, plain))  # type: ignore[arg-type]


@pytest.mark.parametrize("with_sinks", [False, True])
def test_torch_compile_takes_and_differentiates_it(with_sinks: bool) -> None:
    given = [*leaves(), *([random(4).requires_grad_()] if with_sinks else [])]

    def loss(*given: torch.Tensor) -> torch.Tensor:
        sinks = given[3] if with_sinks else None
        told = {"dropout_p": 0.3, "dropout_state": state_given, "sinks": sinks}
        return warploom.attention(*given[:3], **told).float().square().sum()

    state_given = state()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(run(*given), given)
    assert all(map(torch.equal, found, torch.autograd.grad(loss(*given), given)))


def test_compiled_calls_draw_a_state_each() -> None:
    given = leaves()
    run = torch.compile(
        lambda *given: warploom.attention(*given, dropout_p=0.5),
        fullgraph=True,
        backend="aot_eager",
    )
    assert not torch.equal(run(*given), run(*given))


def test_torch_finds_no_fault_with_the_operators() -> None:
    given = leaves()
    function = ("bottom_right", 3, None, 2.0, None, None, None, None, None)
    arguments = (*given, *function, None, None, None, None, None, None, None, state(), 0.3)
    torch.library.opcheck(torch.ops.warploom.attention.default, arguments)
    out, lse = torch.ops.warploom.attention(*arguments)
    results = (torch.randn_like(out), None, *given, out, lse)
    results = tuple(one if one is None else one.detach() for one in results)
    backward = (*results, *function, False, None, None, None, None, None, state(), 0.3)
    torch.library.opcheck(torch.ops.warploom.attention_backward.default, backward)


def test_where_nothing_is_dropped_a_state_plays_no_part() -> None:
    given = leaves()
    plain = warploom.attention(*given)
    assert torch.equal(warploom.attention(*given, dropout_p=2.0**-20), plain)
    assert torch.equal(warploom.attention(*given, dropout_p=0, dropout_state=state()), plain)
    assert bool(warploom.dropout_mask(state(), 0.0, 1, 1, 3, 4).all())


@pytest.mark.parametrize(
    ("p", "given", "message"),
    [
        (1.0, None, "dropout_p 1.0.*at least 0 and less than 1"),
        (-0.1, None, "dropout_p -0.1"),
        (math.nan, None, "dropout_p nan"),
        (True, None, "dropout_p True"),
        ("0.1", None, "dropout_p '0.1'"),
        (0.1, torch.zeros(2), r"torch.float32.*int64 \[2\]"),
        (0.1, torch.zeros(3, dtype=torch.int64), r"dropout_state \[3\]"),
        (0.1, torch.zeros(2, dtype=torch.int64, device="meta"), "on the device of q|device"),
        (0.1, torch.zeros(4, dtype=torch.int64)[::2], "contiguous"),
        (0.1, 17, "dropout_state 17"),
    ],
    ids=str,
)
def test_probabilities_and_states_that_are_none_are_named(
    p: object, given: object, message: str
) -> None:
    with pytest.raises(ProblemError, match=message):
        warploom.attention(*leaves(), dropout_p=p, dropout_state=given)  # type: ignore[call-overload]


@pytest.mark.parametrize("name", SCORES)
def test_what_changes_scores_has_kernels_with_dropout_in_both_passes(name: str) -> None:
    given, keywords = leaves(), dict(SCORES[name])
    if "bias" in keywords:
        keywords["bias"] = keywords["bias"].clone().requires_grad_()
    without = warploom.explain(*given, **keywords, **H200)
    found = warploom.explain(*given, dropout_p=0.1, **keywords, **H200)
    for one, other in (
        (found.kernel, without.kernel),
        (str(found.backward), str(without.backward)),
    ):
        assert "_dropout" in one
        assert "_dropout" not in other
    assert ("bias_gradient" in str(found.backward)) == ("bias" in keywords)


def test_the_kernels_are_those_of_dropout() -> None:
    found = warploom.explain(*leaves(), dropout_p=0.1, gpu="NVIDIA H200")
    assert "_dropout" in found.kernel
    assert "_dropout" in str(found.backward)
    q = torch.empty(1, 8, 1, 128, dtype=BF16, device="meta")
    k = torch.empty(1, 2, 8192, 128, dtype=BF16, device="meta")
    few = warploom.explain(q, k, k, dropout_p=0.1, gpu="NVIDIA H200").kernel
    assert few.startswith("attention_forward")
