"""The gradient of a gate in the epilogue of the GEMM before it, compared with a kernel behind it.

Cases are dh = dy down of gated feed-forward layers, which train: the gradient of z = [gate; up] and
the gate's result, computed again, are what the GEMMs that follow read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers._checked import kernels_of
from benchmarks.peers._products import TYPES, Shape, floor
from benchmarks.peers.libraries.triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.epilogue import GateGradient
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender
from warploom.runtime.families._product.steps.gate_gradient import of_both
from warploom.runtime.trial import wrong

OPERATION = replace(TYPES["bf16"], layout_b="row", epilogue=(GateGradient("silu", "bf16"),))
ROUNDED = 2.0**-6  # of results that are rounded to bf16 on the way, compared with the largest

Results = tuple[torch.Tensor, torch.Tensor]  # dz, h
Gradient = Callable[[torch.Tensor, torch.Tensor], Results]


@dataclass(frozen=True, slots=True)
class Operands:
    """dy [m, k], down [k, n] and z [m, 2 n]; where dz and h, or dh, go."""

    dy: torch.Tensor
    down: torch.Tensor
    z: torch.Tensor
    dz: torch.Tensor
    h: torch.Tensor

    def emptied(self) -> Operands:
        """The same operands, with results of their own, full of what no right one is full of."""
        return replace(self, dz=wrong(self.dz), h=wrong(self.h))

    def share(self, found: Callable[[], Results]) -> float:
        """The largest error of results, as a share of what rounding on the way may cost."""
        dh, z = self.dy.double() @ self.down.double(), self.z.double()
        gate, up = z.chunk(2, -1)
        exact = of_both(dh, z, "silu", "halves"), F.silu(gate) * up
        return max(
            float((one.double() - right).abs().max() / (ROUNDED * right.abs().max()))
            for one, right in zip(found(), exact, strict=True)
        )


def gate_gradients(asked: Asked) -> Iterator[Case]:
    """The listed layers, [hidden, inner], at each number of tokens."""
    listed = cells()["gemm"]["gated"]["gradients"]
    for k, n in listed["sizes"]:
        for m in asked.m or listed["tokens"]:
            problem = {"m": m, "n": n, "k": k, "type": "bf16", "epilogue": "silu_gate_gradient"}
            name, shape = f"gradient of a gate {m}x{n}x{k}", (m, n, k)
            bound = floor(TYPES["bf16"], shape, further=2 * 2 * m * 2 * n)
            yield Case(name, problem, bound, partial(_contenders, shape))


def _contenders(shape: Shape, asked: Asked) -> list[Contender]:
    m, n, k = shape

    def drawn() -> Operands:
        dy, down, z = (
            torch.randn(*sizes, device=asked.device).bfloat16()
            for sizes in ((m, k), (k, n), (m, 2 * n))
        )
        return Operands(dy, down, z, torch.empty_like(z), dy.new_empty(m, n))

    given = rotated(drawn, 2 * (m * k + k * n + 5 * m * n), asked.device)
    fast: Gradient = compiled(lambda: _gradient)
    gemms = {"warploom": _ours_alone, "torch": _torchs}
    behind = [
        _contender(f"{name}, then torch.compile", given, partial(_behind, gemm, fast), peer=True)
        for name, gemm in gemms.items()
    ]
    bare = Contender("without the gate", [partial(_ours_alone, one) for one in given])
    fitting = [spec for spec in asked.specs if spec.operation == OPERATION]
    return [
        _contender("warploom", given, _ours, told=True),
        bare,
        *behind,
        *(_contender(one.name, given, partial(_ours, spec=one), told=True) for one in fitting),
    ]


def _contender(
    name: str,
    given: list[Operands],
    run: Callable[[Operands], Results],
    *,
    peer: bool = False,
    told: bool = False,
) -> Contender:
    own = [one.emptied() for one in given]
    calls = [partial(run, one) for one in own]
    share = partial(own[0].share, calls[0])
    return Contender(name, calls, share, partial(kernels_of, calls[0]) if told else None, peer)


def _ours(one: Operands, spec: KernelSpec | None = None) -> Results:
    step = ("silu_gate_gradient", one.z, one.dz)
    warploom.gemm(one.dy, one.down, out=one.h, epilogue=[step], spec=spec)
    return one.dz, one.h


def _ours_alone(one: Operands) -> None:
    warploom.gemm(one.dy, one.down, out=one.h)


def _torchs(one: Operands) -> None:
    torch.mm(one.dy, one.down, out=one.h)


def _behind(gemm: Callable[[Operands], None], gradient: Gradient, one: Operands) -> Results:
    gemm(one)
    return gradient(one.h, one.z)


def _gradient(dh: torch.Tensor, z: torch.Tensor) -> Results:
    """dz and h, computed in fp32."""
    gate, up = z.float().chunk(2, -1)
    return of_both(dh.float(), z.float(), "silu", "halves").to(z.dtype), (F.silu(gate) * up).to(
        z.dtype
    )
