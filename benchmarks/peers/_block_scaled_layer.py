"""A gated feed-forward layer of block-scaled e4m3: e4m3 in, e4m3 between its GEMMs, bf16 out.

Warploom's gate is the epilogue of the first GEMM, and `warploom.cast` quantizes its result. Beside
it stands DeepGEMM, with one kernel by torch.compile that computes the gate and quantizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._checked import kernels_of
from benchmarks.peers.libraries.deep_gemm import laid_out, multiply
from benchmarks.peers.libraries.triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.gemm.block_scales import dequantised
from warploom.runtime.trial import wrong

E4M3 = torch.float8_e4m3fn
BLOCK = 128  # values that share a scale, of rows; weights share one by squares
LARGEST = 448.0  # of e4m3

# Of results, beside the largest: what the gate makes is rounded to bf16 and to e4m3 on the way.
ROUNDED = 2.0**-4

Quantized = tuple[torch.Tensor, torch.Tensor]  # values, scales
Run = Callable[["Layer"], torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """An input and two weights, [gate; up] and down, with their scales; where the result goes."""

    x: Quantized
    both: Quantized
    down: Quantized
    out: torch.Tensor

    @classmethod
    def drawn(cls, tokens: int, hidden: int, inner: int, device: str) -> Layer:
        """Normal values, quantized."""

        def random(rows: int, columns: int, block: tuple[int, int]) -> Quantized:
            values = torch.randn(rows, columns, device=device) / hidden**0.25
            q, scale = warploom.cast(values.bfloat16(), E4M3, block=block)
            return q, scale

        square = BLOCK, BLOCK
        both, down = random(2 * inner, hidden, square), random(hidden, inner, square)
        out = torch.empty(tokens, hidden, dtype=torch.bfloat16, device=device)
        return cls(random(tokens, hidden, (1, BLOCK)), both, down, out)

    @cached_property
    def exact(self) -> torch.Tensor:
        """The result in fp32, without rounding between the GEMMs."""
        x, both, down = (dequantised(*one, torch.float32) for one in (self.x, self.both, self.down))
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    def share(self) -> float:
        """The largest error of the result, as a share of what rounding may cost."""
        return float((self.out - self.exact).abs().max() / (ROUNDED * self.exact.abs().max()))


def block_scaled_layers(asked: Asked) -> Iterator[Case]:
    """The listed layers at each number of tokens."""
    listed = cells()["gemm"]["gated"]["block_scaled_layers"]
    for hidden, inner in listed["sizes"]:
        for tokens in asked.m or listed["tokens"]:
            weights = 3 * hidden * inner
            moved = weights + tokens * (hidden + 2 * inner + 2 * hidden)
            yield Case(
                f"gated layer e4m3_block {tokens}x{hidden}x{inner}",
                {"m": tokens, "hidden": hidden, "inner": inner, "type": "e4m3_block"},
                Floor.of(2 * tokens * weights, moved, 8),
                partial(_contenders, (tokens, hidden, inner)),
            )


def _contenders(sizes: tuple[int, int, int], asked: Asked) -> list[Contender]:
    tokens, hidden, inner = sizes
    layers = rotated(
        lambda: Layer.drawn(tokens, hidden, inner, asked.device),
        3 * hidden * inner,
        asked.device,
    )
    told = partial(kernels_of, partial(_ours, layers[0]))  # which leaves what was timed as it is
    return [
        replace(_contender("warploom", layers, _ours), told=told),
        _contender("deep_gemm, then torch.compile", layers, _DeepGemm(), peer=True),
    ]


def _contender(name: str, layers: Sequence[Layer], run: Run, *, peer: bool = False) -> Contender:
    made = [Layer(one.x, one.both, one.down, wrong(one.out)) for one in layers]
    return Contender(name, [partial(run, one) for one in made], made[0].share, peer=peer)


def _ours(layer: Layer) -> torch.Tensor:
    (x, scale_x), (both, scale_both), (down, scale_down) = layer.x, layer.both, layer.down
    h = warploom.gemm(
        x,
        both.t(),
        scale_a=scale_x,
        scale_b=scale_both,
        gate="silu",
        out_dtype=torch.bfloat16,
    )
    q, scale = warploom.cast(h, E4M3, block=(1, BLOCK))
    return warploom.gemm(q, down.t(), scale_a=scale, scale_b=scale_down, out=layer.out)


class _DeepGemm:
    """DeepGEMM's two GEMMs, and the gate with the cast as one kernel of torch's compiler."""

    def __init__(self) -> None:
        self._quantize = compiled(lambda: _gate_and_quantize)
        self._ready: dict[int, tuple[Quantized, Quantized, Quantized, torch.Tensor]] = {}

    def __call__(self, layer: Layer) -> torch.Tensor:
        """Run the layer; scales of x and of weights are laid out when it is first called."""
        if id(layer) not in self._ready:
            x, scale = layer.x
            weights = [(one, each.contiguous()) for one, each in (layer.both, layer.down)]
            z = x.new_empty((len(x), len(layer.both[0])), dtype=torch.bfloat16)
            self._ready[id(layer)] = (x, laid_out(scale)), weights[0], weights[1], z
        of_x, both, down, z = self._ready[id(layer)]
        multiply(of_x, both, z)
        q, scale = self._quantize(z)
        multiply((q, scale.t()), down, layer.out)
        return layer.out


def _gate_and_quantize(z: torch.Tensor) -> Quantized:
    """silu(gate) * up in e4m3, and its scales, transposed: rows of them lie side by side."""
    gate, up = z.float().chunk(2, -1)
    h = (F.silu(gate) * up).view(*gate.shape[:-1], -1, BLOCK)
    scale = h.abs().amax(-1).clamp(min=1e-4) / LARGEST
    q = (h / scale.unsqueeze(-1)).to(E4M3).flatten(-2)
    return q, scale.t().contiguous()
