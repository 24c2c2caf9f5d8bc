"""The page of attention: what it says of other libraries."""

from __future__ import annotations

from functools import partial

import torch

import warploom


def test_what_other_libraries_call_it_computes_the_same() -> None:
    """The table of `Coming from other libraries`, as far as torch on a CPU has the other side."""
    torch.manual_seed(0)
    close = partial(torch.testing.assert_close, rtol=0.02, atol=0.02, check_dtype=False)
    q, k, v = (torch.randn(2, heads, 20, 32).bfloat16() for heads in (4, 2, 2))
    sdpa = partial(torch.nn.functional.scaled_dot_product_attention, enable_gqa=True)
    close(warploom.attention(q, k, v, scale=0.3), sdpa(q, k, v, scale=0.3))
    close(warploom.attention(q, k, v, causal=True), sdpa(q, k, v, is_causal=True))
    short = q[:, :, :7]
    close(warploom.attention(short, k, v, causal="top_left"), sdpa(short, k, v, is_causal=True))
