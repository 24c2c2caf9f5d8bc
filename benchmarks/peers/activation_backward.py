"""Gradients of activations and of biases, beside torch's own operators, which take a pass each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from warploom.generator.configurations import cells
from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.activation_backward.family import FAMILY as RUNTIME
from warploom.runtime.sampled import share

Gradients = tuple[torch.Tensor | None, torch.Tensor | None]  # dz, and sums of its columns

OPERATIONS = {
    "gelu_tanh": ActivationBackwardOperation("bf16", "bf16", "bf16", "gelu_tanh", sums=True),
    "sums": ActivationBackwardOperation("bf16", "bf16", "bf16", "none", sums=True),
}


def cases(_asked: Asked) -> Iterator[Case]:
    """Each operation at each of the listed extents."""
    for name, operation in OPERATIONS.items():
        for m, n in cells()["activation_backward"]["extents"]:
            floor = Floor.of(0.0, m * n * operation.row_bytes)
            about = {"m": m, "n": n, "type": "bf16", "operation": name}
            make = partial(contenders, operation, ActivationBackwardShape(m, n))
            yield Case(f"{name} {m}x{n}", about, floor, make)


def contenders(
    operation: ActivationBackwardOperation, shape: ActivationBackwardShape, asked: Asked
) -> list[Contender]:
    """Warploom as dispatched, torch, and each kernel that competes and computes the same."""
    make = partial(RUNTIME.draw, operation, shape, asked.device, None)
    moved = shape.m * shape.n * operation.row_bytes
    return moving(make, moved, operation, asked, ours=ours, torchs=torchs, error_share=wrong)


def ours(one: ActivationBackwardCall) -> Gradients:
    """Warploom."""
    return activation_backward(
        one.dy, one.z, one.activation, sums=one.sums, out=one.out, spec=one.spec
    )


def wrong(one: ActivationBackwardCall, call: Callable[[], Gradients]) -> float:
    """The largest error of what a call on these operands returns, as a share of its bound."""
    return share(call(), RUNTIME.expected(one))


def torchs(given: Sequence[ActivationBackwardCall]) -> Contender:
    """torch's gradient of gelu, and its sums."""

    def call(one: ActivationBackwardCall) -> tuple[torch.Tensor | None, torch.Tensor]:
        if one.z is None:
            return None, one.dy.sum(0, dtype=torch.float32)
        dz = torch.ops.aten.gelu_backward(one.dy, one.z, approximate="tanh")
        return dz, dz.sum(0, dtype=torch.float32)

    def error_share() -> float:
        dz, sums = call(given[0])
        alone = sums if dz is None else None  # else they are of what was rounded to bf16
        return share((dz, alone), RUNTIME.expected(given[0]))

    return Contender("torch", [partial(call, one) for one in given], error_share, peer=True)


class Activations(Family):
    """dz = dy * f'(z), and its sums."""

    def subject(self, problem: Problem) -> str:
        """The operation, and n."""
        return f"{problem['operation']}, n {problem['n']}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By n, then m."""
        return problem["n"], problem["m"]


FAMILY = Activations(
    name="activation_backward",
    groups={"activations": Group("{kind}", cases, "{kind}")},
    grid=("activations",),
    kinds={"bf16": "Gradients of activations and biases, bf16"},
    peers={"torch": "torch"},
    called={"torch": "torch's operators"},
    axis=("M", "M, rows"),
    divided="operation",
)
