"""Every keyword of every public function that takes no tensor: what it cannot mean is refused.

A tensor as a number raised AttributeError, a dict as a dtype TypeError, and "no" was taken as True.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import warploom
from warploom.errors import WarploomError
from warploom.runtime.families.activation_backward.api import activation_backward

BF16 = torch.bfloat16
A, B = torch.ones(16, 64, dtype=BF16), torch.ones(64, 32, dtype=BF16)
Q = torch.ones(1, 2, 8, 64, dtype=BF16)
CACHE, COS = torch.ones(1, 2, 16, 64, dtype=BF16), torch.ones(32, 8)
ROWS, LSE = torch.ones(4, 64, dtype=BF16), torch.ones(4)
LENGTHS = torch.zeros(1, dtype=torch.int32)
WEIGHT = warploom.quantize(B.t(), "int4", group=64)
ONE = torch.ones(1)
UNLIKE: dict[str, list[Any]] = {
    "boolean": ["yes", "no", "", "false", ONE, [], {}, 2.5],
    "number": ["1", {}, [], [1.0], float("nan"), float("inf"), 1j, True, object()],
    "plain number": ["1", {}, ONE, torch.ones(3), [], float("nan"), float("inf"), 1j, True],
    "dtype": [{}, "bfloat16", [], 3, torch.float64, BF16.__class__, ONE],
    "name": [{}, [], -3, "nonsense", ONE, b"relu"],
    "integer": ["3", 2.5, ONE, {}, True, -1],
}
Call = tuple[Callable[..., object], dict[str, str]]
EPILOGUE = {
    "beta": "plain number",
    "activation": "name",
    "scale_a": "number",
    "scale_d": "number",
    "out_dtype": "dtype",
    "spec": "name",
}
ATTENTION = {
    "causal": "boolean",
    "window": "name",
    "softcap": "plain number",
    "scale": "plain number",
    "max_seqlen_q": "integer",
    "spec": "name",
}
CALLS: dict[str, Call] = {
    "gemm": (
        lambda **given: warploom.gemm(A, B, **given),
        {
            **EPILOGUE,
            "use_fast_accum": "boolean",
            "preactivation": "name",
            "gradient_dtype": "dtype",
        },
    ),
    "gemm with a residual": (
        lambda **given: warploom.gemm(A, B, residual=A @ B, **given),
        {"beta": "plain number"},
    ),
    "plan": (
        lambda **given: warploom.plan(A, B, **given),
        {**EPILOGUE, "use_fast_accum": "boolean"},
    ),
    "mixed_gemm": (lambda **given: warploom.mixed_gemm(A, WEIGHT, **given), EPILOGUE),
    "attention": (
        lambda **given: warploom.attention(Q, Q, Q, **given),
        {
            **ATTENTION,
            "return_lse": "boolean",
            "deterministic": "boolean",
            "backward_spec": "name",
            "dropout_p": "plain number",
            "block_mask": "name",
        },
    ),
    "plan_attention": (
        lambda **given: warploom.plan_attention(Q, Q, Q, **given),
        {**ATTENTION, "deterministic": "boolean", "dropout_p": "plain number"},
    ),
    "attention_decode": (
        lambda **given: warploom.attention_decode(Q, Q, Q, **given),
        {**ATTENTION, "return_lse": "boolean", "batch_invariant": "boolean"},
    ),
    "attention_append": (
        lambda **given: warploom.append_kv_cache(
            CACHE, CACHE.clone(), Q, Q, LENGTHS, cos=COS, sin=COS, **given
        ),
        {"interleaved": "boolean", "spec": "name"},
    ),
    "attention_merge": (
        lambda **given: warploom.merge_state(ROWS, LSE, ROWS, LSE, **given),
        {"out_dtype": "dtype", "spec": "name"},
    ),
    "attention_quantize": (
        lambda **given: warploom.attention_quantize(Q, Q, Q, **given),
        {"scores": "name", "smooth": "boolean", "spec": "name"},
    ),
    "activation_backward": (
        lambda **given: activation_backward(ROWS, ROWS, **{"activation": "relu", **given}),
        {"activation": "name", "sums": "boolean", "out_dtype": "dtype", "spec": "name"},
    ),
    "cast": (
        lambda **given: warploom.cast(ROWS, **{"dtype": torch.int8, **given}),
        {
            "dtype": "dtype",
            "block": "name",
            "transpose": "boolean",
            "pow2": "boolean",
            "rounding": "name",
            "scale_layout": "name",
            "spec": "name",
        },
    ),
    "route": (
        lambda **given: warploom.route(
            torch.zeros(2, 1, dtype=torch.int64), **{"experts": 4, **given}
        ),
        {"experts": "integer", "spec": "name"},
    ),
    "quantize": (
        lambda **given: warploom.quantize(B.t(), **given),
        {
            "format": "name",
            "group": "integer",
            "symmetric": "boolean",
            "scale_dtype": "dtype",
            "activations": "name",
        },
    ),
    "explain": (lambda **given: warploom.explain(A, B, **given), {**EPILOGUE, "gpu": "name"}),
    "block_mask": (
        lambda **given: warploom.block_mask(
            kv_num_blocks=torch.ones(1, 1, 2, dtype=torch.int32),
            kv_indices=torch.zeros(1, 1, 2, 2, dtype=torch.int32),
            **given,
        ),
        {"block": "name", "seq_q": "integer", "seq_k": "integer", "mask_mod": "name"},
    ),
    "dropout_mask": (
        lambda **given: warploom.dropout_mask(
            **{
                "state": torch.zeros(2, dtype=torch.int64),
                "dropout_p": 0.5,
                **dict.fromkeys(("batch", "heads", "seq_q", "seq_k"), 2),
                **given,
            }
        ),
        {"dropout_p": "plain number", "batch": "integer", "heads": "integer", "seq_q": "integer"},
    ),
}
CASES = [(call, keyword) for call, (_, keywords) in CALLS.items() for keyword in keywords]


@pytest.mark.parametrize(("call", "keyword"), CASES)
def test_what_a_keyword_cannot_mean_is_refused(call: str, keyword: str) -> None:
    """Before and after calls that are right, which leave plans behind that others may find."""
    function, keywords = CALLS[call]
    for value in UNLIKE[keywords[keyword]] * 2:
        with pytest.raises(WarploomError) as caught:
            function(**{keyword: value})
        message = str(caught.value)
        assert caught.value.rule, message
        assert len(message) < 700, message


@pytest.mark.parametrize("keyword", ["is_causal", "scale", "dropout_p", "enable_gqa"])
@pytest.mark.parametrize("value", ["no", {}, [], 1j])
def test_what_torchs_attention_cannot_take_is_refused_by_torch(keyword: str, value: object) -> None:
    """`warploom.sdpa` hands such calls on as they are: a rule of its own compared them with 0."""
    given: Any = {keyword: value}
    with pytest.raises(TypeError, match=rf"scaled_dot_product_attention.*{keyword}"):
        warploom.sdpa(Q, Q, Q, **given)
