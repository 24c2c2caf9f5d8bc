"""Torch's operator of packed sequences as Warploom implements it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sdpa_bounds import differentiated, draw
from torch.nn.functional import scaled_dot_product_attention

Q = draw(2, 4, 9, 16)
LENGTHS_Q, LENGTHS_K = (5, 1, 9), (7, 3, 9)
PACKED = (torch.randn(15, 4, 16), torch.randn(19, 2, 16), torch.randn(19, 2, 16))


def starts(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def sequences(*given: torch.Tensor, visible: tuple[int, int], **keywords: Any) -> torch.Tensor:
    """What packed sequences give, one after the other: a row sees this far to either side."""
    left, right = visible
    lengths = (LENGTHS_Q, LENGTHS_K, LENGTHS_K)
    parts = [tensor.split(rows) for tensor, rows in zip(given, lengths, strict=True)]
    found = []
    for q, k, v in zip(*parts, strict=True):
        apart = torch.arange(k.shape[0]) - torch.arange(q.shape[0])[:, None]
        apart -= k.shape[0] - q.shape[0]
        mask = (apart >= -left) & (apart <= right)
        one = (tensor.transpose(0, 1)[None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(*one, attn_mask=mask, enable_gqa=True, **keywords)
        found.append(out[0].transpose(0, 1))
    return torch.cat(found)


def packed(*given: torch.Tensor, dropout_p: float = 0.0, **keywords: Any) -> torch.Tensor:
    lengths = (starts(LENGTHS_Q), starts(LENGTHS_K), 9, 9)
    causal = keywords.pop("is_causal", False)
    out: torch.Tensor = torch.ops.aten._flash_attention_forward(
        *given, *lengths, dropout_p, causal, False, **keywords
    )[0]
    return out


@pytest.mark.parametrize(
    ("keywords", "visible"),
    [
        ({}, (99, 99)),
        ({"is_causal": True, "scale": 0.2}, (99, 0)),
        ({"window_size_left": 2, "window_size_right": 1}, (2, 1)),
        ({"window_size_left": 3, "window_size_right": -1}, (3, 99)),
        ({"is_causal": True, "window_size_left": 2, "window_size_right": 5}, (2, 0)),
    ],
)
def test_packed_sequences_are_warplooms(
    keywords: dict[str, Any], visible: tuple[int, int], activated: list[str]
) -> None:
    given = tuple(tensor.bfloat16() for tensor in PACKED)
    (out,), found = differentiated(packed, given, **keywords)
    assert not activated
    wide = tuple(tensor.double() for tensor in given)
    scale = {"scale": keywords["scale"]} if "scale" in keywords else {}
    (right,), wanted = differentiated(sequences, wide, visible=visible, **scale)
    for got, expected in zip((out, *found), (right, *wanted), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=4e-2, rtol=2e-2)


def test_varlen_attn_is_warplooms(activated: list[str]) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen").varlen_attn
    given = [tensor.bfloat16() for tensor in PACKED]
    given[1:] = [tensor.repeat_interleave(2, 1) for tensor in given[1:]]
    found = varlen(*given, starts(LENGTHS_Q), starts(LENGTHS_K), 9, 9)
    assert torch.equal(found, packed(*given))
    assert not activated


@pytest.mark.parametrize(
    "keywords", [{"dropout_p": 0.1}, {"alibi_slopes": torch.ones(4)}, {"scale": -1.0}]
)
def test_what_kernels_do_not_compute_of_packed_sequences_is_torchs(
    keywords: dict[str, Any], activated: list[str]
) -> None:
    with pytest.raises(NotImplementedError):
        packed(*(tensor.bfloat16() for tensor in PACKED), **keywords)
    assert activated == ["flash_attention_forward"]


def test_without_sequences_the_operator_is_torchs(activated: list[str]) -> None:
    """Guards against torch's own kernel that calls it, and means [batch, length, heads, dim]."""
    with pytest.raises(NotImplementedError):
        torch.ops.aten._flash_attention_forward(Q, Q, Q, None, None, 4, 4, 0.0, False, False)
    assert activated == ["flash_attention_forward"]
