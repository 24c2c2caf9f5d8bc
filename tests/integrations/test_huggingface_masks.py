"""Bounds in place of masks: which keys each row attends to, against transformers' own masks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from transformers.masking_utils import (
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sdpa_mask,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
    sliding_window_overlay,
)

from warploom.integrations import transformers_attention
from warploom.integrations.transformers_masks import BoundedMask, mask, recognised

WINDOW, ROWS = 5, 13
LEFT = torch.ones(2, ROWS, dtype=torch.int64)
LEFT[0, :4] = 0

FUNCTIONS: dict[str, Any] = {
    "causal": causal_mask_function,
    "window": sliding_window_causal_mask_function(WINDOW),
    "around": sliding_window_bidirectional_mask_function(WINDOW),
    "chunks": chunked_causal_mask_function(WINDOW, torch.zeros(2, dtype=torch.int64)),
}


def attended(made: torch.Tensor | BoundedMask | None, rows: int, keys: int) -> torch.Tensor:
    """Which keys each row attends to, read off a softmax that `attention` computes of equal scores.

    A value is the power of two of its key, so that the sum tells the keys.
    """
    module = torch.nn.Module()
    q, k = torch.zeros(2, 1, rows, 8), torch.zeros(2, 1, keys, 8)
    shown = []
    for key in range(keys):
        v = torch.zeros(2, 1, keys, 8)
        v[:, :, key] = 1
        operands = (tensor.bfloat16() for tensor in (q, k, v))
        shown.append(transformers_attention.attention(module, *operands, made)[0][:, :, 0, 0] > 0)
    return torch.stack(shown, -1)[:, None]


@pytest.mark.parametrize("padded", ["none", "left", "right", "both"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize(
    ("rows", "keys", "row_offset", "key_offset"),
    [(9, 9, 0, 0), (9, 14, 0, 0), (4, 9, 5, 0), (4, 14, 5, 0), (4, 8, 5, 1)],
    ids=["whole", "fixed", "continued", "fixed-continued", "rolled"],
)
def test_bounds_are_the_mask(
    function: str,
    padded: str,
    rows: int,
    keys: int,
    row_offset: int,
    key_offset: int,
    paths: Counter[str],
) -> None:
    """Row by row the keys of transformers' own mask, wherever rows and keys of a cache begin."""
    padding = None
    if padded != "none":
        padding = torch.ones(2, row_offset + rows, dtype=torch.bool)
        padding[0, : 2 * (padded != "right")] = False
        padding[1, padding.shape[1] - 3 * (padded != "left") :] = False
    bidirectional = function == "around"
    if bidirectional and (row_offset or keys != rows):
        pytest.skip("encoders have no caches")
    arguments: dict[str, Any] = {
        "batch_size": 2,
        "q_length": rows,
        "kv_length": keys,
        "q_offset": row_offset,
        "kv_offset": key_offset,
        "mask_function": FUNCTIONS[function],
        "attention_mask": padding,
    }
    flags = {
        "allow_is_causal_skip": not bidirectional,
        "allow_is_bidirectional_skip": bidirectional,
    }
    exact = sdpa_mask(**arguments, allow_is_causal_skip=False)
    if function != "causal":
        flags["local_size"] = WINDOW
    made = mask(**arguments, **flags)
    shown = attended(made, rows, keys)
    if padding is not None:  # rows that are padding are nobody's
        own = padding[:, row_offset : row_offset + rows]
        exact, shown = (tensor & own[:, None, :, None] for tensor in (exact, shown))
    assert torch.equal(shown, exact)
    chunked = function == "chunks" and not (padded == "none" and rows == keys)
    assert isinstance(made, torch.Tensor) is chunked
    assert paths["by_kernels"] > 0


def test_rows_of_padding_past_the_batch_are_not_read(paths: Counter[str]) -> None:
    """Musicgen's padding has a row for each codebook: of these, sequences ended past the rows."""
    padding = LEFT.bool().repeat(4, 1)
    made = mask(2, ROWS, ROWS, attention_mask=padding)
    exact = sdpa_mask(2, ROWS, ROWS, attention_mask=padding, allow_is_causal_skip=False)
    own = padding[:2, None, :, None]
    assert torch.equal(attended(made, ROWS, ROWS) & own, exact & own)
    assert paths["by_kernels"] > 0


def test_functions_that_are_not_recognised_are_masks() -> None:
    """Whatever a model adds to a mask, or composes in another way, has to reach the attention."""
    assert recognised(or_masks(causal_mask_function, causal_mask_function)) is None
    assert recognised(sliding_window_overlay(3)) is None, "one side of a window, without causality"
    assert recognised(lambda batch, head, row, key: key <= row) is None
    made = mask(2, 4, 4, mask_function=lambda batch, head, row, key: key == row)
    assert made is None or isinstance(made, torch.Tensor)
    made = mask(
        2, 4, 4, mask_function=lambda b, h, row, key: key == row, allow_is_causal_skip=False
    )
    assert isinstance(made, torch.Tensor)
    assert torch.equal(made[0, 0], torch.eye(4, dtype=torch.bool))


def test_a_bounded_mask_is_a_tensor_for_who_computes_with_it() -> None:
    """Models that cut, invert or add up their mask get transformers' own."""
    padding = LEFT.bool()
    made = mask(2, ROWS, ROWS, attention_mask=padding)
    exact = sdpa_mask(2, ROWS, ROWS, attention_mask=padding, allow_is_causal_skip=False)
    assert isinstance(made, BoundedMask)
    assert torch.equal(made[:, :, :5], exact[:, :, :5])
    assert torch.equal(~made, ~exact)
    assert torch.equal(torch.cat([made, made], -1), torch.cat([exact, exact], -1))
    assert torch.equal(torch.where(made, 1.0, 0.0), exact.float())
    assert torch.equal(made == 0, ~exact)  # `object`'s own == says False
    assert torch.equal(made != 0, exact)
    assert torch.equal(made < 1, ~exact)
    assert torch.equal(-1.0 * made, -exact.float())
    assert len(made) == len(exact)
    assert made.dtype == torch.bool
    assert made.shape == exact.shape
