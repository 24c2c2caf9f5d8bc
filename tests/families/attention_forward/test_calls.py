"""On CPU tensors attention is exact: masks, heads, packed lengths, no extent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_calls import BF16, FP16, INF, Recorder, assert_right, expected, operands, random

import warploom
from warploom.errors import ProblemError

MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "top left": {"causal": "top_left"},
    "bottom right": {"causal": "bottom_right"},
    "window": {"window": (3, 2)},
    "left only": {"window": (2, None)},
    "right only": {"window": (None, 4)},
    "diagonal only": {"window": (0, 0)},
    "window, top left": {"window": (3, 2), "causal": "top_left"},
    "window, bottom right": {"window": (3, None), "causal": "bottom_right"},
    "wider than the sequence": {"window": (1000, 1 << 40)},
    "softcap": {"softcap": 0.7},
    "all": {"softcap": 2.0, "causal": "bottom_right", "window": (5, 1), "scale": 0.3},
}


@pytest.mark.parametrize("lengths", [(7, 7), (5, 9), (9, 5), (1, 8), (8, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_a_mask_shows_what_its_words_say(name: str, lengths: tuple[int, int]) -> None:
    assert_right(*operands(*lengths), **MASKS[name])


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_consecutive_query_heads_share_a_head_of_keys(
    heads: int, kv_heads: int, dtype: torch.dtype
) -> None:
    q, k, v = operands(6, 11, heads=heads, kv_heads=kv_heads)
    assert_right(q.to(dtype), k.to(dtype), v.to(dtype))


@pytest.mark.parametrize("dim", [8, 32, 40, 72, 256])
def test_any_multiple_of_8_is_a_head_dimension_and_decides_the_scale(dim: int) -> None:
    assert_right(*operands(5, 6, dim=dim), causal="bottom_right")


def test_causal_true_is_either_alignment_of_equal_lengths() -> None:
    q, k, v = operands(9, 9)
    out = warploom.attention(q, k, v, causal=True)
    assert torch.equal(out, warploom.attention(q, k, v, causal="top_left"))
    assert torch.equal(out, warploom.attention(q, k, v, causal="bottom_right"))
    assert not torch.equal(out, warploom.attention(q, k, v))


def test_it_is_the_function_that_torch_has() -> None:
    q, k, v = operands(33, 33)
    theirs = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert torch.allclose(warploom.attention(q, k, v, causal=True).double(), theirs, atol=2e-2)


def test_large_scores_do_not_overflow() -> None:
    q, k, v = operands(5, 9)
    assert_right(q * 100, k * 100, v, scale=1.0)
    out = warploom.attention(q * 100, k * 100, v, scale=1.0)
    assert out.isfinite().all()


@pytest.mark.parametrize(
    ("batch", "heads", "seq_q", "seq_k"), [(0, 4, 5, 6), (2, 0, 5, 6), (2, 4, 0, 6), (2, 4, 5, 0)]
)
def test_an_extent_of_0_gives_nothing_or_zeros(
    batch: int, heads: int, seq_q: int, seq_k: int
) -> None:
    q, k, v = operands(seq_q, seq_k, batch=batch, heads=heads, kv_heads=heads)
    out, lse = warploom.attention(q, k, v, causal="bottom_right", return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    assert (out == 0).all()
    assert (lse == -INF).all()


# ---- Packed lengths ------------------------------------------------------------------------------


def offsets(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("name", ["none", "top left", "bottom right", "window", "all"])
def test_packed_sequences_are_as_if_each_were_alone(name: str) -> None:
    lengths_q, lengths_k = [5, 0, 1, 8, 3], [7, 4, 6, 3, 0]
    q = random(sum(lengths_q), 4, 40)
    k, v = (random(sum(lengths_k), 2, 40, seed=seed) for seed in (1, 2))
    out, lse = warploom.attention(
        q,
        k,
        v,
        cu_seqlens_q=offsets(lengths_q),
        cu_seqlens_k=offsets(lengths_k),
        max_seqlen_q=8,
        max_seqlen_k=7,
        return_lse=True,
        **MASKS[name],
    )
    assert (out.shape, lse.shape) == (q.shape, (4, len(q)))
    rows, columns = 0, 0
    for length_q, length_k in zip(lengths_q, lengths_k, strict=True):
        at_q, at_k = slice(rows, rows + length_q), slice(columns, columns + length_k)
        one = [t[at].transpose(0, 1)[None] for t, at in ((q, at_q), (k, at_k), (v, at_k))]
        wanted, wanted_lse = expected(*one, MASKS[name])  # type: ignore[arg-type]
        assert torch.allclose(out[at_q].transpose(0, 1)[None].double(), wanted, atol=2e-2)
        assert torch.allclose(lse[None, :, at_q].double(), wanted_lse, atol=1e-5)
        rows, columns = rows + length_q, columns + length_k


def test_packed_causal_true_takes_one_cu_seqlens_for_both() -> None:
    q, k, v = random(9, 4, 40), random(9, 4, 40, seed=1), random(9, 4, 40, seed=2)
    one, longest = offsets([4, 5]), {"max_seqlen_q": 5, "max_seqlen_k": 5}
    both = {"cu_seqlens_q": one, "cu_seqlens_k": one, **longest}
    named = warploom.attention(q, k, v, causal="top_left", **both)
    assert torch.equal(warploom.attention(q, k, v, causal=True, **both), named)
    with pytest.raises(ProblemError, match="name the alignment"):
        warploom.attention(q, k, v, causal=True, **both | {"cu_seqlens_k": one.clone()})
    plan = warploom.plan_attention(q, k, v, causal=True, softcap=2.0, **both)
    recorder = plan.launch = Recorder()  # type: ignore[assignment]
    out, lse = plan(q, k, v, causal=True, softcap=3.0, **both)
    addresses = tuple(t.data_ptr() for t in (q, k, v, one, one, out, lse))
    assert recorder.given == [(addresses, (40**-0.5, 3.0))]
