"""A layer with frozen experts in fp64, by autograd, and how far off each number may be.

The bounds go through the layer step by step. `unit` is half a step of 16 bits, which a rounding is
off by at most: of z where torch computes the gate, and of what is between the GEMMs, the weights
that gradients are multiplied by, and each gradient of rows. `lost` is what sums in fp32 lose, as a
share of the sum of magnitudes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

import warploom
from warploom.integrations.frozen_experts import Gate
from warploom.quantization import PackedExperts
from warploom.runtime.families._product.steps.gate import activated, factor, split
from warploom.runtime.families._product.steps.gate_gradient import joined
from warploom.runtime.families.gemm.block_scales import dequantised

UNITS = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}
LEAST = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}
SUMS = 2.0**-16  # of up to 1,000 products of 16 bits
_STEEPEST = 1.2  # the largest derivative of a gate's function
_CURVED = 0.8  # and the largest second derivative, but of relu


class Bounded(NamedTuple):
    """Numbers in fp64, and how far from each a computed one may be."""

    exact: torch.Tensor
    error: torch.Tensor

    @property
    def size(self) -> torch.Tensor:
        """The largest magnitudes that there may be."""
        return self.exact.abs() + self.error

    def rounded(self, dtype: torch.dtype) -> Bounded:
        """The same, in a type."""
        return Bounded(self.exact, self.error + UNITS[dtype] * self.size + LEAST[dtype])

    def times(self, w: torch.Tensor, lost: float) -> Bounded:
        """A GEMM with a matrix [k, n], which loses this share of the magnitudes."""
        return Bounded(self.exact @ w, self.error @ w.abs() + lost * (self.size @ w.abs()))


@dataclass(frozen=True)
class Layer:
    """Weights in fp64 as they are stored: [E, 2 I, H] and [E, H, I], biases, and the gate.

    fused     whether the kernel of the first GEMM has the gate
    eight     whether rows are quantized to e4m3 by blocks of 1x128
    sums      what GEMMs of both passes lose
    of_z      what GEMMs of the forward pass lose
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    gate: Gate = field(default_factory=lambda: Gate("silu"))
    fused: bool = True
    eight: bool = False
    sums: float = SUMS
    of_z: float = SUMS

    def gated(self, z: torch.Tensor) -> torch.Tensor:
        """The gate's result."""
        function, layout, alpha, limit = self.gate
        one, up = split(z, layout)
        return activated(function, one, alpha, limit) * factor(function, up, limit)

    def quantized(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows as GEMMs read them, in fp64; gradients pass as if they were as they are."""
        if not self.eight:
            return rows.double()
        values, scale = warploom.cast(rows.detach(), torch.float8_e4m3fn, block=(1, 128))
        return rows.double() + (dequantised(values, scale, torch.float64) - rows).detach()

    # ---- By autograd -----------------------------------------------------------------------------

    def by_autograd(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dout: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """The result and all gradients, expert by expert."""
        leaves = {"hidden": hidden, "weights": weights}
        for name in ("gate_up_bias", "down_bias"):
            if getattr(self, name) is not None:
                leaves[name] = getattr(self, name)
        leaf = {key: one.detach().double().requires_grad_() for key, one in leaves.items()}
        rows = self.quantized(hidden) + (leaf["hidden"] - leaf["hidden"].detach())
        out = torch.zeros_like(leaf["hidden"])
        for expert in range(len(self.down)):
            token, choice = torch.where(ids == expert)
            z = rows[token] @ self.gate_up[expert].T
            z = z + leaf["gate_up_bias"][expert] if "gate_up_bias" in leaf else z
            y = self.gated(z) @ self.down[expert].T
            y = y + leaf["down_bias"][expert] if "down_bias" in leaf else y
            out = out.index_add(0, token, y * leaf["weights"][token, choice, None])
        results = torch.autograd.grad(out, [*leaf.values()], dout.double())
        return {"out": out.detach(), **dict(zip(leaf, results, strict=True))}

    # ---- Step by step ----------------------------------------------------------------------------

    def bounded(
        self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, dout: torch.Tensor
    ) -> dict[str, Bounded]:
        """The result and all gradients, and how far off each may be."""
        dtype, unit = hidden.dtype, UNITS[hidden.dtype]
        hidden, weights, dout = (one.detach() for one in (hidden, weights, dout))
        zeros = torch.zeros_like
        tokens, w, dout = self.quantized(hidden), weights.double(), dout.double()
        exact = {"out": zeros(tokens), "hidden": zeros(tokens), "weights": zeros(w)}
        exact |= {"gate_up_bias": self.gate_up.new_zeros(self.gate_up.shape[:2])}
        exact |= {"down_bias": self.down.new_zeros(self.down.shape[:2])}
        error = {name: zeros(one) for name, one in exact.items()}

        def add(name: str, at: Any, one: Bounded) -> None:  # noqa: ANN401
            exact[name].index_add_(0, at, one.exact)
            error[name].index_add_(0, at, one.error + self.sums * one.size)

        for expert, (first, second) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, choice = torch.where(ids == expert)
            x = Bounded(tokens[token], zeros(tokens[token]))
            z = self._biased(x.times(first.T, self.of_z), self.gate_up_bias, expert)
            z = z if self.fused else z.rounded(dtype)
            h = self._gated(z, unit).rounded(dtype)
            if self.eight:  # of 3 bits of mantissa; where the largest of a block is 448
                lost = 2.0**-4 * h.size + 2.0**-10 * h.size.amax(-1, keepdim=True)
                h = Bounded(h.exact, h.error + lost)
            y = self._biased(h.times(second.T, self.of_z), self.down_bias, expert).rounded(dtype)
            share, d = w[token, choice, None], dout[token]
            add("out", token, Bounded(y.exact * share, y.error * share.abs()))
            of_share = Bounded((d * y.exact).sum(-1), (d.abs() * y.error).sum(-1))
            exact["weights"][token, choice] = of_share.exact
            magnitude = (d.abs() * y.size).sum(-1)
            error["weights"][token, choice] = of_share.error + self.sums * magnitude

            dy = Bounded(d * share, zeros(d)).rounded(dtype)
            dh = dy.times(second, unit + self.sums).rounded(dtype)
            dz = self._gradient(dh, z, unit).rounded(dtype)
            add("hidden", token, dz.times(first, unit + self.sums).rounded(dtype))
            at = torch.full_like(token, expert)
            add("gate_up_bias", at, dz)
            add("down_bias", at, dy)
        results = {name: Bounded(exact[name], error[name]) for name in exact}
        kinds = {"out": dtype, "hidden": dtype}
        return {name: one.rounded(kinds.get(name, torch.float32)) for name, one in results.items()}

    def _biased(self, z: Bounded, bias: torch.Tensor | None, expert: int) -> Bounded:
        if bias is None:
            return z
        own = bias[expert].detach().double()
        return Bounded(z.exact + own, z.error + 2.0**-22 * (z.size + own.abs()))

    def _activated(self, one: Bounded, unit: float) -> Bounded:
        function, _, alpha, limit = self.gate
        value = activated(function, one.exact, alpha, limit)
        roundings = 2.0**-18 if self.fused else 4 * unit
        error = _STEEPEST * max(1.0, abs(alpha)) * one.error
        return Bounded(value, error + roundings * (value.abs() + one.size))

    def _factor(self, up: Bounded, unit: float) -> Bounded:
        value = factor(self.gate.function, up.exact, self.gate.limit)
        roundings = 0.0 if self.gate.function != "swiglu_oai" else 2.0**-22
        if not self.fused and roundings:
            roundings = unit
        return Bounded(value, up.error + roundings * (value.abs() + up.error))

    def _parts(self, z: Bounded, unit: float) -> tuple[Bounded, Bounded, Bounded, Bounded]:
        layout = self.gate.layout
        (one, up), (of_one, of_up) = split(z.exact, layout), split(z.error, layout)
        gate, other = Bounded(one, of_one), Bounded(up, of_up)
        return gate, other, self._activated(gate, unit), self._factor(other, unit)

    def _gated(self, z: Bounded, unit: float) -> Bounded:
        _, _, value, other = self._parts(z, unit)
        return product(value, other)

    def _gradient(self, dh: Bounded, z: Bounded, unit: float) -> Bounded:
        """Of gate and up, from that of the gate's result."""
        function, layout, alpha, limit = self.gate
        gate, up, value, other = self._parts(z, unit)
        with torch.enable_grad():
            leaf = gate.exact.detach().requires_grad_()
            (slope,) = torch.autograd.grad(activated(function, leaf, alpha, limit).sum(), leaf)
        steep = max(1.0, abs(alpha)) if function == "swiglu_oai" else 1.0
        # Torch rounds a sigmoid, one minus that, and the products of these with the gate.
        roundings = 2.0**-18 if self.fused else 8 * unit
        far = _CURVED * steep * gate.error + roundings * (1 + abs(alpha) * gate.size)
        beyond = zeros = torch.zeros_like(slope)
        kept = torch.ones_like(slope)
        if function == "swiglu_oai":  # beyond the limit nothing changes: near it either may be so
            far = torch.where((gate.exact - limit).abs() <= gate.error, _STEEPEST * steep, far)
            kept = (up.exact.abs() <= limit).double()
            beyond = ((up.exact.abs() - limit).abs() <= up.error).double()
        elif function == "relu":
            far = torch.where(gate.exact.abs() <= gate.error, 1.0, zeros)
        of_one = product(product(dh, other), Bounded(slope, far))
        of_up = product(dh, value)
        of_up = Bounded(of_up.exact * kept, of_up.error + beyond * of_up.size)
        if not self.fused:  # each step of torch's is rounded
            of_one, of_up = (
                Bounded(exact, error + 2 * unit * (exact.abs() + error))
                for exact, error in (of_one, of_up)
            )
        return Bounded(
            joined(of_one.exact, of_up.exact, layout), joined(of_one.error, of_up.error, layout)
        )


def product(a: Bounded, b: Bounded) -> Bounded:
    """One times the other, in fp32."""
    exact = a.exact * b.exact
    error = a.error * b.exact.abs() + a.size * b.error + 2.0**-22 * a.size * b.size
    return Bounded(exact, error)


def share(results: torch.Tensor, bounded: Bounded) -> float:
    """The largest error, as a share of what it may be; infinity of numbers that are not finite."""
    args = results.detach().double().cpu()
    if not args.numel():
        return 0.0
    if not bool(args.isfinite().all()):
        return math.inf
    error = bounded.error.cpu() + 1e-30
    return float(((args - bounded.exact.cpu()).abs() / error).max())


def graded(args: Mapping[str, Any]) -> list[str]:
    """The names of what requires a gradient."""
    return [name for name, one in args.items() if getattr(one, "requires_grad", False)]


def shares(
    layer: Layer, args: Mapping[str, Any], results: Sequence[torch.Tensor], dout: torch.Tensor
) -> dict[str, float]:
    """The largest errors of a result and of its gradients, which are `results`, as shares."""
    read = [args[name].detach().cpu() for name in ("hidden", "ids", "weights")]
    bounds = layer.bounded(*read, dout.cpu())
    for name, one in layer.by_autograd(*read, dout.cpu()).items():  # the steps are the layer's
        torch.testing.assert_close(bounds[name].exact, one, rtol=1e-10, atol=1e-12)
    names = ["out", *graded(args)]
    return {name: share(one, bounds[name]) for name, one in zip(names, results, strict=True)}


# ---- Samples -------------------------------------------------------------------------------------


def values(random: torch.Generator, *shape: int, size: float = 1.0) -> torch.Tensor:
    """Random numbers; columns are of magnitudes of their own."""
    made = torch.randn(shape, generator=random) * size
    return made * 2.0 ** torch.randint(-2, 3, shape[-1:], generator=random)


def sample(
    experts: int,
    hidden: int,
    inner: int,
    *,
    tokens: int = 37,
    k: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    biases: bool = False,
    device: str = "cpu",
    **quantized: Any,
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The arguments of a call whose last expert has no token, and the weights in fp64.

    `quantized` is what `PackedExperts.quantize` takes; without it weights are e4m3 with scales.
    """
    random = torch.Generator().manual_seed(hidden + inner)
    ids = torch.rand(tokens, experts + 1, generator=random).topk(k).indices
    args: dict[str, Any] = {
        "hidden": values(random, tokens, hidden).to(dtype),
        "ids": ids.where(ids < experts - 1, -1),
        "weights": torch.rand(tokens, k, generator=random),
    }
    exact = {}
    for name, n, of in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        w = values(random, experts, n, of, size=of**-0.5)
        if quantized:
            args[name] = PackedExperts.quantize(w.to(dtype), **quantized)
            exact[name] = args[name].dequantize(torch.float64)
            args[name] = args[name].to(device)
            continue
        blocks = (experts, -(-n // 128), -(-of // 128))
        scale = 2.0 ** -torch.randint(2, 6, blocks, generator=random) * 1.3
        spread = scale.repeat_interleave(128, 1)[:, :n].repeat_interleave(128, 2)[..., :of]
        args[name] = (w / spread).to(torch.float8_e4m3fn)
        args[f"{name}_scale"] = scale
        exact[name] = args[name].double() * spread.double()
    if biases:
        args["gate_up_bias"] = torch.randn(experts, 2 * inner, generator=random) / 4
        args["down_bias"] = torch.randn(experts, hidden, generator=random) / 4
        exact |= {name: one for name, one in args.items() if name.endswith("bias")}
    moved = {
        name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in args.items()
    }
    for name, one in moved.items():
        if name in ("hidden", "weights", "gate_up_bias", "down_bias"):
            one.requires_grad_()
    return moved, exact
