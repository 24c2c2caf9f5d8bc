"""`attn_implementation="warploom"` for transformers: its attention on Warploom's kernels.

`register` adds the function and its masks to transformers, and "warploom_8bit", which quantizes
operands to 8 bits in each call that kernels of 8 bits compute. Calls that Warploom has no kernels
for run in torch's own, to the same result: `refusal` says which, and why.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils import logging

from warploom.errors import ProblemError
from warploom.generator.families._attention import DIMS
from warploom.integrations import dropout_rules, torch_attention
from warploom.integrations import transformers_scores as extras
from warploom.integrations import transformers_selection as selection
from warploom.integrations import transformers_steps as steps
from warploom.integrations.bounds import Bounds, Sequences
from warploom.integrations.linear_rules import PRODUCTS, product_type
from warploom.integrations.sdpa_rules import are_together, elsewhere, not_computed, transformed
from warploom.integrations.torch_attention import Arguments
from warploom.integrations.transformers_interface import adds_masks
from warploom.integrations.transformers_masks import NAME, BoundedMask, mask
from warploom.runtime.families.attention_forward import api
from warploom.runtime.families.attention_forward.attention_8bit import attention_8bit

EIGHT_BITS = f"{NAME}_8bit"  # the attn_implementation that quantizes operands to 8 bits
ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")  # int32 [sequences + 1]: where packed sequences end
LONGEST = ("max_length_q", "max_length_k")  # of these sequences
_UNIT = 8  # dim is a multiple of it
_UNIT_OF_8_BITS = 32  # likewise, where operands are quantized


def register() -> None:
    """Let models of transformers say `attn_implementation="warploom"`; again does no harm."""
    # An attention without a mask function gets no masks; without an attention the name is refused.
    for name, function in ((NAME, attention), (EIGHT_BITS, partial(attention, scores="int8"))):
        AttentionMaskInterface.register(name, mask)
        AttentionInterface.register(name, function)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | BoundedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    scores: str | None = None,
    **keywords: Any,
) -> tuple[torch.Tensor, None]:
    """Return the attention of a layer [batch, rows, heads, dim], as `AttentionInterface` asks.

    query is [batch, heads, rows, dim], key and value [batch, kv_heads, keys, dim]. The mask says
    which keys a row attends to; without one, a causal module's rows attend from the first key on.
    `cu_seq_lens_q` and `cu_seq_lens_k` separate packed sequences where the mask does not. `s_aux`
    [heads] are sinks: one more score in each row's softmax; `sinks` [batch, heads, rows, 1] are
    those of each row (Inkling 2), which torch computes. Keys that the layer chooses for each row,
    by the keywords of transformers_selection.py, are part of the mask. With `scores`, "int8" or
    "e4m3", operands are quantized to 8 bits where `eight_bit_refusal` says nothing against it.
    """
    if keywords.get("cache") is not None:
        _refuse_cache()
    if sinks is not None:
        _require_rows_of_sinks(module, query, sinks, s_aux)
    if keywords.get("output_attentions"):
        _warn_of_no_weights()
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if causal and attention_mask is None and adds_masks(getattr(module, "config", None)):
        causal = False
    if selection.selects(keywords):
        if attention_mask is None:
            attention_mask = _separated(Arguments(query, key, value), keywords, causal=causal)
        chosen = (module, query, key.shape[2], attention_mask, keywords)
        attention_mask = selection.masked(*chosen, causal=causal)
    if attention_mask is None and causal and 1 < query.shape[2] < key.shape[2]:
        # A cache before its first rows: what is past them is not filled yet.
        key, value = (tensor[:, :, : query.shape[2]] for tensor in (key, value))
    added = s_aux if sinks is None else sinks
    call = Arguments(query, key, value, dropout, scaling, softcap, added, position_bias)
    bounds = _bounds(call, attention_mask, causal=causal)
    if bounds is not None and bounds.lengths is not None:
        if step_refusal(call) is None:
            return _by_kernels(call, bounds), None
        return _by_torch(call, attention_mask, bounds, bounds), None
    packed = _packed(call, bounds, keywords)
    told, mask = extras.told(attention_mask, packed, call)
    if told is not None and refusal(call, mask) is None:
        if scores is not None and eight_bit_refusal(call, told, mask) is None:
            return _by_8_bits(call, told, scores), None
        return _by_kernels(call, told, mask), None
    return _by_torch(call, attention_mask, bounds, packed), None


def _refuse_cache() -> None:
    """Raise ProblemError: no attention here reads pages."""
    raise ProblemError(
        'attn_implementation="warploom" with a paged cache',
        rule="continuous batching is not supported",
        fix='model.set_attn_implementation("sdpa") before generate_batch',
    )


def _require_rows_of_sinks(
    module: torch.nn.Module,
    query: torch.Tensor,
    sinks: torch.Tensor,
    others: torch.Tensor | None,
) -> None:
    """Raise ProblemError for sinks that are not one for each row and head, or next to s_aux."""
    if others is not None or sinks.shape != (*query.shape[:3], 1):
        raise ProblemError(
            f'attn_implementation="warploom" with sinks {list(sinks.shape)} of a '
            f"{type(module).__name__}",
            rule=f"must be [batch, heads, rows, 1], here {[*query.shape[:3], 1]}, without s_aux",
            fix='model.set_attn_implementation("eager")',
        )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _warn_of_no_weights() -> None:
    """Warn, once in a process, that a layer's weights are not returned, as with "sdpa"."""
    logging.get_logger(__name__).warning_once(
        'attn_implementation="warploom" does not support output_attentions=True: none are '
        'returned. Please set it to "eager" if you want them: '
        'model.set_attn_implementation("eager").'
    )


