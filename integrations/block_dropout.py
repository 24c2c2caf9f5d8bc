"""Structured dropout: blocks of 128x128 of a layer's input are left out, and not multiplied.

What is left out is skipped by the three GEMMs of a layer (arXiv 2411.01238): the forward pass and
the gradient of the weight multiply the blocks that stay, and the gradient of the input is computed
in these alone. Masks are drawn by torch's generator of the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from warploom.arguments import shown
from warploom.errors import ProblemError
from warploom.generator.targets import target
from warploom.integrations.linear_rules import refusal
from warploom.runtime.explanation import Explanation
from warploom.runtime.families.gemm.block_masks import dropout_mask, expanded
from warploom.runtime.families.gemm.block_scales import blocks_of
from warploom.runtime.families.gemm.block_sparse import BlockSparseCall, block_sparse_gemm
from warploom.runtime.operator import is_distributed
from warploom.runtime.plan import draft, planned
from warploom.runtime.tensors import lowered


def check_probability(name: str, p: object) -> None:
    """Raise ProblemError unless p is a probability below 1."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 <= p < 1:
        raise ProblemError(
            f"{name} {shown(p)}",
            rule="must be a number from 0 to below 1, as what stays is scaled by 1 / (1 - p)",
            fix="use 0 for no dropout",
        )


def block_dropout_linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    p: float = 0.5,
    training: bool = True,
) -> torch.Tensor:
    """Return the linear layer of an input of which blocks of 128x128 are dropped.

    Args:
        input: [.., K]: leading dimensions are rows. Each block of 128 rows by 128 columns is
            zeroed with probability p, or multiplied by 1 / (1 - p). The last blocks may be short.
        weight: [N, K], as of torch.nn.Linear.
        bias: [N].
        p: The probability; with 0 nothing is dropped.
        training: Whether anything is dropped.

    Returns:
        [.., N], differentiable in input, weight and bias. Masks are drawn by torch's generator of
        the device: checkpoints that keep its state compute the same again.

    bf16 and fp16 on a GPU with kernels run on these, in about 1 - p of the time; all else is
    computed by torch, with the same meaning.

    Raises:
        ProblemError: For p outside of [0, 1).

    Example:
        >>> x, weight = torch.randn(256, 256).bfloat16(), torch.randn(64, 256).bfloat16()
        >>> warploom.functional.block_dropout_linear(x, weight, p=0.5).shape
        torch.Size([256, 64])
    """
    check_probability("p", p)
    if not training or p == 0:
        return F.linear(input, weight, bias)
    rows = input.shape[:-1].numel()
    columns = input.shape[-1]
    if rows * columns == 0:
        return F.linear(input, weight, bias)
    if is_distributed(input) or is_distributed(weight):
        raise ProblemError(
            "block_dropout_linear of distributed tensors",
            rule="must be of tensors of one process, whose blocks one mask has",
            fix="use fully_shard or DDP, whose layers compute on such tensors",
        )
    mask = dropout_mask(rows, columns, p, input.device)
    scale = 1 / (1 - p)
    if refusal(input, weight, None):
        counts = expanded(mask, rows, columns).view(input.shape)
        return F.linear(torch.where(counts, input * scale, 0.0), weight, bias)
    x, w = lowered(input), lowered(weight)
    d = block_sparse_gemm(x.reshape(rows, columns), w.t(), mask, alpha=scale, bias=bias)
    return d.view(*input.shape[:-1], weight.shape[0])


def explanation(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    p: float,
    gpu: str | None = None,
) -> Explanation:
    """Return which kernel a layer that drops blocks runs; of a GPU that is named, which it would.

    Args:
        input: [.., K], of the type of the weight.
        weight: [N, K].
        bias: [N].
        p: The probability of a block to be dropped.
        gpu: The name of a GPU.
    """
    x = input.detach().reshape(-1, input.shape[-1])
    mask = x.new_empty((blocks_of(x.shape[0]), blocks_of(x.shape[1])), dtype=torch.bool)
    bias = None if bias is None else bias.detach()
    call = BlockSparseCall(x, weight.detach().t(), mask, bias, "a", 1 / (1 - p))
    if gpu is None:
        return Explanation.of(planned(call))
    found = target(gpu)
    return Explanation.on(found, draft(call, found), None)
