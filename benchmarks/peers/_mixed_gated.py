"""silu(gate) * up in the epilogue of a product with a quantized weight, and as a kernel behind it.

Cells are [gate; up] of gated feed-forward layers as one packed weight [2 I, K], whose rows take
turns. Beside Warploom's gated kernel stands its plain one with silu(gate) * up by torch.compile or
by Liger behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._mixed_problem import KINDS, Shape, packed
from benchmarks.peers.libraries.liger import silu_mul
from benchmarks.peers.libraries.triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.quantization import PackedWeight
from warploom.runtime.contest import Contender, Floor

GATE = [("gate_interleaved", "silu")]
ROUNDED = 2.0**-5  # of results, beside the largest: bf16 between product and gate


@dataclass(frozen=True, slots=True)
class Operands:
    """a [m, k]; a weight [n, k] whose rows of gate and up take turns, and in halves; D [m, n/2]."""

    a: torch.Tensor
    turns: PackedWeight
    halves: PackedWeight
    out: torch.Tensor

    def exact(self) -> torch.Tensor:
        """D in float64."""
        z = self.a.double() @ self.halves.dequantize(torch.float32).double().t()
        gate, up = z.chunk(2, -1)
        return F.silu(gate) * up


def mixed_gated(asked: Asked) -> Iterator[Case]:
    """The listed weights at each M."""
    listed = cells()["mixed_gemm"]["gated"]
    for kind in listed["types"]:
        for n, k in listed["weights"]:
            for m in asked.m or listed["m"]:
                shape = (m, n, k)
                problem = {"m": m, "n": n, "k": k, "type": kind, "epilogue": "silu(gate) * up"}
                name = f"gated {kind} {m}x{n}x{k}"
                floor = Floor.of(2 * m * n * k, float(KINDS[kind].bytes(shape) - m * n), 16)
                yield Case(name, problem, floor, partial(_contenders, kind, shape))


def _contenders(kind: str, shape: Shape, asked: Asked) -> list[Contender]:
    size = KINDS[kind].bytes(shape)
    draws = torch.Generator(asked.device).manual_seed(0)
    given = rotated(partial(_operands, kind, shape, asked.device, draws), size, asked.device)
    exact: list[torch.Tensor] = []
    fast = compiled(lambda: _silu_times)

    def contender(
        name: str, call: Callable[[Operands], torch.Tensor], *, peer: bool = True
    ) -> Contender:
        def share() -> float:
            found = call(given[0])
            if not exact:
                exact.append(given[0].exact())
            off = (found.double() - exact[0]).abs().max()
            return float(off / (ROUNDED * exact[0].abs().max()))

        return Contender(name, [partial(call, one) for one in given], share, peer=peer)

    return [
        contender("warploom", _gated, peer=False),
        contender("warploom, then torch.compile", partial(_after, fast)),
        contender("warploom, then liger", partial(_after, silu_mul)),
    ]


def _operands(kind: str, shape: Shape, device: str, draws: torch.Generator) -> Operands:
    m, n, k = shape
    both = torch.randn(n, k, generator=draws, device=device).mul_(k**-0.5).bfloat16()
    gate, up = both.chunk(2)
    turns = packed(torch.stack((gate, up), 1).flatten(0, 1), KINDS[kind])
    a = torch.randn(m, k, generator=draws, device=device).bfloat16()
    return Operands(a, turns, packed(both, KINDS[kind]), a.new_empty(m, n // 2))


def _gated(one: Operands) -> torch.Tensor:
    return warploom.mixed_gemm(one.a, one.turns, out=one.out, epilogue=GATE)


def _after(gate: Callable[[torch.Tensor], torch.Tensor], one: Operands) -> torch.Tensor:
    return gate(warploom.mixed_gemm(one.a, one.halves))


def _silu_times(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
