"""`warploom.sdpa`: torch's scaled dot product attention, by Warploom's kernels where they fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.nn import functional

from warploom.errors import ProblemError
from warploom.generator.targets import target
from warploom.integrations import sdpa_activation, sdpa_mask
from warploom.integrations import sdpa_rules as rules
from warploom.runtime.api import explain
from warploom.runtime.explanation import Explanation
from warploom.runtime.families.attention_forward.api import attention
from warploom.runtime.families.attention_forward.attention_8bit import attention_8bit
from warploom.runtime.tensors import lowered


class Sdpa:
    """The function `warploom.sdpa`; an object, so that it can say what it does."""

    __name__ = "sdpa"

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        scores: Literal["int8", "e4m3"] | None = None,
    ) -> torch.Tensor:
        """Compute attention with the signature of torch.nn.functional.scaled_dot_product_attention.

        Calls that Warploom's kernels do not support are passed to torch's own function, unchanged;
        `warploom.explain(warploom.sdpa, query, key, value, ...)` says which one runs, and why.

        Args:
            query: [..., heads, length, dim]. Kernels take fp16 and bf16 on a Hopper GPU, and head
                dimensions that are multiples of 8 up to 256 (or up to 192, with a smaller one of
                value, up to 128).
            key: [..., kv_heads, key length, dim].
            value: [..., kv_heads, key length, dim_v].
            attn_mask: Booleans, or numbers that are added to scores and have a gradient. It is read
                in place, broadcast by strides, if its rows are contiguous and begin at multiples of
                16 bytes, and copied otherwise. A row whose every score is -inf gives 0.
            dropout_p: The probability that a weight is dropped, with a state drawn from torch's
                generator of the device; torch's own kernels drop other weights.
            is_causal: Row i attends to keys 0 to i, aligned at the top left, as in torch.
            scale: The factor of query key^T, dim ** -0.5 by default.
            enable_gqa: Whether heads may be a multiple of kv_heads, as in torch.
            scores: Quantize query and key to "int8" (more exact) or "e4m3" in each call, and value
                to e4m3, as `warploom.attention_8bit` does. None quantizes nothing.

        Returns:
            [..., heads, length, dim_v], with the order of query's strides. It is differentiable,
            and one operator in a compiled graph.

        Raises:
            ProblemError: For what 8-bit attention does not support, if `scores` is given; torch's
                own errors otherwise.

        Under autocast, query, key and value are converted as torch does.

        Example:
            >>> q, k, v = (torch.randn(2, 8, 16, 64).bfloat16() for _ in range(3))
            >>> warploom.sdpa(q, k, v, is_causal=True).shape
            torch.Size([2, 8, 16, 64])
        """
        if scores is not None:
            _require_none(attn_mask, dropout_p)
            _require_heads(query, key, enable_gqa)
            told: Any = {"scores": scores, "causal": _causal(is_causal), "scale": scale}
            return _unfolded(attention_8bit(*_folded(query, key, value), **told), query, value)
        if torch._C._is_any_autocast_enabled():
            query, key, value = lowered(query), lowered(key), lowered(value)
            attn_mask = None if attn_mask is None else lowered(attn_mask)
        if rules.refusal(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
            return functional.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        causal = _causal(is_causal)
        if query.dim() == 4 and attn_mask is None:
            return attention(query, key, value, causal=causal, scale=scale, dropout_p=dropout_p)
        masked: Any = sdpa_mask.keywords(attn_mask)
        told = {"causal": causal, "scale": scale, "dropout_p": dropout_p, **masked}
        return _unfolded(attention(*_folded(query, key, value), **told), query, value)

    def explanation(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        *,
        scores: str | None = None,
        gpu: str | None = None,
    ) -> Explanation:
        """What such a call does, here or on the GPU that is named: `warploom.explain` asks."""
        if scores is not None:
            raise ProblemError(
                f"scores {scores!r} in a call that is explained",
                rule="must be left out: operands are quantized first",
                fix="explain warploom.attention of what warploom.attention_quantize returns",
            )
        query, key, value = lowered(query), lowered(key), lowered(value)
        attn_mask = None if attn_mask is None else lowered(attn_mask)
        given: Any = (query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        reason = rules.refusal(*given) if gpu is None else rules.refusal_anywhere(*given)
        if reason:
            return Explanation.by_torch(reason, "" if gpu is None else target(gpu).gpu)
        told: Any = {"causal": _causal(is_causal), "scale": scale, **sdpa_mask.keywords(attn_mask)}
        if dropout_p:  # nothing is drawn
            state = query.new_empty(2, dtype=torch.int64)
            told |= {"dropout_p": dropout_p, "dropout_state": state}
        return explain(*_folded(query, key, value), gpu=gpu, **told)

    def activate(self) -> sdpa_activation.Activation:
        """Let torch's own scaled_dot_product_attention run Warploom's kernels, in all code.

        It is registered and activated in torch's registry of attentions as "warploom", and
        implements the operators that torch picks FlashAttention or cuDNN for, with masks the
        memory-efficient one too, and their gradients. What kernels do not compute, and what torch
        picks another implementation for, stays with torch's own kernels; nothing of torch is
        replaced. Returns what undoes it, by `remove()` or as a context manager, as
        torch.nn.attention.restore_flash_attention_impl() does.

        Takes torch 2.11, built for CUDA. Raises ProblemError for another, and where an attention
        is active already.
        """
        return sdpa_activation.activate()

    def __repr__(self) -> str:
        return "<function warploom.sdpa>"


def _require_none(attn_mask: object, dropout_p: float) -> None:
    """Raise ProblemError for what attention of 8 bits has not."""
    if attn_mask is not None or dropout_p:
        name = "attn_mask" if attn_mask is not None else f"dropout_p {dropout_p}"
        raise ProblemError(
            f"{name} with scores",
            rule="no kernel of 8 bits has it",
            fix="leave one of them out",
        )


def _require_heads(query: torch.Tensor, key: torch.Tensor, enable_gqa: bool) -> None:
    """Raise ProblemError for heads that share keys without a word of it, as torch does."""
    if not enable_gqa and min(query.dim(), key.dim()) > 2 and query.shape[-3] != key.shape[-3]:
        raise ProblemError(
            f"{query.shape[-3]} heads of query by {key.shape[-3]} of key",
            rule="must be as many",
            fix="pass enable_gqa=True where heads of query share those of key",
        )


def _causal(is_causal: bool) -> Any:  # noqa: ANN401 (a Literal or False)
    return "top_left" if is_causal else False


def _folded(*tensors: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views [batch, heads, length, dim] of tensors whose leading dimensions fold."""
    for tensor in tensors:
        if tensor.dim() == 4:
            yield tensor
        else:
            yield tensor.unsqueeze(0) if tensor.dim() == 3 else tensor.flatten(0, -4)


def _unfolded(out: torch.Tensor, query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A result of folded tensors in the leading dimensions that query has."""
    return out if query.dim() == 4 else out.view(*query.shape[:-1], value.shape[-1])


sdpa = Sdpa()
sdpa.__doc__ = Sdpa.__call__.__doc__
