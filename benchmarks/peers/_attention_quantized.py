"""Operands of attention in 8 bits as other libraries take them, and what results are held against.

All scales of an operand are of kv heads, and v lies by keys. Those libraries leave sums of 8-bit
products to the tensor core, so that bounds are those of `sums` "fast".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import warploom
from benchmarks.peers._attention_problem import Attention
from warploom.generator.families._attention import AttentionShape
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.runtime.elements import unit_roundoff
from warploom.runtime.families._attention.problem import Alignment
from warploom.runtime.families.attention_forward import values
from warploom.runtime.families.attention_forward.eight_bit_call import EightBitCall
from warploom.runtime.families.attention_forward.eight_bit_trial import EightBitTrial, expected
from warploom.runtime.families.attention_forward.trial import CHECKED_ROWS, Operands
from warploom.runtime.measure import Call

SCALES = ("q_descale", "k_descale", "v_descale")
_E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True, slots=True)
class Quantized:
    """q, k and v of e4m3 [batch, heads, seq, dim], as a model has them: [batch, seq, heads, dim].

    Scales are fp32 [batch, kv_heads] of any strides, of an operand all the same number.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_descale: torch.Tensor
    k_descale: torch.Tensor
    v_descale: torch.Tensor
    out: torch.Tensor  # of bf16, as q
    causal: bool

    @property
    def scale(self) -> float:
        """What scores are multiplied by."""
        return float(self.q.shape[-1] ** -0.5)

    def call(self) -> EightBitCall:
        """The same as a call of ours."""
        scales: dict[str, Any] = {name: getattr(self, name) for name in SCALES}
        return EightBitCall(self.q, self.k, self.v, causal=self.causal, **scales)


@dataclass(frozen=True, slots=True)
class Bound:
    """A library's call on operands, what it computed, and how coarsely that is rounded.

    `unit` is the relative error of one rounding of results beyond bf16, `least` the absolute one.
    """

    call: Call
    result: Callable[[], torch.Tensor]
    unit: float = 0.0
    least: float = 0.0

    def share(self, one: Quantized) -> float:
        """The largest error of the last rows as a share of its bound."""
        return share(one.call(), self.result(), "fast", self.unit, self.least)


def share(
    call: EightBitCall,
    out: torch.Tensor,
    sums: str,
    unit: float = 0.0,
    least: float = 0.0,
) -> float:
    """The largest error of the last rows of the last batch, as a share of its bound.

    Args:
        call: What was called, with v by keys.
        out: What it returned.
        sums: "promoted" or "fast".
        unit: The relative error of a rounding of results beyond that to bf16.
        least: Its absolute error.
    """
    if not out.isfinite().all():
        return float("inf")
    rows = slice(max(0, out.shape[2] - CHECKED_ROWS), None)
    scales: dict[str, Any] = {name: getattr(call, name)[-1:] for name in SCALES}
    if scales["q_descale"].dim() == 3:
        scales["q_descale"] = scales["q_descale"][..., rows]
    causal: Alignment | bool = "bottom_right" if call.causal else False
    part = replace(
        call, q=call.q[-1:, :, rows], k=call.k[-1:], v=call.v[-1:], causal=causal, **scales
    )
    exact, off = expected(part, sums, unit_roundoff(torch.bfloat16))
    off = off + unit * (exact.abs() + off) + least
    return float(((out[-1:, :, rows].double() - exact).abs() / off).max())


def operands(problem: Attention, device: str) -> list[Quantized]:
    """As many sets as outlast the GPU's L2 cache when used in turn, of random e4m3."""
    sums = AttentionOperation(**problem.operation, scores="e4m3", weights="e4m3", sums="fast")
    trial = EightBitTrial(sums, shape_of(problem), device, 1)
    found = []
    for one in trial.sets:
        v = _as_model(values.by_keys(one.v, problem.seq))
        scales = {name: one.lengths[name] for name in SCALES}
        found.append(Quantized(one.q, one.k, v, out=one.out, causal=problem.causal, **scales))
    return found


def by_cast(problem: Attention, one: Operands) -> Quantized:
    """Quantize bf16 operands with a scale of each tensor, by `warploom.cast`."""
    codes: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    for name, tensor in (("q", one.q), ("k", one.k), ("v", one.v)):
        batch, heads, seq, dim = tensor.shape
        rows = tensor.transpose(1, 2).reshape(batch * seq, heads * dim)
        code, scale = warploom.cast(rows, _E4M3)
        codes[name] = code.view(batch, seq, heads, dim).transpose(1, 2)
        scales[f"{name}_descale"] = scale.expand(problem.batch, problem.kv_heads)
    out = torch.empty_like(one.out)  # of its own: the operands' is checked after all was timed
    return Quantized(**codes, **scales, out=out, causal=problem.causal)


def shape_of(problem: Attention) -> AttentionShape:
    """The shape of a problem of one length."""
    return AttentionShape(
        problem.batch, problem.heads, problem.kv_heads, problem.seq, problem.seq, problem.dim
    )


def _as_model(tensor: torch.Tensor) -> torch.Tensor:
    """[batch, heads, seq, dim], whose memory is [batch, seq, heads, dim]."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)
