"""Experts with quantized weights: both grouped GEMMs of a layer, and the layer itself.

The first GEMM has the model's gate, and its biases if it has some, which humming's kernels have
not; rows are sorted by experts beforehand. The layer is compared with the same in bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch

import warploom
from benchmarks.families import Asked, Case
from benchmarks.peers import _routing
from benchmarks.peers._checked import kernels_of, tried
from benchmarks.peers._mixed_codes import codes_of
from benchmarks.peers._mixed_problem import Kind
from benchmarks.peers.libraries.humming import WAYS, HummingExperts
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.integrations.experts import gate_function
from warploom.quantization import PackedExperts
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.mixed_gemm.grouped_call import WEIGHT, GroupedMixedCall
from warploom.runtime.families.mixed_gemm.reference import ways
from warploom.runtime.measure import Call, largest_share
from warploom.runtime.plan import run
from warploom.runtime.trial import wrong

FORMATS = {"w4a16": "int4", "mxfp4": "mxfp4"}
BIASED = "swiglu_oai"  # the gate of models whose experts have biases
ROUNDED = 2.0**-5  # of a layer, whose inner values are rounded to bf16, compared with the largest


@dataclass(frozen=True, slots=True)
class Model:
    """A layer of experts with weights in a format."""

    hidden: int
    inner: int
    experts: int
    k: int
    gate: str
    type: str

    @property
    def sizes(self) -> dict[str, tuple[int, int]]:
        """N and K of its weights."""
        return {"gate_up": (2 * self.inner, self.hidden), "down": (self.hidden, self.inner)}

    def kind(self, name: str) -> Kind:
        """What a weight is in; of int4, groups are the largest that divide K."""
        _, k = self.sizes[name]
        group = 32 if self.type == "mxfp4" else next(g for g in (128, 64, 32) if k % g == 0)
        return Kind(FORMATS[self.type], group)

    def moved(self, name: str, tokens: int) -> int:
        """Bytes of the weights of experts that have tokens, and of their rows; "layer": of both."""
        if name == "layer":
            weights = sum(self.moved(one, tokens) for one in self.sizes)
            return weights - 2 * tokens * self.k * (self.hidden + 2 * self.inner)
        n, k = self.sizes[name]
        hit = len(_routing.chosen(_routing.ids(tokens, self.experts, self.k, 0)))
        columns = n // 2 if name == "gate_up" else n  # of the result: a gate halves them
        return hit * self.kind(name).bytes((0, n, k)) + 2 * tokens * self.k * (k + columns)


def experts(asked: Asked) -> Iterator[Case]:
    """Both GEMMs and the layer, of the listed models at each number of tokens."""
    listed = cells()["mixed_gemm"]["experts"]
    for type in listed["types"]:
        for name, gate in listed["gates"].items():
            hidden, inner, count, chosen = cells()["combine"]["layers"]["models"][name]
            model = Model(hidden, inner, count, chosen, gate, type)
            for part in (*model.sizes, "layer"):
                n, k = model.sizes.get(part, model.sizes["gate_up"])
                for tokens in asked.m or listed["tokens"]:
                    yield Case(
                        f"{type} {name} {part}, {tokens} tokens",
                        {"m": tokens, "n": n, "k": k, "type": type, "experts": model.experts},
                        Floor.of(0.0, model.moved(part, tokens)),
                        partial(_contenders, model, part, tokens),
                    )


# ---- Operands ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Weights:
    """The quantized weights of a layer, and biases; `kept` is what contenders made of them."""

    gate_up: PackedExperts
    down: PackedExperts
    biases: dict[str, torch.Tensor]
    kept: dict[str, Any]


@lru_cache(maxsize=1)
def _weights(model: Model, device: str) -> Weights:
    """Normal values: the weights of the last case, if it had the same."""
    draws = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=draws, device=device, dtype=torch.bfloat16)
        return made.mul_(shape[-1] ** -0.5)

    def quantized(name: str) -> PackedExperts:
        kind, (n, k) = model.kind(name), model.sizes[name]
        each = (warploom.quantize(normal(n, k), kind.format, group=kind.group) for _ in each_of)
        return PackedExperts.stack(each)

    each_of, biases = range(model.experts), {}
    if model.gate == BIASED:
        biases = {name: normal(model.experts, n) for name, (n, _) in model.sizes.items()}
    return Weights(quantized("gate_up"), quantized("down"), biases, {})


@dataclass(frozen=True, slots=True)
class Routed:
    """Tokens [tokens, hidden] with their experts, and where the rows of experts end."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    ends: torch.Tensor


def _routings(model: Model, tokens: int, device: str, moved: int) -> list[Routed]:
    """As many as outlast the L2 cache, since each reads other experts."""
    draws, seeds = torch.Generator(device).manual_seed(0), iter(range(1 << 20))

    def routed() -> Routed:
        ids = _routing.ids(tokens, model.experts, model.k, next(seeds)).to(device)
        hidden = torch.randn(tokens, model.hidden, generator=draws, device=device).bfloat16()
        weights = torch.rand(tokens, model.k, generator=draws, device=device).softmax(-1)
        ends, _, _ = _routing.sorted_by_expert(ids, model.experts)
        return Routed(hidden, ids, weights, ends)

    return rotated(routed, moved, device)


