"""Torch's operators of scaled dot product attention, run by Warploom's kernels where they fit.

`F.scaled_dot_product_attention` picks one of torch's fused operators; these are implementations of
two of them, FlashAttention's and cuDNN's, of the one for packed sequences, and of their gradients;
the memory-efficient one, which alone has gradients of masks, is in sdpa_efficient.py.
What the rules refuse goes to the kernels that torch had there. Either backward pass takes what
either forward pass returned: without dropout, both mean the natural log-sum-exp of each row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from warploom.integrations import sdpa_biased as biased
from warploom.integrations import sdpa_efficient
from warploom.integrations.sdpa_calls import Gradients, Operator, attend, differentiate
from warploom.integrations.sdpa_packed import PackedArguments
from warploom.integrations.sdpa_packed import attend as attend_packed
from warploom.integrations.sdpa_packed import differentiate as differentiate_packed

FLASH = Operator(
    "aten::_scaled_dot_product_flash_attention", "bottom_right", (), (2,), torch.uint64
)
CUDNN = Operator("aten::_scaled_dot_product_cudnn_attention", "top_left", (1,), (), torch.int64)
FLASH_BACKWARD, CUDNN_BACKWARD = f"{FLASH.name}_backward", f"{CUDNN.name}_backward"
PACKED, PACKED_BACKWARD = "aten::_flash_attention_forward", "aten::_flash_attention_backward"
EFFICIENT, EFFICIENT_BACKWARD = sdpa_efficient.OPERATORS
OPERATORS = (
    FLASH.name,
    FLASH_BACKWARD,
    CUDNN.name,
    CUDNN_BACKWARD,
    EFFICIENT,
    EFFICIENT_BACKWARD,
    PACKED,
    PACKED_BACKWARD,
)

OptionalTensor = torch.Tensor | None


@dataclass(frozen=True)
class Override:
    """The implementations. `kernels` are torch's own, by operator, for the dispatch keys `keys`."""

    kernels: Mapping[str, Any]
    keys: Any

    def implementations(self) -> dict[str, Any]:
        """What runs each of OPERATORS."""
        fused = (self.flash, self.flash_backward, self.cudnn, self.cudnn_backward)
        efficient = sdpa_efficient.Override(self._run_torch)
        masked = (efficient.forward, efficient.backward)
        packed = (self.packed, self.packed_backward)
        return dict(zip(OPERATORS, (*fused, *masked, *packed), strict=True))

    def flash(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """FlashAttention's operator."""
        if dropout_p == 0.0 and not return_debug_mask:
            found = attend(FLASH, query, key, value, is_causal, scale)
            if found is not None:
                out, lse, like = found
                seed, offset = torch.empty_like(like.seed), torch.empty_like(like.offset)
                lengths = query.shape[2], key.shape[2]
                return out, lse, None, None, *lengths, seed, offset, like.debug
        given = (query, key, value, dropout_p, is_causal, return_debug_mask)
        by_torch: tuple[Any, ...] = self._run_torch(FLASH.name, *given, scale=scale)
        return by_torch

    def flash_backward(
        self,
        grad_out: OptionalTensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: OptionalTensor,
        cum_seq_k: OptionalTensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: OptionalTensor,
        philox_offset: OptionalTensor,
        *,
        scale: float | None = None,
    ) -> Gradients:
        """The gradients of FlashAttention's operator."""
        saved = (query, key, value, out, logsumexp)
        if dropout_p == 0.0 and grad_out is not None:
            found = differentiate(FLASH, grad_out, *saved, is_causal, scale)
            if found is not None:
                return found
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        given = (grad_out, *saved, *lengths, dropout_p, is_causal, philox_seed, philox_offset)
        by_torch: Gradients = self._run_torch(FLASH_BACKWARD, *given, scale=scale)
        return by_torch

    def cudnn(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: OptionalTensor,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[Any, ...]:
        """cuDNN's operator; its log-sum-exp is computed whether it is asked for or not."""
        lengths = query.shape[2], key.shape[2]
        if attn_bias is None and dropout_p == 0.0:
            found = attend(CUDNN, query, key, value, is_causal, scale)
            if found is not None:
                out, lse, like = found
                seed, offset = torch.empty_like(like.seed), torch.empty_like(like.offset)
                return out, lse, None, None, *lengths, seed, offset, None
        elif attn_bias is not None and dropout_p == 0.0:
            operands = (query, key, value)
            masked = biased.masked(*operands, attn_bias, is_causal, scale)
            rows = None
            if masked is not None:
                out = torch.empty_like(query)
                rows = biased.attend(CUDNN, out, *operands, masked, scale)
            if rows is not None:
                seed, offset = (query.new_empty((), dtype=CUDNN.integer) for _ in range(2))
                return out, rows[..., None], None, None, *lengths, seed, offset, None
        given = (query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal)
        by_torch: tuple[Any, ...] = self._run_torch(
            CUDNN.name, *given, return_debug_mask, scale=scale
        )
        return by_torch

    def cudnn_backward(
        self,
        grad_out: OptionalTensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        philox_seed: OptionalTensor,
        philox_offset: OptionalTensor,
        attn_bias: OptionalTensor,
        cum_seq_q: OptionalTensor,
        cum_seq_k: OptionalTensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        *,
        scale: float | None = None,
    ) -> Gradients:
        """The gradients of cuDNN's operator."""
        saved = (query, key, value, out, logsumexp)
        if attn_bias is None and dropout_p == 0.0 and grad_out is not None:
            found = differentiate(CUDNN, grad_out, *saved, is_causal, scale)
            if found is not None:
                return found
        elif attn_bias is not None and dropout_p == 0.0 and grad_out is not None:
            operands = (query, key, value)
            masked = biased.masked(*operands, attn_bias, is_causal, scale)
            if masked is not None:
                into = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
                read = (grad_out, *operands, masked, out, logsumexp.squeeze(-1))
                if biased.differentiate(CUDNN, into, *read, scale):
                    return into
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        given = (grad_out, *saved, philox_seed, philox_offset, attn_bias, *lengths)
        by_torch: Gradients = self._run_torch(
            CUDNN_BACKWARD, *given, dropout_p, is_causal, scale=scale
        )
        return by_torch

    def packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cum_seq_q: OptionalTensor,
        cum_seq_k: OptionalTensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        return_debug_mask: bool,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        **more: Any,
    ) -> tuple[Any, ...]:
        """FlashAttention of packed sequences; without them, it is what torch's own kernels call."""
        given = (query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
        window = (window_size_left, window_size_right)
        plain = dropout_p == 0.0 and not return_debug_mask
        plain = plain and all(value is None for value in more.values())
        if plain and cum_seq_q is not None and cum_seq_k is not None:
            arguments = PackedArguments(
                cum_seq_q, cum_seq_k, max_q, max_k, is_causal, *window, scale
            )
            found = attend_packed(query, key, value, arguments)
            if found is not None:
                seed = query.new_empty(2, dtype=torch.uint64)
                offset = query.new_empty((), dtype=torch.uint64)
                return *found, seed, offset, query.new_empty(0)
        by_torch: tuple[Any, ...] = self._run_torch(
            PACKED,
            *given,
            dropout_p,
            is_causal,
            return_debug_mask,
            scale=scale,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
            **more,
        )
        return by_torch

    def packed_backward(
        self,
        grad_out: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        cum_seq_q: OptionalTensor,
        cum_seq_k: OptionalTensor,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        rng_state: OptionalTensor,
        unused: OptionalTensor,
        *,
        scale: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
    ) -> Gradients:
        """The gradients of FlashAttention of packed sequences."""
        given = (grad_out, query, key, value, out, logsumexp)
        lengths = (cum_seq_q, cum_seq_k, max_q, max_k)
        window = (window_size_left, window_size_right)
        if dropout_p == 0.0 and cum_seq_q is not None and cum_seq_k is not None:
            arguments = PackedArguments(
                cum_seq_q, cum_seq_k, max_q, max_k, is_causal, *window, scale
            )
            found = differentiate_packed(*given, arguments)
            if found is not None:
                return found
        by_torch: Gradients = self._run_torch(
            PACKED_BACKWARD,
            *given,
            *lengths,
            dropout_p,
            is_causal,
            rng_state,
            unused,
            scale=scale,
            window_size_left=window_size_left,
            window_size_right=window_size_right,
        )
        return by_torch

    def _run_torch(self, operator: str, *given: Any, **keywords: Any) -> Any:  # noqa: ANN401
        """What torch's own kernel returns."""
        return self.kernels[operator].call_boxed(self.keys, *given, **keywords)