def refusal(call: Arguments, mask: torch.Tensor | None = None) -> str | None:
    """Why torch computes an attention whose mask is known by bounds, or a tensor, if it does."""
    return (
        elsewhere(call.query)
        or not_computed(False, call.scale)
        or transformed(extras.read(call, mask))
        or _unfit(call)
        or extras.refusal(call, mask)
        or (dropout_rules.refusal(call.dropout, (mask, call.bias)) if call.dropout else None)
    )


def step_refusal(call: Arguments) -> str | None:
    """Why torch computes a step of generation by a cache of a fixed size, if it does."""
    return (
        elsewhere(call.query)
        or not_computed(False, call.scale)
        or transformed((call.query, call.key, call.value))
        or ("steps of generation add no bias to scores" if call.bias is not None else None)
        or ("steps of generation have no dropout" if call.dropout else None)
        or extras.of_rows(call)
        or steps.refusal(call)
    )


def eight_bit_refusal(
    call: Arguments, bounds: Bounds, mask: torch.Tensor | None = None
) -> str | None:
    """Why operands of an attention that kernels compute are not quantized to 8 bits, if so."""
    dim, value_dim = call.query.shape[3], call.value.shape[3]
    if mask is not None or call.bias is not None:
        return "attention of 8 bits has no mask and no bias that is a tensor"
    if bounds.sequences is not None:
        return "packed sequences are not quantized"
    if call.dropout or call.sinks is not None:
        return "attention of 8 bits has neither dropout nor sinks"
    if dim != value_dim or dim % _UNIT_OF_8_BITS:
        return f"heads have {dim} and {value_dim} elements, not one multiple of {_UNIT_OF_8_BITS}"
    return None


def _unfit(call: Arguments) -> str | None:
    """Why torch computes an attention of these types, sizes and extras."""
    query, key, value = call.query, call.key, call.value
    types = {product_type(tensor.dtype, tensor.device.type) for tensor in (query, key, value)}
    if len(types) > 1 or not types <= set(PRODUCTS):
        return f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: not fp16 or bf16"
    if not 0 < max(query.shape[3], value.shape[3]) <= DIMS[-1]:
        return f"heads have {query.shape[3]} and {value.shape[3]} elements, not up to {DIMS[-1]}"
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return "query, key and value differ in batches"
    if key.shape[1] != value.shape[1]:
        return f"key has {key.shape[1]} heads and value {value.shape[1]}"
    if query.shape[2] == 1 and call.plain:
        # Warploom has one block for each tile of rows and head.
        return "torch's kernels share the keys of a single row among many blocks"
    return None


def _bounds(
    call: Arguments, attention_mask: torch.Tensor | BoundedMask | None, *, causal: bool
) -> Bounds | None:
    """Return the bounds of a mask, None for a tensor. No mask: one row attends to all keys."""
    if isinstance(attention_mask, BoundedMask):
        return attention_mask.bounds
    rows, keys = call.query.shape[2], call.key.shape[2]
    if attention_mask is not None or (causal and 1 != rows != keys):
        return None
    return Bounds(keys, causal=bool(causal and rows > 1))


def _packed(call: Arguments, bounds: Bounds | None, keywords: dict[str, Any]) -> Bounds | None:
    """Add packed sequences, which the caller's keywords tell, to bounds that know of none."""
    ends = [keywords[name] for name in ENDS if keywords.get(name) is not None]
    if bounds is None or bounds.sequences is not None or len(ends) < len(ENDS):
        return bounds
    batch, _, rows, _ = call.query.shape
    if not rows == call.key.shape[2] == bounds.keys:
        raise ProblemError(
            f"cu_seq_lens_q with {rows} rows and {call.key.shape[2]} keys",
            rule="variable-length sequences must be whole: as many keys as rows",
            fix="use no cache, or pass an attention mask instead of cu_seq_lens",
        )
    total = batch * rows
    # Rows past the last sequence are one more: all of the result has to be written.
    offsets = [functional.pad(end, (0, 1), value=total).to(torch.int32) for end in ends]
    longest = [int(keywords.get(name) or total) for name in LONGEST]
    return replace(bounds, sequences=Sequences(offsets[0], offsets[1], longest[0], longest[1]))


