"""What attention refuses, it refuses before anything runs: value, rule and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import ProblemError

Q, K = torch.randn(2, 4, 6, 16).bfloat16(), torch.randn(2, 2, 9, 16).bfloat16()
PACKED_Q, PACKED_K = torch.randn(6, 4, 16).bfloat16(), torch.randn(9, 2, 16).bfloat16()
OFFSETS = torch.tensor([0, 6], dtype=torch.int32)
LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": OFFSETS,
    "cu_seqlens_k": torch.tensor([0, 9], dtype=torch.int32),
    "max_seqlen_q": 6,
    "max_seqlen_k": 9,
}
Refused = Callable[[], object]


def given(q: torch.Tensor = Q, k: torch.Tensor = K, **keywords: Any) -> Refused:
    v = keywords.pop("v", k)
    return lambda: warploom.attention(q, k, v, **keywords)


def packed(**keywords: Any) -> Refused:
    return given(PACKED_Q, PACKED_K, **LENGTHS | keywords)


ROOM = torch.randn(2, 4, 8, 16).bfloat16()
CASES: dict[str, tuple[Refused, str, str, str]] = {
    "a matrix": (given(Q[0, 0]), "q [6, 16]", "[batch, heads, seq, dim]", "cu_seqlens"),
    "two types": (given(Q.half()), "torch.float16", "have one type", ".to("),
    "fp32": (given(Q.float(), K.float()), "torch.float32", "fp16 or bf16", ".to("),
    "two devices": (given(Q.to("meta")), "q on meta", "must be on one device", "move"),
    "k and v differ": (given(v=K[:, :, :5]), "v [2, 2, 5, 16]", "one batch", "transpose"),
    "another batch": (given(Q[:1]), "q [1, 4, 6, 16]", "the batch and dim of q", "transpose"),
    "another dim": (given(Q[..., :8]), "q [2, 4, 6, 8]", "the batch and dim of q", "transpose"),
    "heads": (given(Q[:, :3]), "3 heads of q over 2", "multiple of those", "consecutive heads"),
    "no kv heads": (given(k=K[:, :0]), "4 heads of q over 0", "multiple of those", "consecutive"),
    "dim 12": (given(Q[..., :12], K[..., :12]), "dim 12", "multiple of 8 up to 256", "pad"),
    "dim 264": (
        given(torch.zeros(1, 1, 2, 264).half(), torch.zeros(1, 1, 2, 264).half()),
        "dim 264",
        "multiple of 8 up to 256",
        "pad",
    ),
    "ambiguous causal": (
        given(causal=True),
        "causal=True with seq_q 6 and seq_k 9",
        "equal lengths",
        "bottom_right",
    ),
    "unknown causal": (given(causal="left"), "'left'", "'top_left' or 'bottom_right'", "torch"),
    "window of -1": (given(window=(-1, 3)), "(-1, 3)", "ints of at least 0", "None is no bound"),
    "window of three": (given(window=(1, 2, 3)), "(1, 2, 3)", "(left, right)", "None is no"),
    "window of floats": (given(window=(1.0, 2)), "(1.0, 2)", "ints of at least 0", "None"),
    "scale of 0": (given(scale=0.0), "scale 0.0", "greater than 0", "negate q"),
    "scale of nan": (given(scale=float("nan")), "scale nan", "is finite", "negate q"),
    "negative softcap": (given(softcap=-1.0), "softcap -1.0", "greater than 0", ""),
    "half of packed": (
        given(PACKED_Q, PACKED_K, cu_seqlens_q=OFFSETS, max_seqlen_q=6),
        "without cu_seqlens_k, max_seqlen_k",
        "packed lengths take",
        "ints",
    ),
    "packed without longest": (
        packed(max_seqlen_k=None),
        "without max_seqlen_k",
        "packed lengths take",
        "no call waits",
    ),
    "cu_seqlens of int64": (packed(cu_seqlens_q=OFFSETS.long()), "int64", "int32", "cumulative"),
    "cu_seqlens of two lengths": (
        packed(cu_seqlens_k=torch.tensor([0, 4, 9], dtype=torch.int32)),
        "cu_seqlens_k [3]",
        "of one length",
        "cumulative",
    ),
    "negative longest": (packed(max_seqlen_q=-1), "max_seqlen_q -1", "at least 0", "largest"),
    "packed rank": (
        given(Q, K, **LENGTHS),
        "q [2, 4, 6, 16]",
        "[total, heads, dim]",
        "others without",
    ),
    "out of another shape": (given(out=ROOM), "out [2, 4, 8, 16]", "[2, 4, 6, 16]", "out=None"),
    "out of another type": (given(out=torch.empty(Q.shape)), "float32", "bfloat16", "out=None"),
    "out that TMA cannot store": (
        given(out=torch.empty(2, 4, 6, 17).bfloat16()[..., :16]),
        "strides [408, 102, 17, 1]",
        "multiples of 16 bytes",
        "out=None",
    ),
    "out whose rows overlap": (
        given(out=torch.zeros(600).bfloat16().as_strided(Q.shape, (256, 64, 8, 1))),
        "out [2, 4, 6, 16] with strides [256, 64, 8, 1]",
        "must have no two elements at one address",
        "expanded or overlapping",
    ),
    "packed out whose heads overlap": (
        packed(out=torch.zeros(600).bfloat16().as_strided(PACKED_Q.shape, (32, 8, 1))),
        "with strides [32, 8, 1]",
        "must have no two elements at one address",
        "expanded or overlapping",
    ),
    "out over q": (
        lambda: warploom.attention(ROOM[:, :, :6], K, K, out=ROOM[:, :, 2:]),
        "and q at",
        "does not overlap",
        "another out",
    ),
    "out beside a gradient": (
        given(Q.clone().requires_grad_(), out=torch.empty_like(Q)),
        "out with a tensor that requires grad",
        "autograd differentiates results",
        "no_grad",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_call_that_cannot_be_computed_says_why_and_what_to_do(case: str) -> None:
    call, value, rule, fix = CASES[case]
    before = warploom.counters.as_dict()
    for _ in range(2):
        with pytest.raises(ProblemError) as caught:
            call()
        assert value in caught.value.value
        assert rule in caught.value.rule
        assert fix in caught.value.fix
    assert warploom.counters.launches == before["launches"]


def test_a_gradient_is_no_matter_without_grad_mode() -> None:
    with torch.no_grad():
        warploom.attention(Q.clone().requires_grad_(), K, K, out=torch.empty_like(Q))


@pytest.mark.parametrize(
    "keywords",
    [{"causal": "bottom_right"}, {"softcap": 1.0}, {"dtype": torch.float16}, {"dim": 128}],
    ids=str,
)
def test_a_spec_of_another_operation_is_refused(keywords: dict[str, Any]) -> None:
    keywords = dict(keywords)
    name = warploom.explain(warploom.plan_attention(Q, K, K)).kernel
    dtype, dim = keywords.pop("dtype", Q.dtype), keywords.pop("dim", 16)
    q = torch.zeros(2, 4, 6, dim, dtype=dtype)
    k = torch.zeros(2, 2, 9, dim, dtype=dtype)
    with pytest.raises(ProblemError, match=r"computes another operation.*leave spec out"):
        warploom.attention(q, k, k, spec=name, **keywords)


def test_a_spec_of_a_wider_mask_or_dim_serves_a_narrower_call() -> None:
    causal = warploom.explain(warploom.plan_attention(Q, K, K, causal="bottom_right")).kernel
    assert "causal" in causal
    assert warploom.plan_attention(Q, K, K, spec=causal).choice.spec.name == causal
    wide = torch.zeros(2, 4, 6, 128).bfloat16()
    name = warploom.explain(warploom.plan_attention(wide, wide, wide)).kernel
    assert "dim128" in name
    assert warploom.plan_attention(Q, K, K, spec=name).choice.spec.name == name


def test_a_numeric_error_is_raised_for_a_planned_call_too() -> None:
    warploom.attention(Q, K, K, scale=0.5)
    with pytest.raises(ProblemError, match="scale -1"):
        warploom.attention(Q, K, K, scale=-1.0)
