"""On CPU tensors attention is exact: masks, heads, packed lengths, outputs, plans, no extent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError

BF16, FP16 = torch.bfloat16, torch.float16
INF = torch.inf


def random(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def operands(
    seq_q: int, seq_k: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 40, batch: int = 2
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shape = (batch, kv_heads, seq_k, dim)
    return random(batch, heads, seq_q, dim), random(*shape, seed=1), random(*shape, seed=2)


def shown(row: int, column: int, seq_q: int, seq_k: int, keywords: dict[str, Any]) -> bool:
    """Whether a row attends to a column, straight from the words of the documentation."""
    causal = keywords.get("causal", False)
    left, right = keywords.get("window") or (None, None)
    diagonal = row if causal == "top_left" else row + seq_k - seq_q
    return (
        (not causal or column <= diagonal)
        and (left is None or column >= diagonal - left)
        and (right is None or column <= diagonal + right)
    )


def expected(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, keywords: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and lse in float64, row by row."""
    batch, heads, seq_q, dim = q.shape
    kv_heads, seq_k = k.shape[1:3]
    out = torch.zeros(q.shape, dtype=torch.float64)
    lse = torch.full(q.shape[:-1], -INF, dtype=torch.float64)
    for row in range(seq_q):
        columns = [c for c in range(seq_k) if shown(row, c, seq_q, seq_k, keywords)]
        for one in range(batch):
            for head in range(heads):
                if not columns:
                    continue
                shared = head // (heads // kv_heads)
                keys, values = k[one, shared, columns].double(), v[one, shared, columns].double()
                s = keys @ q[one, head, row].double() * keywords.get("scale", dim**-0.5)
                if cap := keywords.get("softcap"):
                    s = cap * torch.tanh(s / cap)
                lse[one, head, row] = s.logsumexp(0)
                out[one, head, row] = torch.softmax(s, 0) @ values
    return out, lse


def assert_right(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Any
) -> torch.Tensor:
    out, lse = warploom.attention(q, k, v, return_lse=True, **keywords)
    wanted, wanted_lse = expected(q, k, v, keywords)
    assert (out.dtype, lse.dtype) == (q.dtype, torch.float32)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:-1])
    unit = torch.finfo(q.dtype).eps / 2
    assert ((out.double() - wanted).abs() <= unit * wanted.abs() + 1e-5).all()
    assert torch.allclose(lse.double(), wanted_lse, rtol=1e-5, atol=1e-5)
    return out


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
    addresses = tuple(t.data_ptr() for t in (q, k, v, out, lse, one, one))
    assert recorder.given == [(addresses, (40**-0.5, 3.0))]


# ---- Memory, plans -------------------------------------------------------------------------------


def test_the_result_lies_in_memory_as_q_does() -> None:
    k = v = random(2, 4, 9, 40)
    plain, turned = random(2, 4, 7, 40), random(2, 7, 4, 40).transpose(1, 2)
    sliced = random(2, 7, 3, 4, 40)[:, :, 1].transpose(1, 2)
    assert warploom.attention(plain, k, v).is_contiguous()
    for q in (turned, sliced):
        out = warploom.attention(q, k, v)
        assert out.shape == q.shape
        assert out.transpose(1, 2).is_contiguous()
        assert torch.equal(out, warploom.attention(q.contiguous(), k, v))


def test_out_is_filled_and_nothing_beside_it() -> None:
    q, k, v = operands(7, 9)
    room = torch.full((2, 8, 6, 56), -7.0, dtype=BF16)
    out = room[:, :7, 1:5, 8:48].transpose(1, 2)
    assert warploom.attention(q, k, v, out=out) is out
    assert torch.equal(out, warploom.attention(q, k, v))
    out.fill_(-7.0)
    assert (room == -7.0).all()


def test_explain_names_what_is_copied_because_tma_cannot_read_it() -> None:
    q, k, v = operands(7, 9)
    odd = random(2, 2, 9, 41)[..., :40]
    every_other = random(2, 4, 7, 80)[..., ::2]
    broadcast = random(2, 1, 9, 40).expand(2, 2, 9, 40)
    for arguments, copies in (
        ((q, k, v), ()),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), ()),
        ((q, odd, v), ("k",)),
        ((every_other, k, broadcast), ("q", "v")),
    ):
        plan = warploom.plan_attention(*arguments)
        told = warploom.explain(plan)
        assert told.copies == copies
        assert told.kernel.startswith("attention_forward_sm90a_bf16_dim64_none_fixed_")
        assert told.kernel in str(told)
        assert_right(*arguments)


