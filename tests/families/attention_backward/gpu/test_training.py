"""A two-layer transformer learns on Warploom's attention as it does on torch's.

How far two runs may be apart is measured: torch itself is trained once on each of its backends, all
from the same weights on the same data, and what the furthest two differ by is the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import combinations

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import warploom

pytestmark = pytest.mark.gpu
STEPS, BATCH, HALF, WORDS = 200, 16, 64, 64
LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 64
WIDTH = HEADS * DIM
BACKENDS = (
    SDPBackend.MATH,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.CUDNN_ATTENTION,
)
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """Attention of four query heads over two, then two linear layers; normalised before each."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.projection = nn.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * DIM)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.projection(self.before(x)).unflatten(-1, (-1, DIM)).transpose(1, 2)
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), 1)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        result: torch.Tensor = x + self.mlp(self.between(x))
        return result


def model(attend: Attend) -> nn.Module:
    """A transformer whose weights are the same each time."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(WORDS, WIDTH),
        Position(),
        *(Layer(attend) for _ in range(LAYERS)),
        nn.LayerNorm(WIDTH),
        nn.Linear(WIDTH, WORDS),
    ).cuda()


class Position(nn.Module):
    """Adds what is learnt of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * HALF, WIDTH) * 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table[: x.shape[1]]


def curve(attend: Attend) -> torch.Tensor:
    """The loss of every step: to continue sequences that say the same thing twice."""
    trained = model(attend)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3)
    words = torch.Generator("cuda").manual_seed(1)
    losses = []
    for _ in range(STEPS):
        once = torch.randint(WORDS, (BATCH, HALF), generator=words, device="cuda")
        text = torch.cat([once, once], 1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = trained(text[:, :-1])[:, HALF - 1 :]
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), once.flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def on(backend: SDPBackend) -> Attend:
    """Attention of torch's on one of its backends."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, 1) for t in (k, v))
        with sdpa_kernel([backend]):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The mean difference of two curves."""
    return float((one - other).abs().mean())


def test_a_transformer_learns_as_it_does_on_the_attention_of_torch() -> None:
    theirs = []
    for backend in BACKENDS:
        with suppress(RuntimeError):  # where torch was built without it
            theirs.append(curve(on(backend)))
    assert len(theirs) >= 3
    noise = max(apart(*pair) for pair in combinations(theirs, 2))
    assert all(float(one[-20:].mean()) < 0.5 * float(one[0]) for one in theirs)  # it learns

    def distance(ours: torch.Tensor) -> float:
        assert ours.isfinite().all()
        return min(apart(ours, one) for one in theirs)

    ours = curve(lambda q, k, v: warploom.attention(q, k, v, causal=True))
    assert distance(ours) <= noise
    ours = curve(lambda q, k, v: warploom.attention(q, k, v, causal=True, deterministic=True))
    assert distance(ours) <= noise
    # What such a curve would show: gradients that do not reach the keys.
    lost = curve(lambda q, k, v: warploom.attention(q, k.detach(), v, causal=True))
    assert distance(lost) > noise
