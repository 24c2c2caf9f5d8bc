"""GEMMs of experts with frozen, quantized weights, through which tokens and biases get gradients.

forward    the kernels that run without gradients, with the gate in the first of them, too
backward   the first GEMM again, in fp32, where its kernel had the gate: nothing of [rows, 2 I] is
           kept from pass to pass. Then the gradient of the gate, by torch; that of the bias, which
           is sums of rows; and that of the rows, dy W, by a grouped GEMM of 16 bits

W is dequantized to 16 bits in each backward pass, for some experts at a time, so that the memory
that this takes has a bound. Which experts have rows only the device knows, and nothing waits for
it: all of them are dequantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from warploom.generator.epilogue import GateFunction, GateLayout
from warploom.generator.families.gemm import SCALE_BLOCK
from warploom.integrations.float8_experts import bias_gradient
from warploom.quantization import Metadata, PackedExperts
from warploom.runtime.families._activation.gradient import slope
from warploom.runtime.families._product.steps.gate import (
    ALPHA,
    LIMIT,
    activated,
    factor,
    split,
)
from warploom.runtime.families._product.steps.gate_gradient import joined
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.dequantize.api import dequantize
from warploom.runtime.families.gemm.grouped import grouped_gemm
from warploom.runtime.families.mixed_gemm.grouped import grouped_mixed_gemm

LARGEST = 1 << 29
"""Weights that are in 16 bits at a time, of several experts: 1 GiB. One expert may have more."""

RANGE = 1 << 25
"""Gradients of the gate that torch computes at a time, in 14 to 18 bytes for each: 0.6 GB."""


class Gate(NamedTuple):
    """A gate that kernels have: its function, how gate and up are laid out, and the numbers of
    swiglu_oai.
    """

    function: GateFunction
    layout: GateLayout = "halves"
    alpha: float = ALPHA
    limit: float = LIMIT

    def steps(self) -> dict[str, Any]:
        """The arguments by which `warploom.grouped_gemm` takes it."""
        names = ("gate", "gate_layout", "gate_alpha", "gate_limit")
        return dict(zip(names, self, strict=True))


class _Packed(NamedTuple):
    """Quantized weights [E, N, K], as PackedExperts have them."""

    metadata: Metadata
    slabs: torch.Tensor
    channel_scales: torch.Tensor | None
    channel_zeros: torch.Tensor | None

    @property
    def weight(self) -> PackedExperts:
        """The weights as functions take them."""
        return PackedExperts(self.slabs, self.metadata, self.channel_scales, self.channel_zeros)

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, N and K."""
        return self.slabs.shape[0], self.metadata.n, self.metadata.k

    def multiply(
        self,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None,
        gate: Gate | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the rows of each group times its matrix; columns of gate and up take turns."""
        steps = {} if gate is None else gate.steps()
        steps.pop("gate_layout", None)
        return grouped_mixed_gemm(
            rows, self.weight, offs=offsets, bias=bias, out_dtype=out_dtype, **steps
        )

    def dequantized(self, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of experts `first` to `end` in 16 bits, [experts, N, K]."""
        return dequantize(self.weight, dtype, first=first, end=end)


class _Scaled(NamedTuple):
    """Matrices [E, K, N] in e4m3, with a scale for each 128x128 of a weight [E, N, K]."""

    values: torch.Tensor
    scale: torch.Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Experts, N and K."""
        experts, k, n = self.values.shape
        return experts, n, k

    def multiply(
        self,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        bias: torch.Tensor | None,
        gate: Gate | None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return the rows of each group, quantized by blocks of 1x128, times its matrix."""
        quantized, scale_a = cast(rows, self.values.dtype, block=(1, SCALE_BLOCK))
        steps = {} if gate is None else gate.steps()
        return grouped_gemm(
            quantized,
            self.values,
            offs=offsets,
            scale_a=scale_a,
            scale_b=self.scale,
            bias=bias,
            out_dtype=out_dtype,
            **steps,
        )

    def dequantized(self, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the weights of experts `first` to `end` in 16 bits, [experts, N, K]."""
        return dequantize(self.values.mT, dtype, scale=self.scale, first=first, end=end)


def frozen_grouped_linear(
    rows: torch.Tensor,
    weight: torch.Tensor | PackedExperts,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None = None,
    gate: Gate | None = None,
) -> torch.Tensor:
    """Multiply the rows of each expert by its frozen matrix; differentiable once in rows and bias.

    Args:
        rows: [S, K], bf16 or fp16.
        weight: PackedExperts [E, N, K], or e4m3 [E, K, N]; nothing of them requires a gradient.
        offsets: int32 [E]: where the rows of each expert end. Rows behind the last are not read,
            those of the result are undefined, and their gradient is zeros.
        bias: [E, N], or None.
        scale: Of an e4m3 weight, fp32 or e8m0 [E, N / 128, K / 128], rounded up.
        gate: One that the kernel is to have. That of PackedExperts has columns that take turns.

    Returns:
        [S, N], or [S, N / 2] with a gate, of the type of rows.
    """
    parts: tuple[torch.Tensor | None, ...]
    if isinstance(weight, PackedExperts):
        metadata = weight.metadata
        parts = weight.slabs, weight.channel_scales, weight.channel_zeros
    else:
        metadata, parts = None, (weight, scale)
    graded = rows.requires_grad or (bias is not None and bias.requires_grad)
    if torch.is_grad_enabled() and graded:
        result: torch.Tensor = _Frozen.apply(rows, bias, offsets, metadata, gate, *parts)  # type: ignore[no-untyped-call]
        return result
    return _weights(metadata, parts).multiply(rows, offsets, bias, gate, rows.dtype)


def _weights(metadata: Metadata | None, parts: Any) -> _Packed | _Scaled:  # noqa: ANN401
    """The weights of which these are the tensors."""
    return _Scaled(*parts) if metadata is None else _Packed(metadata, *parts)


class _Frozen(torch.autograd.Function):
    """The rows of experts times their frozen matrices, and the gate behind that."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        rows: torch.Tensor,
        bias: torch.Tensor | None,
        offsets: torch.Tensor,
        metadata: Metadata | None,
        gate: Gate | None,
        *parts: torch.Tensor | None,
    ) -> torch.Tensor:
        again = (None, None) if gate is None else (rows, bias)
        ctx.save_for_backward(*again, offsets, *parts)
        ctx.of_weights, ctx.gate = metadata, gate
        ctx.of_bias = None if bias is None else bias.dtype
        return _weights(metadata, parts).multiply(rows, offsets, bias, gate, rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401
        dy: torch.Tensor,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of rows and bias that are wanted."""
        rows, bias, offsets, *parts = ctx.saved_tensors
        weights, dx, db = _weights(ctx.of_weights, parts), None, None
        with torch.autocast(dy.device.type, enabled=False):
            if ctx.gate is not None:
                dy = _before_gate(dy, rows, bias, offsets, weights, ctx.gate)
            if ctx.needs_input_grad[0]:
                dx = _input_gradient(dy, weights, offsets)
            if ctx.needs_input_grad[1]:
                db = bias_gradient(dy, offsets, ctx.of_bias)
        return dx, db, None, None, None, *[None] * len(parts)


def _before_gate(
    dh: torch.Tensor,
    rows: torch.Tensor,
    bias: torch.Tensor | None,
    offsets: torch.Tensor,
    weights: _Packed | _Scaled,
    gate: Gate,
) -> torch.Tensor:
    """Return the gradient of the first GEMM's result, which is computed again, for some rows at a
    time: in fp32 it is twice as large, and so is each step of the gate's gradient. Compilers fuse
    these steps, and take any number of rows.
    """
    if torch.compiler.is_compiling():
        z = weights.multiply(rows, offsets, bias, None, torch.float32)
        return gate_gradient(dh.float(), z, gate).to(dh.dtype)
    count, columns = len(dh), 2 * dh.shape[1]
    dz, at_a_time = dh.new_empty(count, columns), max(1, RANGE // columns)
    for begin in range(0, count, at_a_time):
        some = slice(begin, begin + at_a_time)
        ends = (offsets - begin).clamp(0, len(dh[some]))
        z = weights.multiply(rows[some], ends, bias, None, torch.float32)
        dz[some] = gate_gradient(dh[some].float(), z, gate)
        del z  # before the next ones are made
    return dz


def gate_gradient(dh: torch.Tensor, z: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Return the gradient of z [S, 2 I], whose gate's result has the gradient dh [S, I]."""
    function, layout, alpha, limit = gate
    one, up = split(z, layout)
    of_up = dh * activated(function, one, alpha, limit)
    if function == "swiglu_oai":  # silu's slope, of another scale; beyond the limit nothing changes
        of_one = torch.where(one <= limit, slope("silu", alpha * one), 0.0)
        of_up = torch.where(up.abs() <= limit, of_up, 0.0)
    else:
        of_one = slope(function, one)
    return joined(dh * factor(function, up, limit) * of_one, of_up, layout)


def _input_gradient(
    dy: torch.Tensor, weights: _Packed | _Scaled, offsets: torch.Tensor
) -> torch.Tensor:
    """Return dy W of the rows of each group, zeros in rows of none.

    The groups of a GEMM begin at row 0, and where the first of some experts begins only the device
    knows: their rows are copied there, and the results are scattered back.
    """
    experts, n, k = weights.sizes
    dx = dy.new_zeros(dy.shape[0], k)
    for first, end in _some_at_a_time(experts, n * k):
        w = weights.dequantized(first, end, dy.dtype)
        if first == 0:
            grouped_gemm(dy, w, offs=offsets[:end], out=dx)
        else:
            begin = offsets[first - 1]
            places = torch.arange(dy.shape[0], dtype=torch.int32, device=dy.device) + begin
            moved = dy.index_select(0, places.clamp(max=dy.shape[0] - 1))
            grouped_gemm(moved, w, offs=offsets[first:end] - begin, out=dx, scatter=places)
        del w  # before the next ones are made
    return dx


def _some_at_a_time(experts: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of experts of so many weights each, all about as long."""
    parts = -(-experts // max(1, LARGEST // size))
    for part in range(parts):
        yield experts * part // parts, experts * (part + 1) // parts
