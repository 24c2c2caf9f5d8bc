"""Quantizing D: 128 columns of a row are divided by a scale of their own, which is an output."""

from __future__ import annotations

from math import prod

import torch

from warploom.errors import ProblemError
from warploom.generator.epilogue import BLOCK, Quantize
from warploom.runtime.elements import LARGEST
from warploom.runtime.families._product.steps.operand import Extents, fp32_tensor
from warploom.runtime.families._product.steps.step import ROUNDOFF, Draws, Item, TorchStep
from warploom.runtime.operands import refuse_repeated

_POW2 = "quantize_pow2"
_MOST = torch.finfo(torch.float32).max


def _largest(x: torch.Tensor) -> torch.Tensor:
    """The largest magnitude in each block of columns of x [.., m, n]: [.., m, blocks] in fp32."""
    blocks = -(-x.shape[-1] // BLOCK)
    padded = x.new_zeros((*x.shape[:-1], blocks * BLOCK))
    padded[..., : x.shape[-1]] = x.abs().nan_to_num(nan=0.0, posinf=torch.inf)
    return padded.view(*x.shape[:-1], blocks, BLOCK).amax(-1).to(torch.float32)


def inverses(x: torch.Tensor, kind: str) -> torch.Tensor:
    """What each block of columns of x [.., m, n] is multiplied by: [.., m, blocks] in fp32.

    That is 448 over the largest magnitude; 1 where this is 0 or infinite. NaN does not count.
    """
    most = _largest(x)
    found = (LARGEST[torch.float8_e4m3fn] / most).clamp(max=_MOST)
    found = torch.where((most > 0) & most.isfinite(), found, torch.ones_like(found))
    if kind == _POW2:
        found = (found.view(torch.int32) & 0x7F800000).view(torch.float32)
    return found


def _spread(blocks: torch.Tensor, n: int) -> torch.Tensor:
    return blocks.repeat_interleave(BLOCK, -1)[..., :n]


class TorchQuantize(TorchStep[Quantize]):
    """Fills a tensor of scales [m, blocks], whose rows follow each other, and divides by them."""

    step = Quantize
    example = '("quantize", scales)'
    overwrites = True
    no_gradient = "its result is rounded to 8 bits"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Quantize, torch.Tensor]:
        kind, value = item[0], fp32_tensor(item, device)
        rows, blocks = prod(at.batches) * at.m, -(-at.n // BLOCK)
        lies = value.dim() == 2 and (rows < 2 or value.stride(0) == 1)
        apart = value.dim() == 2 and (blocks < 2 or value.stride(1) >= rows)
        if tuple(value.shape) != (rows, blocks) or not (lies and apart):
            raise ProblemError(
                f"{kind} of shape {list(value.shape)} with strides {list(value.stride())}",
                rule=f"must be [{rows}, {blocks}], a scale for each row and {BLOCK} columns, with "
                "rows next to each other (strides 1 and at least their number)",
                fix=f"make it by torch.empty({blocks}, {rows}, device=a.device).t()",
            )
        refuse_repeated(kind, value)
        return Quantize("pow2" if kind == _POW2 else "exact"), value

    def row_pitch(self, value: torch.Tensor, batches: tuple[int, ...]) -> int | None:
        return value.stride(1)

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x * _spread(inverses(x, item[0]), x.shape[-1]).to(x.dtype)

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        """A scale is off by as much as the largest magnitude is; one that is rounded to a power of
        two may be another, below or above, where that is near one. A block that may be 0 is within
        its own error.
        """
        n = before.shape[-1]
        inverse = inverses(before, item[0]).to(before.dtype)
        least = inverses(before.abs() + error, item[0]).to(before.dtype)
        below = (before.abs() - error).clamp(min=0)
        most = torch.maximum(inverse, inverses(below, item[0]).to(before.dtype))
        most = torch.where(_largest(below) > 0, most, inverse)
        moved = torch.maximum((inverse - least).abs() / least, (most - inverse) / inverse)
        moved = (moved + 4 * ROUNDOFF) * (inverse > 0)
        own = error * _spread(torch.maximum(most, least), n)
        return own + after.abs() * _spread(moved, n)

    def write(self, x: torch.Tensor, item: Item) -> None:
        found = 1 / inverses(x, item[0])
        item[1].copy_(found.reshape(item[1].shape))

    def sample(self, step: Quantize, draws: Draws, at: Extents) -> Item:
        kind = _POW2 if step.scale == "pow2" else "quantize"
        return (kind, draws.zeros(-(-at.n // BLOCK), prod(at.batches) * at.m).t())
