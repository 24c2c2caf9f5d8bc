"""What tests of transformers' models share: layers whose masks and biases are tensors, gradients.

What is right of a layer is torch's own computation in fp64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from warploom.integrations import transformers_attention

HEADS, KV_HEADS = 4, 2
FEW = 16  # numbers
_FURTHER = ("position_bias", "s_aux")  # what has a gradient beside query, key and value

LAYERS: dict[str, Callable[[int], dict[str, Any]]] = {  # by the number of rows
    "mask": lambda rows: {"attention_mask": _keep(rows)},
    "mask of heads": lambda rows: {"attention_mask": _keep(rows).expand(2, HEADS, rows, rows)},
    "added": lambda rows: {"attention_mask": _added(rows).bfloat16()},
    "bias": lambda rows: {"position_bias": _position(rows)},
    "bias, causal": lambda rows: {"position_bias": _position(rows), "is_causal": True},
    "bias and mask": lambda rows: {
        "attention_mask": _keep(rows),
        "position_bias": _position(rows).bfloat16(),
    },
    "bias and what is added": lambda rows: {
        "attention_mask": _added(rows),
        "position_bias": _position(rows),
    },
    "sinks and mask": lambda rows: {"attention_mask": _keep(rows), "s_aux": _sinks().bfloat16()},
    "sinks, mask and softcap": lambda rows: {
        "attention_mask": _keep(rows),
        "s_aux": _sinks(),
        "softcap": 2.0,
    },
}


def _drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _keep(rows: int) -> torch.Tensor:
    return _drawn(2, 1, rows, rows) > -0.5


def _added(rows: int) -> torch.Tensor:
    """Zeros, and for what is hidden the lowest number, as models have it."""
    return torch.zeros(2, 1, rows, rows).masked_fill(~_keep(rows), torch.finfo(torch.bfloat16).min)


def _position(rows: int) -> torch.Tensor:
    """A bias of more keys than there are, which models leave to their attention to cut off."""
    return _drawn(1, HEADS, rows, rows + 3)


def _sinks() -> torch.Tensor:
    return _drawn(HEADS)


def verify(name: str, rows: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Assert that a layer's result and all its gradients are torch's, to bf16."""
    told = {"attention_mask": None, "is_causal": False} | LAYERS[name](rows)
    told = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in told.items()}
    further = [key for key in _FURTHER if key in told]
    leaves = [_drawn(2, n, rows, 32 + i) for i, n in enumerate((HEADS, KV_HEADS, KV_HEADS))]
    leaves = [*(one[..., :32].to(device, torch.bfloat16) for one in leaves)]
    leaves += [told[key] for key in further]
    arriving = _drawn(2, rows, HEADS, 32).to(device, torch.bfloat16)

    def computed(dtype: torch.dtype | None) -> list[torch.Tensor]:
        given = [one.detach().clone().to(dtype).requires_grad_() for one in leaves]
        keywords = told | dict(zip(further, given[3:], strict=True))
        mask = told["attention_mask"]
        if dtype is not None and mask is not None and mask.is_floating_point():
            keywords["attention_mask"] = mask.to(dtype)
        out, _ = transformers_attention.attention(torch.nn.Module(), *given[:3], **keywords)
        return [out, *torch.autograd.grad(out, given, arriving.to(out.dtype))]

    found = computed(None)
    monkeypatch.setattr(transformers_attention, "elsewhere", lambda tensor: "this is torch's")
    for got, wanted in zip(found, computed(torch.float64), strict=True):
        assert got.shape == wanted.shape
        assert (got.double() - wanted).norm() < 0.02 * wanted.norm()


def gradients(learning: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a model's parameters in fp32, flat, by name.

    A module that has one of FEW numbers has all of its gradients together: how far bf16 is off in
    few numbers is luck, and no yardstick.
    """
    found: dict[str, list[torch.Tensor]] = defaultdict(list)
    for name, module in learning.named_modules():
        own = [(key, one) for key, one in module.named_parameters(name, recurse=False)]
        together = any(one.numel() <= FEW for _, one in own)
        for key, one in own:
            if one.grad is not None:
                found[name if together else key].append(one.grad.float().flatten())
    return {key: torch.cat(those) for key, those in found.items()}
