"""A byte-level GPT, of Warploom's modules or of torch's: the same weights by the same names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

import warploom
import warploom.nn
from warploom.float8 import Recipe

Implementation = Literal["warploom", "torch"]
BYTES = 256  # the vocabulary


@dataclass(frozen=True, slots=True)
class Size:
    """How large a model is; `context` is how many bytes it sees at once."""

    layers: int
    width: int
    heads: int
    context: int


class TorchLinearGelu(nn.Linear):
    """What warploom.nn.Linear(activation="gelu") does in one kernel, by torch in two."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return gelu(x weight^T + bias): [..., in_features] -> [..., out_features]."""
        return functional.gelu(super().forward(x))


def linear(
    in_features: int,
    out_features: int,
    implementation: Implementation,
    recipe: Recipe | None = None,
    *,
    gelu: bool = False,
    dropout_blocks: float = 0.0,
) -> nn.Linear:
    """A linear layer with a bias, and a GELU if asked for; with a recipe it trains in fp8.

    `dropout_blocks` is the probability with which blocks of its input are dropped in training.
    """
    if implementation == "torch":
        return (TorchLinearGelu if gelu else nn.Linear)(in_features, out_features)
    activation = "gelu" if gelu else None
    return warploom.nn.Linear(
        in_features,
        out_features,
        activation=activation,
        recipe=recipe,
        dropout_blocks=dropout_blocks,
    )


class Block(nn.Module):
    """Causal attention and an MLP, each of what LayerNorm gives it, added to what came in."""

    def __init__(
        self,
        size: Size,
        implementation: Implementation,
        recipe: Recipe | None,
        dropout_blocks: float,
    ) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.attend = (
            warploom.sdpa
            if implementation == "warploom"
            else functional.scaled_dot_product_attention
        )
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = linear(width, 3 * width, implementation, recipe)
        self.out = linear(width, width, implementation, recipe)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = linear(width, 4 * width, implementation, recipe, gelu=True)
        self.down = linear(4 * width, width, implementation, recipe, dropout_blocks=dropout_blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, length, width] -> the same."""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # views: [batch, heads, length, dim]
        attended = self.attend(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        added: torch.Tensor = self.down(self.up(self.mlp_norm(x)))
        return x + added


class Gpt(nn.Module):
    """A GPT over bytes, with learnt positions and LayerNorm before each part of a block.

    `seed` decides the weights, whatever the implementation. With a recipe, warploom's layers of the
    blocks train in fp8; the head does not. With dropout_blocks, the last layer of each MLP drops
    blocks of 128 rows by 128 columns of its input.
    """

    def __init__(
        self,
        size: Size,
        implementation: Implementation,
        seed: int,
        recipe: Recipe | None = None,
        dropout_blocks: float = 0.0,
    ) -> None:
        super().__init__()
        self.bytes = nn.Embedding(BYTES, size.width)
        self.positions = nn.Parameter(torch.empty(size.context, size.width))
        self.blocks = nn.ModuleList(
            Block(size, implementation, recipe, dropout_blocks) for _ in range(size.layers)
        )
        self.norm = nn.LayerNorm(size.width)
        self.head = linear(size.width, BYTES, implementation)
        self._draw(torch.Generator().manual_seed(seed), 0.02, (2 * size.layers) ** -0.5)

    def _draw(self, generator: torch.Generator, deviation: float, residual: float) -> None:
        """Draw the matrices; those that end a branch are smaller by `residual`, as in GPT-2."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                scale = residual if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=deviation * scale, generator=generator)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """Bytes [batch, length], int64, length <= context -> logits [batch, length, 256]."""
        x = self.bytes(text) + self.positions[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_byte_loss(logits: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy, nats a byte, of `text` by the logits of the bytes before it."""
    return functional.cross_entropy(logits.float().flatten(0, 1), text.flatten())
