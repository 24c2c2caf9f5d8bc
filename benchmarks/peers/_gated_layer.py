"""A whole gated feed-forward layer in bf16, forward and backward, beside torch.compile.

Each contender returns the result and the gradients of its input and weights. Beside
`warploom.nn.GatedMLP`, as it is and compiled, stand its three layers one by one and torch's,
compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers.libraries.triton import compiled
from warploom.generator.configurations import cells
from warploom.runtime.contest import Contender, Floor

Run = Callable[[torch.Tensor], torch.Tensor]
Results = tuple[torch.Tensor, ...]

# Of results and gradients, whose inner values are rounded to bf16 on the way, beside the largest.
ROUNDED = 2.0**-5
PASSES = 9  # GEMMs of tokens x hidden x inner: three forward, six backward


def gated_layers(asked: Asked) -> Iterator[Case]:
    """The listed layers at each number of tokens."""
    listed = cells()["gemm"]["gated"]["layers"]
    for hidden, inner in listed["sizes"]:
        for tokens in asked.m or listed["tokens"]:
            sizes = tokens, hidden, inner
            work = 2 * PASSES * tokens * hidden * inner
            yield Case(
                f"gated layer bf16, both passes {'x'.join(map(str, sizes))}",
                {"m": tokens, "hidden": hidden, "inner": inner, "type": "bf16"},
                Floor.of(work, _moved(*sizes), 16),
                partial(_contenders, sizes),
            )


def _moved(tokens: int, hidden: int, inner: int) -> int:
    """Bytes of weights, read each way, and their gradients; of x, y and theirs; of z, h and dz."""
    weights, outer = 3 * hidden * inner, tokens * hidden
    between = tokens * inner
    return 2 * (3 * weights + 6 * outer + (2 + 1 + 1) * between + (2 + 2 + 1 + 1 + 4) * between)


@dataclass(frozen=True)
class _Layer:
    """Weights, an input and the gradient of its result; what a step of them is."""

    mlp: warploom.nn.GatedMLP
    x: torch.Tensor
    dy: torch.Tensor

    @property
    def weights(self) -> list[torch.Tensor]:
        return [self.mlp.gate_proj.weight, self.mlp.up_proj.weight, self.mlp.down_proj.weight]

    def step(self, run: Run) -> Results:
        """The result and the gradients, by what computes the layer."""
        with torch.enable_grad():
            y = run(self.x)
            return (y.detach(), *torch.autograd.grad(y, [self.x, *self.weights], self.dy))

    def share(self, run: Run) -> float:
        """The largest error, as a share of what rounding on the way may cost."""
        found = self.step(run)
        shares = [
            float((one.double() - right).abs().max() / (ROUNDED * right.abs().max()))
            for one, right in zip(found, self.exact, strict=True)
        ]
        return max(shares)

    @cached_property
    def exact(self) -> Results:
        """The same in float64."""
        x, *weights = (one.detach().double().requires_grad_() for one in (self.x, *self.weights))
        with torch.enable_grad():
            y = _torchs(x, *weights)
            return (y.detach(), *torch.autograd.grad(y, [x, *weights], self.dy.double()))


def _torchs(
    x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def _contenders(sizes: Sequence[int], asked: Asked) -> list[Contender]:
    tokens, hidden, inner = sizes
    mlp = warploom.nn.GatedMLP(hidden, inner, device=asked.device, dtype=torch.bfloat16)
    x, dy = (torch.randn(tokens, hidden, device=asked.device).bfloat16() for _ in range(2))
    layer = _Layer(mlp, x.requires_grad_(), dy)
    layers = mlp.gate_proj, mlp.up_proj, mlp.down_proj

    def chosen(ours: bool, x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return mlp(x) if ours else _torchs(x, *weights)

    fast = compiled(lambda: chosen)  # one function of both, as a second would undo the first

    def one_by_one(x: torch.Tensor) -> torch.Tensor:
        gate, up, down = layers
        result: torch.Tensor = down(F.silu(gate(x)) * up(x))
        return result

    runs: list[tuple[str, Run, bool]] = [
        ("warploom", mlp, False),
        ("warploom, compiled", lambda x: fast(True, x, *layer.weights), False),
        ("warploom, layer by layer", one_by_one, False),
        ("torch.compile", lambda x: fast(False, x, *layer.weights), True),
    ]
    return [
        Contender(name, [partial(layer.step, run)], partial(layer.share, run), peer=peer)
        for name, run, peer in runs
    ]
