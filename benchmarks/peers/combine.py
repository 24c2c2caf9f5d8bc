"""A whole layer of experts in bf16, compared with transformers' two ways of running it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case, Family, Group, Problem
from warploom.generator.configurations import cells
from warploom.runtime.contest import Contender, Floor

Layer = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Run = Callable[..., torch.Tensor]

ROUNDED = 2.0**-5  # of results whose inner values are rounded to bf16, compared with the largest
COPIED = 16 << 30  # bytes of weights that batched_mm may copy


def layers(asked: Asked) -> Iterator[Case]:
    """The listed models' layers at each number of tokens."""
    listed = cells()["combine"]["layers"]
    for model, (hidden, inner, experts, k) in listed["models"].items():
        for tokens in asked.m or listed["tokens"]:
            pairs = tokens * k
            hit = experts * (1 - (1 - k / experts) ** tokens)
            moved = int(2 * (3 * hit * hidden * inner + 2 * tokens * hidden))
            floor = Floor.of(6 * pairs * hidden * inner, moved, 16)
            problem = {"m": tokens, "model": model, "type": "bf16"}
            sizes = tokens, hidden, inner, experts, k
            yield Case(f"{model} {tokens} tokens", problem, floor, partial(_contenders, sizes))


def _contenders(sizes: tuple[int, int, int, int, int], asked: Asked) -> list[Contender]:
    tokens, hidden, inner, experts, k = sizes
    random = torch.Generator(asked.device).manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=random, device=asked.device, dtype=torch.bfloat16)
        return made.mul_(shape[-1] ** -0.5)

    scores = torch.rand(tokens, experts, generator=random, device=asked.device)
    weights, ids = scores.softmax(-1).topk(k)
    gate_up, down = drawn(experts, 2 * inner, hidden), drawn(experts, hidden, inner)
    layer = drawn(tokens, hidden), ids, weights, gate_up, down
    runs: list[tuple[str, Run]] = [("warploom", warploom.experts), ("grouped_mm", grouped_mm)]
    if 6 * tokens * k * hidden * inner <= COPIED:
        runs.append(("batched_mm", batched_mm))
    return [
        Contender(
            name, [partial(run, *layer)], partial(_share, run, layer), peer=name != "warploom"
        )
        for name, run in runs
    ]


def _share(run: Run, layer: Layer) -> float:
    """The largest error, as a share of what rounding on the way may cost."""
    hidden, ids, weights, gate_up, down = layer
    right = torch.zeros_like(hidden, dtype=torch.float32)
    for expert in range(len(gate_up)):
        token, choice = torch.where(ids == expert)
        gate, up = (hidden[token].float() @ gate_up[expert].float().mT).chunk(2, -1)
        rows = (F.silu(gate) * up) @ down[expert].float().mT
        right.index_add_(0, token, rows * weights[token, choice, None])
    return float((run(*layer).float() - right).abs().max() / (ROUNDED * right.abs().max()))


def grouped_mm(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The steps of transformers' grouped_mm: a sort, torch's grouped GEMMs, and a sum."""
    tokens, k = ids.shape
    expert, order = torch.sort(ids.reshape(-1))
    counts = torch.histc(expert.float(), len(gate_up), 0, len(gate_up) - 1)
    ends = counts.cumsum(0, dtype=torch.int32)
    gate, up = F.grouped_mm(hidden[order // k], gate_up.mT, offs=ends).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=ends)
    rows = rows * weights.reshape(-1)[order, None]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return rows[inverse].view(tokens, k, -1).sum(1).to(hidden.dtype)


def batched_mm(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The steps of transformers' batched_mm, by which it generates: a copy of weights per pair."""
    tokens, k = ids.shape
    expert, rows = ids.reshape(-1), hidden.repeat_interleave(k, 0)[..., None]
    gate, up = torch.bmm(gate_up[expert], rows)[..., 0].chunk(2, -1)
    found = torch.bmm(down[expert], (F.silu(gate) * up)[..., None])[..., 0]
    found = found * weights.reshape(-1, 1)
    return found.view(tokens, k, -1).sum(1).to(hidden.dtype)


class Experts(Family):
    """Layers of experts."""

    def subject(self, problem: Problem) -> str:
        """The model."""
        return str(problem["model"])


FAMILY = Experts(
    name="combine",
    groups={"layers": Group("Layers of experts, bf16, forward", layers, listed=True)},
    grid=(),
    kinds={"bf16": "Layers of experts, bf16, forward"},
    peers={"grouped_mm": "torch", "batched_mm": "torch"},
    called={
        "grouped_mm": "transformers' grouped_mm (torch)",
        "batched_mm": "transformers' batched_mm (torch)",
    },
    axis=("tokens", "tokens"),
    divided="model",
)