def test_a_call_is_planned_once_whatever_its_scale() -> None:
    q, k, v = operands(13, 17)
    before = warploom.counters.plans
    for scale, cap in ((0.5, 1.0), (0.25, 3.0)):
        warploom.attention(q * 2, k, v, scale=scale, softcap=cap)
    assert warploom.counters.plans == before + 1
    warploom.attention(q, k, v, scale=0.5)  # without a softcap it is another kernel
    assert warploom.counters.plans == before + 2


def test_a_plan_runs_what_it_was_made_for_and_nothing_else() -> None:
    q, k, v = operands(13, 13)
    plan = warploom.plan_attention(q, k, v, causal=True)
    out, lse = plan(q * 2, k, v, causal=True, scale=0.1)
    both = warploom.attention(q * 2, k, v, causal=True, scale=0.1, return_lse=True)
    assert torch.equal(out, both[0])
    assert torch.equal(lse, both[1])
    wrong: list[tuple[Any, dict[str, Any]]] = [
        ((q[:1], k[:1], v[:1]), {"causal": True}),
        ((q.half(), k.half(), v.half()), {"causal": True}),
        ((q.transpose(1, 2).contiguous().transpose(1, 2), k, v), {"causal": True}),
        ((q, k, v), {}),
        ((q, k, v), {"causal": True, "softcap": 1.0}),
        ((q, k, v), {"causal": True, "out": torch.empty_like(q)}),
    ]
    for arguments, keywords in wrong:
        with pytest.raises(ProblemError, match="only what it was made for"):
            plan(*arguments, **keywords)


class Recorder:
    """Stands in for the launches of a plan, and keeps what they are given."""

    def __init__(self) -> None:
        self.given: list[tuple[tuple[int, ...], tuple[float, ...]]] = []

    def run(
        self, addresses: tuple[int, ...], scalars: tuple[float, ...], check: Callable[[], None]
    ) -> tuple[()]:
        check()
        self.given.append((addresses, scalars))
        return ()


def test_a_launch_is_given_addresses_and_numbers_in_the_order_of_their_names() -> None:
    q, k, v = operands(13, 13)
    out = torch.empty_like(q)
    plan = warploom.plan_attention(q, k, v, causal=True, out=out)
    recorder = plan.launch = Recorder()  # type: ignore[assignment]
    for scale, expected in ((None, 40**-0.5), (0.3, 0.3)):
        found, lse = plan(q, k, v, causal=True, out=out, scale=scale)
        assert found is out
        addresses = tuple(t.data_ptr() for t in (q, k, v, out, lse))
        assert recorder.given[-1] == (addresses, (expected,))


def test_a_launch_reads_a_copy_of_what_tma_cannot_read_and_counts_it() -> None:
    q, _, v = operands(13, 13)
    odd = random(2, 2, 13, 41)[..., :40]
    plan = warploom.plan_attention(q, odd, v)
    recorder = plan.launch = Recorder()  # type: ignore[assignment]
    before = warploom.counters.copies
    plan(q, odd, v)
    (addresses, _), *_ = recorder.given
    assert warploom.counters.copies - before == 1
    assert (addresses[0], addresses[2]) == (q.data_ptr(), v.data_ptr())
    assert addresses[1] != odd.data_ptr()
    assert addresses[1] % 16 == 0


def test_a_kernel_that_is_named_is_the_one_that_is_planned() -> None:
    q, k, v = operands(13, 13)
    name = warploom.explain(warploom.plan_attention(q, k, v, causal=True)).kernel
    plan = warploom.plan_attention(q, k, v, causal=True, spec=name)
    assert plan.choice.spec.name == name
    assert torch.equal(
        warploom.attention(q, k, v, causal=True, spec=name),
        warploom.attention(q, k, v, causal=True),
    )


def test_operands_are_left_as_they_were() -> None:
    given = operands(7, 9)
    before = [tensor.clone() for tensor in given]
    warploom.attention(*given, window=(2, 2))
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