def _by_kernels(call: Arguments, bounds: Bounds, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Return the attention [batch, rows, heads, value_dim] of Warploom's kernels."""
    if bounds.lengths is not None:
        return steps.attend(call, bounds)
    dim, value_dim = call.query.shape[3], call.value.shape[3]
    width, value_width = (-(-size // _UNIT) * _UNIT for size in (dim, value_dim))
    if not are_together(width, value_width):
        width = value_width = max(width, value_width)
    query, key = (_padded(one, width) for one in (call.query, _first(call.key, bounds.keys)))
    value = _padded(_first(call.value, bounds.keys), value_width)
    common: dict[str, Any] = {
        **_band(call, bounds),
        "dropout_p": call.dropout,
        **extras.keywords(call, mask, bounds.keys),
    }
    if bounds.sequences is None:
        out = api.attention(query, key, value, **common).transpose(1, 2)
    else:
        sequences = bounds.sequences
        out = api.attention(
            *(tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)),
            cu_seqlens_q=sequences.cu_seqlens_q,
            cu_seqlens_k=sequences.cu_seqlens_k,
            max_seqlen_q=sequences.max_seqlen_q,
            max_seqlen_k=sequences.max_seqlen_k,
            **common,
        )
        out = out.reshape(call.query.shape[0], call.query.shape[2], *out.shape[1:])
    cut: torch.Tensor = out[..., :value_dim]
    return cut.contiguous()


def _by_8_bits(call: Arguments, bounds: Bounds, scores: str) -> torch.Tensor:
    """The same of operands that are quantized to 8 bits, scores to this type."""
    key, value = (_first(tensor, bounds.keys) for tensor in (call.key, call.value))
    told = {**_band(call, bounds), "softcap": call.softcap, "scores": scores}
    out: torch.Tensor = attention_8bit(call.query, key, value, **told)
    return out.transpose(1, 2).contiguous()


def _band(call: Arguments, bounds: Bounds) -> dict[str, Any]:
    """What functions of attention are told of a mask that is a band, and the scale of scores."""
    right = 0 if bounds.causal else bounds.window
    return {
        "causal": "bottom_right" if bounds.causal else False,
        "window": None if bounds.window is None else (bounds.window, right),
        "scale": call.query.shape[3] ** -0.5 if call.scale is None else call.scale,
    }


def _padded(tensor: torch.Tensor, width: int) -> torch.Tensor:
    """The tensor with zeros up to a head dimension."""
    missing = width - tensor.shape[3]
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _first(tensor: torch.Tensor, keys: int) -> torch.Tensor:
    """The first keys; autograd would give a slice of all a gradient of zeros to copy into."""
    return tensor if tensor.shape[2] == keys else tensor[:, :, :keys]


def _by_torch(
    call: Arguments,
    attention_mask: torch.Tensor | BoundedMask | None,
    bounds: Bounds | None,
    packed: Bounds | None,
) -> torch.Tensor:
    """Return the attention [batch, rows, heads, value_dim] of torch, by the mask as a tensor."""
    mask = attention_mask.tensor() if isinstance(attention_mask, BoundedMask) else attention_mask
    causal = attention_mask is None and (bounds is None or bounds.causal)
    if packed is not bounds and packed is not None and packed.sequences is not None:
        same = _same_sequence(packed.sequences, call, causal=causal)
        mask, causal = (same if mask is None else same & mask), False
    out = torch_attention.attention(call, mask, causal=causal)
    return out.transpose(1, 2).contiguous()


def _separated(call: Arguments, told: dict[str, Any], *, causal: bool) -> torch.Tensor | None:
    """Return the mask of packed sequences that a caller's keywords tell; None without."""
    packed = _packed(call, Bounds(call.key.shape[2], causal=causal), told)
    sequences = None if packed is None else packed.sequences
    return None if sequences is None else _same_sequence(sequences, call, causal=causal)


def _same_sequence(sequences: Sequences, call: Arguments, *, causal: bool) -> torch.Tensor:
    """Return which rows and keys are of one sequence: bool [batch, 1, rows, rows]."""
    batch, _, rows, _ = call.query.shape
    ends = sequences.cu_seqlens_q[1:].contiguous()
    positions = torch.arange(batch * rows, device=ends.device, dtype=ends.dtype)
    of_row = torch.searchsorted(ends, positions, right=True).view(batch, 1, rows)
    same = of_row[..., :, None] == of_row[..., None, :]
    return same.tril() if causal else same
