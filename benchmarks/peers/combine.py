"""A whole layer of experts in bf16, compared with transformers' ways of running it and, forward,
with vLLM's fused layer in Triton; both passes also as a CUDA graph, and with Warploom in fp8.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F

import warploom
from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers import _routing
from benchmarks.peers._checked import kernels_of
from benchmarks.peers.libraries.vllm_fused_moe import fused_moe
from benchmarks.protocol import rotated
from benchmarks.samplers import stepped
from warploom.generator.configurations import cells
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.measure import graph_sampler

Run = Callable[..., torch.Tensor]
Results = tuple[torch.Tensor, ...]

ROUNDED = 2.0**-5  # of results whose inner values are rounded to bf16, compared with the largest
IN_FP8, ROUNDED_TO_FP8 = "warploom, fp8 blockwise", 2.0**-2  # 3 bits of each operand's mantissa
COPIED = 16 << 30  # bytes of weights that batched_mm may copy


@dataclass(frozen=True, slots=True)
class Sizes:
    """A layer: so many experts of each token, which are drawn."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    k: int

    @property
    def flops(self) -> float:
        """Of the forward pass; the backward pass has twice as many."""
        return 6.0 * self.tokens * self.k * self.hidden * self.inner

    @property
    def weight_bytes(self) -> int:
        """Of the experts that some token of the first routing has."""
        ids = _routing.ids(self.tokens, self.experts, self.k, 0)
        return 2 * 3 * len(_routing.chosen(ids)) * self.hidden * self.inner

    @property
    def moved(self) -> int:
        """Bytes of the forward pass: weights, tokens and results."""
        return self.weight_bytes + 2 * 2 * self.tokens * self.hidden

    @property
    def moved_both(self) -> int:
        """Of both passes: weights twice, the gradients of all, tokens, results and theirs."""
        gradients = 2 * 3 * self.experts * self.hidden * self.inner
        return 2 * self.weight_bytes + gradients + 2 * 4 * self.tokens * self.hidden


def layers(asked: Asked) -> Iterator[Case]:
    """The listed models' layers at each number of tokens."""
    listed = cells()["combine"]["layers"]
    for model, (hidden, inner, experts, k) in listed["models"].items():
        for tokens in asked.m or listed["tokens"]:
            sizes = Sizes(tokens, hidden, inner, experts, k)
            problem = {"m": tokens, "model": model, "type": "bf16"}
            floor = Floor.of(sizes.flops, sizes.moved, 16)
            yield Case(f"{model} {tokens} tokens", problem, floor, partial(_contenders, sizes))


def training(asked: Asked) -> Iterator[Case]:
    """Both passes of the listed layers: as one CUDA graph, and eagerly, with the host's time."""
    listed = cells()["combine"]["training"]
    for model in listed["models"]:
        hidden, inner, experts, k = cells()["combine"]["layers"]["models"][model]
        for tokens in asked.m or listed["tokens"]:
            sizes = Sizes(tokens, hidden, inner, experts, k)
            floor = Floor.of(3 * sizes.flops, sizes.moved_both, 16)
            for is_eager in (False, True):
                way = "eager" if is_eager else "CUDA graph"
                yield Case(
                    f"{model} {tokens} tokens, both passes, {way}",
                    {"m": tokens, "model": model, "type": "bf16", "way": way},
                    floor,
                    partial(_trained, sizes, is_eager),
                    stepped if is_eager else graph_sampler,
                )


