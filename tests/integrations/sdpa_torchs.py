"""Torch's fused attentions on the CPU, which has another one, so that tests need no GPU.

`Torchs` stands for the kernels that torch has on a GPU: it counts its calls and computes by torch's
CPU kernels, where there is one. `routed` leads F.scaled_dot_product_attention on CPU tensors to the
operators that are overridden, as torch leads it on GPU tensors.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from warploom.integrations.sdpa_override import CUDNN, EFFICIENT, OPERATORS

_COMMON = "aten::_scaled_dot_product_"
_OWN = "aten::_scaled_dot_product_flash_attention_for_cpu"
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_NOTHING = torch.empty(0)


class Torchs:
    """One of OPERATORS as torch would have it."""

    def __init__(self, operator: str, ran: list[str]) -> None:
        self.operator, self.ran = operator, ran
        own = f"{_OWN}_backward" if operator.endswith("_backward") else _OWN
        self.own: Any = torch.library.get_kernel(own, "CPU")

    def call_boxed(self, keys: object, *given: Any, scale: float | None, **more: Any) -> Any:  # noqa: ANN401
        """Compute by torch's kernel for the CPU, which takes no packed sequences."""
        name = self.operator.removeprefix("aten::_")
        self.ran.append(name.removeprefix("scaled_dot_product_"))
        if name.startswith("flash_attention"):
            raise NotImplementedError(name)
        named = dict(zip(_names(self.operator), given, strict=False))
        mask = named.get("attn_bias")
        mask = mask[None] if mask is not None and mask.dim() == 3 else mask
        flags = 0.0, named.get("is_causal", False)  # its kernel has no dropout either
        operands = [named[one] for one in ("query", "key", "value")]
        if self.operator.endswith("_backward"):
            rows = named["logsumexp"][:, :, : operands[0].shape[2]].reshape(operands[0].shape[:-1])
            first = given[0]
            saved = (*operands, named["out"], rows)
            found = self.own.call_boxed(_KEYS, first, *saved, *flags, attn_mask=mask, scale=scale)
            return (*found, None) if "grad_input_mask" in named else found
        out, lse = self.own.call_boxed(_KEYS, *operands, *flags, attn_mask=mask, scale=scale)
        if self.operator == EFFICIENT:
            rows = torch.full((*lse.shape[:2], -(-lse.shape[2] // 32) * 32), torch.inf)
            rows[..., : lse.shape[2]] = lse
            return out, rows, *torch.zeros(2, dtype=torch.int64)
        if self.operator == CUDNN.name:
            lse = lse.unsqueeze(-1)
        integer = torch.zeros(2, dtype=torch.int64)
        lengths = given[0].shape[2], given[1].shape[2]
        return out, lse, None, None, *lengths, integer, integer[0], _NOTHING


def torchs(ran: list[str]) -> dict[str, Torchs]:
    """The kernels that torch would have; what runs is noted in `ran`."""
    return {operator: Torchs(operator, ran) for operator in OPERATORS}


def _names(operator: str) -> list[str]:
    schema = getattr(torch.ops.aten, operator.removeprefix("aten::")).default._schema
    return [argument.name for argument in schema.arguments]


def operator(name: str, *given: torch.Tensor, **keywords: Any) -> tuple[Any, ...]:
    """One of the operators that torch picks, as its function calls them."""
    masked = name != "flash_attention"
    more = (keywords.pop("attn_bias", None), True) if masked else ()
    flags = [keywords.pop(key, kept) for key, kept in (("dropout_p", 0.0), ("is_causal", False))]
    run = getattr(torch.ops.aten, f"_scaled_dot_product_{name}")
    found: tuple[Any, ...] = run(*given, *more, *flags, **keywords)
    return found


@contextlib.contextmanager
def routed() -> Iterator[None]:
    """Lead torch's function on CPU tensors to the operators that it takes on a GPU."""
    forward = torch.library.get_kernel(_OWN, "CPU")
    backward = torch.library.get_kernel(f"{_OWN}_backward", "CPU")

    def attend(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: torch.Tensor | None = None,
        scale: float | None = None,
    ) -> Any:  # noqa: ANN401
        flags = dropout_p, is_causal
        if attn_mask is not None:
            given = (q, k, v, *flags)
            return forward.call_boxed(_KEYS, *given, attn_mask=attn_mask, scale=scale)
        if is_causal and q.shape[2] != k.shape[2]:  # which FlashAttention's gatekeeper refuses
            found = torch.ops.aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, *flags, scale=scale
            )
            return found[0], found[1].squeeze(-1)
        return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, *flags, scale=scale)[:2]

    def differentiate(
        *saved: Any, attn_mask: torch.Tensor | None = None, scale: float | None = None
    ) -> Any:  # noqa: ANN401
        *given, dropout_p, is_causal = saved
        if attn_mask is not None:
            return backward.call_boxed(_KEYS, *saved, attn_mask=attn_mask, scale=scale)
        nothing = (_NOTHING, _NOTHING)
        flags = (*nothing, 0, 0, dropout_p, is_causal)
        if is_causal and given[1].shape[2] != given[2].shape[2]:
            given[5] = given[5].unsqueeze(-1)
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *given, *nothing, None, *flags, scale=scale
            )
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *given, *flags, *nothing, scale=scale
        )

    library = torch.library.Library("aten", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl(_OWN.removeprefix("aten::"), attend, "CPU")
        library.impl(f"{_OWN.removeprefix('aten::')}_backward", differentiate, "CPU")
    try:
        yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]