# ---- Contenders ----------------------------------------------------------------------------------


def _contenders(model: Model, part: str, tokens: int, asked: Asked) -> list[Contender]:
    weights = _weights(model, asked.device)
    routed = _routings(model, tokens, asked.device, model.moved(part, tokens))
    if part == "layer":
        return _layers(model, weights, routed)
    calls = [_call(model, part, weights, one) for one in routed]
    runs: list[Call] = [partial(run, one) for one in calls]
    share = partial(_share, calls[0], lambda: run(calls[0])[0])
    found = [Contender("warploom", runs, share, partial(kernels_of, runs[0]))]
    if not asked.peers or "humming" in asked.peers:
        bare = [replace(one, bias=None, gate=None, out=None) for one in calls]
        found += [_humming(way, part, weights, bare) for way in WAYS]
    return found


def _call(model: Model, part: str, weights: Weights, routed: Routed) -> GroupedMixedCall:
    """One grouped GEMM on rows that are sorted by experts."""
    packed: PackedExperts = getattr(weights, part)
    rows, (_, k) = routed.ids.numel(), model.sizes[part]
    made = GroupedMixedCall(
        routed.hidden.new_empty(rows, k).normal_(),
        offs=routed.ends,
        metadata=packed.metadata,
        **{name: getattr(packed, name) for name in WEIGHT},
        bias=weights.biases.get(part),
        gate=model.gate if part == "gate_up" else None,
    )
    return replace(made, out=wrong(made.fake()[0]))


def _share(made: GroupedMixedCall, call: Callable[[], torch.Tensor]) -> float:
    """The largest error of what a call returns, as a share of its bound, scaled in one way."""
    found, of = call(), ways(made.a.dtype, made.weight[0])
    return min(largest_share(found, *made.bound(way)) for way in of)


def _humming(way: str, part: str, weights: Weights, bare: Sequence[GroupedMixedCall]) -> Contender:
    """humming's kernel for rows without a gate and biases: [rows, N]."""
    outs = [wrong(one.fake()[0]) for one in bare]

    def make() -> list[Call]:
        if part not in weights.kept:
            weights.kept.clear()
            packed: PackedExperts = getattr(weights, part)
            each = [codes_of(packed[expert]) for expert in range(len(packed))]
            weights.kept[part] = HummingExperts(each)
        layer: HummingExperts = weights.kept[part]
        return [layer.bound(way, one.a, one.offs, out) for one, out in zip(bare, outs, strict=True)]

    def share(calls: Sequence[Call]) -> float:
        calls[0]()
        return _share(bare[0], lambda: outs[0])

    return tried(f"humming, {way}", make, share, peer=True)


def _layers(model: Model, weights: Weights, routed: Sequence[Routed]) -> list[Contender]:
    """The whole layer by quantized weights, and by the same weights in bf16."""
    wide = {name: _dequantized(getattr(weights, name)) for name in model.sizes}
    packed = {name: getattr(weights, name) for name in model.sizes}
    options: dict[str, Any] = {"gate": model.gate, "gate_layout": "interleaved"}
    options |= {f"{name}_bias": bias for name, bias in weights.biases.items()}

    def layer(of: dict[str, Any], one: Routed) -> torch.Tensor:
        return warploom.experts(one.hidden, one.ids, one.weights, **of, **options)

    def share(call: Callable[[], torch.Tensor]) -> float:
        right = _exact(model, weights, routed[0])
        return float((call().float() - right).abs().max() / (ROUNDED * right.abs().max()))

    found = []
    for name, of in (("warploom", packed), ("warploom, bf16", wide)):
        calls = [partial(layer, of, one) for one in routed]
        told = partial(kernels_of, calls[0])
        found.append(Contender(name, calls, partial(share, calls[0]), told))
    return found


def _dequantized(packed: PackedExperts) -> torch.Tensor:
    """The weights in bf16 [E, N, K]."""
    found = (packed[expert].dequantize(torch.bfloat16) for expert in range(len(packed)))
    return torch.stack([*found])


def _exact(model: Model, weights: Weights, one: Routed) -> torch.Tensor:
    """The layer in fp32, without rounding on the way."""
    right = torch.zeros_like(one.hidden, dtype=torch.float32)

    def linear(rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        packed: PackedExperts = getattr(weights, name)
        found = rows @ packed[expert].dequantize(torch.float32).mT
        return found + weights.biases[name][expert] if name in weights.biases else found

    for expert in _routing.chosen(one.ids):
        token, choice = torch.where(one.ids == expert)
        both = linear(one.hidden[token].float(), "gate_up", expert)
        gated = gate_function(both, model.gate, "interleaved", 1.702, 7.0)
        rows = linear(gated, "down", expert)
        right.index_add_(0, token, rows * one.weights[token, choice, None])
    return right
