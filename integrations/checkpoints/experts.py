"""The experts of GPT-OSS with quantized weights: two `QuantizedLinear` for each expert."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from warploom.integrations.quantized_linear import QuantizedLinear

CLASS = "GptOssExperts"  # of transformers, which this takes the place of
PARTS = ("gate_up_proj", "down_proj")


class QuantizedExperts(torch.nn.Module):
    """Experts of a GPT-OSS layer, each two quantized linear layers.

    The parameters of expert 3 are those of `gate_up_proj.3` and `down_proj.3`. Results are those of
    transformers' `GptOssExperts` with the same weights. Each expert that a token was sent to is two
    mixed-input GEMMs; which ones they are is read on the host, as transformers' own loop does.
    """

    def __init__(
        self,
        gate_up_proj: Iterable[QuantizedLinear],
        down_proj: Iterable[QuantizedLinear],
        *,
        alpha: float,
        limit: float,
    ) -> None:
        """Take the layers of all experts, in order.

        Args:
            gate_up_proj: For each expert [2 I, H] with a bias; rows of gate and up alternate.
            down_proj: For each expert [H, I] with a bias.
            alpha: Factor of gate in its sigmoid.
            limit: Gate is clamped from above by it, up from both sides.
        """
        super().__init__()
        self.gate_up_proj = torch.nn.ModuleList(gate_up_proj)
        self.down_proj = torch.nn.ModuleList(down_proj)
        self.alpha = alpha
        self.limit = limit

    @classmethod
    def in_place_of(
        cls,
        experts: Any,  # noqa: ANN401 (GptOssExperts)
        gate_up_proj: Iterable[QuantizedLinear],
        down_proj: Iterable[QuantizedLinear],
    ) -> QuantizedExperts:
        """Return experts with the constants of transformers' module, and these layers."""
        made = cls(gate_up_proj, down_proj, alpha=experts.alpha, limit=experts.limit)
        return made.train(experts.training)

    def forward(
        self,
        hidden_states: torch.Tensor,
        router_indices: torch.Tensor,
        routing_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return what the experts of each token give, weighted and added up [T, H].

        Args:
            hidden_states: [T, H].
            router_indices: The experts of each token [T, top_k].
            routing_weights: Their weights [T, top_k], or those of all experts [T, experts].
        """
        total = torch.zeros_like(hidden_states)
        listed = routing_weights.shape == router_indices.shape
        hit: torch.Tensor = torch.unique(router_indices)
        for expert in hit.tolist():
            if not 0 <= expert < len(self.down_proj):  # tokens of other ranks
                continue
            token, slot = torch.where(router_indices == expert)
            gate, up = (
                self.gate_up_proj[expert](hidden_states[token]).unflatten(-1, (-1, 2)).unbind(-1)
            )
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
            inner = (up + 1) * gate * torch.sigmoid(self.alpha * gate)
            share = routing_weights[token, slot if listed else expert]
            result = self.down_proj[expert](inner) * share.unsqueeze(-1)
            total.index_add_(0, token, result.to(total.dtype))
        return total
