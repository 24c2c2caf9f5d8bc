"""A step of decoding a Llama: layers with weights in a contender's layout, as one CUDA graph.

Four products a layer (qkv, o, gate_up, down) on packed or dense weights. All else is torch's and
the same for every contender: norms, rotation, attention over a cache, silu, and a head in bf16.
Held against float64 of the same weights, as the relative distance of the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn import functional

from benchmarks.families import Asked
from benchmarks.peers._checked import reason
from benchmarks.peers._mixed_problem import Activations, Kind, Quantised
from benchmarks.peers._mixed_weights import Packed, Weight, Wide, WideGemm
from benchmarks.peers.libraries.humming import Humming
from benchmarks.peers.libraries.marlin import Marlin
from warploom.runtime.contest import Contender, Floor

Multiply = Callable[[int, str, torch.Tensor], torch.Tensor]  # by a layer's weight of this name
CLOSE = 2.0**-5  # of the logits: 4 layers of bf16 are 1 % off
_DIM = 128  # of a head


@dataclass(frozen=True, slots=True)
class Model:
    """What of a Llama decides a step's time; `keys` have been decoded before."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    vocabulary: int
    keys: int

    @property
    def products(self) -> Mapping[str, tuple[int, int]]:
        """The weights of a layer, as [n, k]."""
        attended = self.heads * _DIM
        return {
            "qkv": (attended + 2 * self.kv_heads * _DIM, self.hidden),
            "o": (self.hidden, attended),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }

    def floor(self, kind: Kind, batch: int) -> Floor:
        """The weights, the head and the cache, read once."""
        products = sum(kind.bytes((batch, n, k)) for n, k in self.products.values())
        cache = 4 * batch * self.kv_heads * self.keys * _DIM
        head = 2 * self.vocabulary * self.hidden
        return Floor.of(0.0, float(self.layers * (products + cache) + head))


class Step:
    """The tensors of a step but for the layers' weights, in one type."""

    def __init__(self, model: Model, batch: int, device: str) -> None:
        draws = torch.Generator(device).manual_seed(batch)

        def normal(*extents: int) -> torch.Tensor:
            return torch.randn(*extents, generator=draws, device=device).bfloat16()

        cached = (batch, model.kv_heads, model.keys, _DIM)
        self.model, self.x = model, normal(batch, model.hidden)
        self.caches = [(normal(*cached), normal(*cached)) for _ in range(model.layers)]
        self.norm = 1 + normal(model.hidden) / 8
        angle = (model.keys - 1) / 1e4 ** (torch.arange(0, _DIM, 2, device=device) / _DIM)
        self.turn = torch.cat((angle, angle)).cos().bfloat16(), _signed(angle).bfloat16()
        self.head: torch.Tensor = normal(model.vocabulary, model.hidden) / model.hidden**0.5

    def double(self) -> Step:
        """The same in float64."""
        found = object.__new__(Step)
        found.model = self.model
        found.x, found.norm, found.head = self.x.double(), self.norm.double(), self.head.double()
        found.caches = [(k.double(), v.double()) for k, v in self.caches]
        found.turn = self.turn[0].double(), self.turn[1].double()
        return found

    def __call__(self, multiply: Multiply) -> torch.Tensor:
        """The logits [batch, vocabulary]."""
        x = self.x
        for layer in range(self.model.layers):
            x = x + multiply(layer, "o", self._attended(layer, multiply, x))
            gate, up = multiply(layer, "gate_up", self._normed(x)).chunk(2, -1)
            x = x + multiply(layer, "down", functional.silu(gate) * up)
        return self._normed(x) @ self.head.t()

    def _normed(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = functional.rms_norm(x, self.norm.shape, self.norm, 1e-5)
        return found

    def _attended(self, layer: int, multiply: Multiply, x: torch.Tensor) -> torch.Tensor:
        """What heads [batch, heads * dim] see; the last key and value join the cache."""
        heads, kv_heads = self.model.heads, self.model.kv_heads
        found = multiply(layer, "qkv", self._normed(x)).view(len(x), heads + 2 * kv_heads, _DIM)
        cos, sin = self.turn
        turned = found[:, : heads + kv_heads]
        turned = turned * cos + turned.roll(_DIM // 2, -1) * sin
        keys, values = self.caches[layer]
        keys[:, :, -1], values[:, :, -1] = turned[:, heads:], found[:, heads + kv_heads :]
        attend = functional.scaled_dot_product_attention
        seen = attend(turned[:, :heads, None], keys, values, enable_gqa=True)
        return seen.reshape(len(x), heads * _DIM)


def _signed(angle: torch.Tensor) -> torch.Tensor:
    """Sines by which a half that was rolled is added to the other: the first half's negative."""
    return torch.cat((-angle.sin(), angle.sin()))


# ---- Contenders ----------------------------------------------------------------------------------

CONTENDERS: tuple[tuple[str, str, type[Weight]], ...] = (  # what is asked for, and shown
    ("", "warploom", Packed),
    ("dense", "torch.mm, bf16", Wide),
    ("dense", "warploom.gemm, bf16", WideGemm),
    ("marlin", "Marlin", Marlin),
    ("humming", "humming", Humming),
)


def contenders(model: Model, kind: Kind, batch: int, asked: Asked) -> list[Contender]:
    """Warploom on packed weights first; bf16 by torch is its peer, all else stands beside it."""
    step = Step(model, batch, asked.device)
    given = [_layer(model, kind, index, asked.device) for index in range(model.layers)]
    exact: list[torch.Tensor] = []

    def error_share(out: Sequence[torch.Tensor]) -> float:
        if not exact:
            exact.append(step.double()(partial(_multiplied, given)))
        return float((out[0].double() - exact[0]).norm() / exact[0].norm()) / CLOSE

    def contender(name: str, layout: type[Weight]) -> Contender:
        made: list[dict[str, Weight]] = []
        out: list[torch.Tensor] = []

        def call() -> None:
            if not made:
                made.extend(_packed(layout, layer) for layer in given)
            out[:] = [step(partial(_product, model, made))]

        peer = layout is Wide
        return Contender(name, [_refused(call)], lambda: error_share(out), None, peer)

    return [
        contender(name, layout)
        for wanted, name, layout in CONTENDERS
        if not wanted or not asked.peers or wanted in asked.peers
    ]


def _layer(model: Model, kind: Kind, index: int, device: str) -> dict[str, Quantised]:
    """The weights of a layer, drawn anew."""
    return {
        name: Quantised(kind, n, k, device, seed=index + 1)
        for name, (n, k) in model.products.items()
    }


def _packed(layout: type[Weight], layer: Mapping[str, Quantised]) -> dict[str, Weight]:
    return {name: layout.of(one) for name, one in layer.items()}


def _product(
    model: Model,
    weights: Sequence[Mapping[str, Weight]],
    layer: int,
    name: str,
    x: torch.Tensor,
) -> torch.Tensor:
    out = x.new_empty(len(x), model.products[name][0])
    return weights[layer][name].multiply(Activations(x, None, x), out)


def _multiplied(
    given: Sequence[Mapping[str, Quantised]], layer: int, name: str, x: torch.Tensor
) -> torch.Tensor:
    return x @ given[layer][name].codes.weight().t()


def _refused(call: Callable[[], None]) -> Callable[[], None]:
    """The call, whose ways to refuse are RuntimeErrors."""

    def own() -> None:
        try:
            call()
        except torch.AcceleratorError:
            raise
        except Exception as error:
            raise RuntimeError(reason(error)) from error

    return own