# ---- Contenders ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layer:
    """The operands of a layer, and the gradient of its result."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    dout: torch.Tensor

    def forward(self, run: Run) -> Results:
        """The result."""
        return (run(self.hidden, self.ids, self.weights, self.gate_up, self.down),)

    def step(self, run: Run) -> Results:
        """The result, and the gradients of tokens, weights of the router and those of experts."""
        given = [self.hidden, self.weights, self.gate_up, self.down]
        with torch.enable_grad():
            hidden, weights, gate_up, down = (one.detach().requires_grad_() for one in given)
            out = run(hidden, self.ids, weights, gate_up, down)
            grads = torch.autograd.grad(out, [hidden, weights, gate_up, down], self.dout)
        return (out.detach(), *grads)

    def exact(self) -> Layer:
        """The same in fp32."""
        named = {name: getattr(self, name) for name in ("hidden", "gate_up", "down", "dout")}
        return replace(self, **{name: one.float() for name, one in named.items()})


def _share(
    step: Callable[[Layer, Run], Results], layer: Layer, run: Run, rounded: float = ROUNDED
) -> float:
    """The largest error, as a share of what rounding on the way may cost."""
    pairs = zip(step(layer, run), step(layer.exact(), loop), strict=True)
    return max(
        float((one.float() - right).abs().max() / (rounded * right.abs().max()))
        for one, right in pairs
    )


def _contenders(sizes: Sizes, asked: Asked) -> list[Contender]:
    runs: dict[str, Run] = {
        "warploom": warploom.experts,
        "grouped_mm": grouped_mm,
        "fused_moe": fused_moe,
    }
    if sizes.flops <= COPIED:  # as many bytes of weights as there are flops
        runs["batched_mm"] = batched_mm
    return _made(runs, Layer.forward, _drawn(sizes, asked.device), asked)


def _trained(sizes: Sizes, is_eager: bool, asked: Asked) -> list[Contender]:
    runs: dict[str, Run] = {
        "warploom": warploom.experts,
        IN_FP8: partial(warploom.experts, recipe="blockwise"),
        "grouped_mm": grouped_mm,
    }
    if is_eager:  # it waits for the device, which no graph allows
        runs["loop"] = loop
    return _made(runs, Layer.step, _drawn(sizes, asked.device)[:1], asked)


def _made(
    runs: dict[str, Run],
    step: Callable[[Layer, Run], Results],
    layers: list[Layer],
    asked: Asked,
) -> list[Contender]:
    found = []
    for name, run in runs.items():
        is_ours = name in ("warploom", IN_FP8)
        if is_ours or not asked.peers or name in asked.peers:
            calls = [partial(step, one, run) for one in layers]
            rounded = ROUNDED_TO_FP8 if name == IN_FP8 else ROUNDED
            share = partial(_share, step, layers[0], run, rounded)
            told = partial(kernels_of, calls[0]) if is_ours else None
            found.append(Contender(name, calls, share, told, peer=not is_ours))
    return found


def _drawn(sizes: Sizes, device: str) -> list[Layer]:
    """Routings and tokens that outlast the L2 cache, of one set of weights."""
    random = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16)
        return made.mul_(shape[-1] ** -0.5)

    tokens, hidden, inner, experts, k = (
        *(sizes.tokens, sizes.hidden, sizes.inner),
        *(sizes.experts, sizes.k),
    )
    gate_up, down = normal(experts, 2 * inner, hidden), normal(experts, hidden, inner)
    seeds = iter(range(1 << 20))

    def layer() -> Layer:
        ids = _routing.ids(tokens, experts, k, next(seeds)).to(device)
        weights = torch.rand(tokens, k, generator=random, device=device).softmax(-1)
        x, dout = normal(tokens, hidden), normal(tokens, hidden)
        return Layer(x, ids, weights, gate_up, down, dout)

    return rotated(layer, sizes.moved, device)


# ---- transformers --------------------------------------------------------------------------------


def grouped_mm(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """The steps of transformers' grouped_mm: a sort, torch's grouped GEMMs, and a sum."""
    tokens, k = ids.shape
    offsets, order, inverse = _routing.sorted_by_expert(ids, len(gate_up))
    gate, up = F.grouped_mm(hidden[order // k], gate_up.mT, offs=offsets).chunk(2, -1)
    rows = F.grouped_mm(F.silu(gate) * up, down.mT, offs=offsets)
    rows = rows * weights.reshape(-1)[order, None]
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


def loop(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """transformers' eager loop over the experts that have tokens: it waits for the device."""
    out = torch.zeros_like(hidden)
    for expert in _routing.chosen(ids):
        token, choice = torch.where(ids == expert)
        gate, up = F.linear(hidden[token], gate_up[expert]).chunk(2, -1)
        rows = F.linear(F.silu(gate) * up, down[expert]) * weights[token, choice, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out


class Experts(Family):
    """Layers of experts."""

    def subject(self, problem: Problem) -> str:
        """The model."""
        return str(problem["model"])


FAMILY = Experts(
    name="combine",
    groups={
        "layers": Group("Layers of experts, bf16, forward", layers, listed=True),
        "training": Group("Layers of experts, bf16, both passes", training, listed=True),
    },
    grid=(),
    kinds={"bf16": "Layers of experts, bf16, forward"},
    peers={name: name for name in ("grouped_mm", "fused_moe", "batched_mm", "loop")},
    called={
        "grouped_mm": "transformers' grouped_mm (torch)",
        "fused_moe": "vLLM's fused MoE (Triton)",
        "batched_mm": "transformers' batched_mm (torch)",
        "loop": "transformers' loop over experts (torch)",
    },
    axis=("tokens", "tokens"),
    divided="model",
)
