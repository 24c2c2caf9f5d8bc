"""Steps of generation by a cache of a fixed size: its filled keys are told by lengths on the GPU.

Whether kernels compute a step is asked twice: before there are tensors, so that no mask is made of
one that they do, and of the tensors, which decide.
"""

from __future__ import annotations

from typing import Any

import torch

from warploom.integrations.bounds import Bounds, Pattern
from warploom.integrations.devices import unserved
from warploom.integrations.torch_attention import Arguments
from warploom.runtime.families.attention_decode import api
from warploom.runtime.families.attention_decode.extents import DIMS, ROWS, fits

TYPES = (torch.float16, torch.bfloat16)


def expected(config: Any, dtype: torch.dtype | None, device: torch.device) -> bool:  # noqa: ANN401
    """Whether kernels will compute steps of a model of transformers, as far as this tells."""
    if getattr(config, "is_heterogeneous", False):
        return False  # its layers may differ in heads: asked for those of all, it raises
    heads = getattr(config, "num_attention_heads", None)
    dim = getattr(config, "head_dim", None)
    if dim is None and heads:
        dim = getattr(config, "hidden_size", 0) // heads
    number = device.index or 0 if device.type == "cuda" else -1
    return dtype in TYPES and dim in DIMS and unserved(number) is None


def bounds(
    pattern: Pattern | None,
    batch: int,
    rows: int,
    keys: int,
    offsets: tuple[int | torch.Tensor, int],
    padding: torch.Tensor | None,
    device: torch.device,
) -> Bounds | None:
    """Return the bounds of a step, or None where lengths cannot say its mask.

    `offsets` are where the rows and the keys begin. Padding is read, which waits for a GPU.
    """
    if pattern is None or not pattern.causal:
        return None
    if pattern.chunk is not None or pattern.packed is not None:
        return None
    first, ahead = offsets
    starts = None
    if padding is not None:
        told = padding.shape[1] >= first + rows  # every key of the step
        if not bool(padding.all() & told):
            starts = padding.int().argmax(1, keepdim=True)
            behind = torch.arange(padding.shape[1], device=padding.device) >= starts
            if not bool((behind == padding).all() & told):
                return None
            starts = (starts[:, 0] - ahead).clamp(min=0).int()
    if isinstance(first, torch.Tensor):  # the cache's own, which it adds to
        filled = (first + (rows - ahead)).to(device, torch.int32).expand(batch).contiguous()
    else:
        filled = torch.full((batch,), first + rows - ahead, dtype=torch.int32, device=device)
    return Bounds(keys, causal=rows > 1, window=pattern.window, lengths=filled, starts=starts)


def refusal(call: Arguments) -> str | None:
    """Why torch computes a step, if it does."""
    query, key, value = call.query, call.key, call.value
    if query.dtype not in TYPES or not query.dtype == key.dtype == value.dtype:
        return f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: not fp16 or bf16"
    _, heads, rows, dim = query.shape
    if key.shape != value.shape:
        return f"heads have {dim} and {value.shape[3]} elements, or other rows"
    if not fits(heads, key.shape[1], rows, dim):
        return f"heads have {dim} elements, not one of {DIMS}, or more than {ROWS} rows share keys"
    if torch.is_grad_enabled() and any(one.requires_grad for one in (query, key, value)):
        return "steps of generation have no gradient"
    return None


def attend(call: Arguments, bounds: Bounds) -> torch.Tensor:
    """Return the attention [batch, rows, heads, dim] of a step."""
    out: torch.Tensor = api.attention_decode(
        call.query,
        call.key,
        call.value,
        cache_seqlens=bounds.lengths,
        cache_leftpad=bounds.starts,
        causal=bounds.causal,
        window=None if bounds.window is None else (bounds.window, None),
        scale=call.scale,
        **call.of_scores(call.query.dtype),
    )
    return out.transpose(1, 2).contiguous()
