"""Gradients of activations and of biases, beside torch's own operators, which take a pass each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardShape,
)
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.activation_backward.api import activation_backward
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.activation_backward.trial import bounds, draw, share
from warploom.runtime.plan import Plan, make

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
    make = partial(draw, operation, shape, asked.device, None)
    given = rotated(make, shape.m * shape.n * operation.row_bytes, asked.device)
    peers = [torchs(given)] if not asked.peers or "torch" in asked.peers else []
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    return [ours(given), *peers, *(ours(given, spec.name, spec) for spec in fitting)]


def ours(
    given: Sequence[ActivationBackwardCall],
    name: str = "warploom",
    spec: KernelSpec | None = None,
) -> Contender:
    """Warploom: as dispatched, or by one kernel."""

    def call(one: ActivationBackwardCall) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        return activation_backward(
            one.dy, one.z, one.activation, sums=one.sums, out=one.out, spec=spec
        )

    def told() -> tuple[str, str]:
        choice = make(replace(given[0], spec=spec), Plan).choice
        return choice.spec.name, choice.reason

    first = given[0]
    return Contender(
        name, [partial(call, one) for one in given], lambda: share(call(first), bounds(first)), told
    )


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
        return share((dz, alone), bounds(given[0]))

    return Contender("torch", [partial(call, one) for one in given], error_share, peer=True)


class Gradients(Family):
    """dz = dy * f'(z), and its sums."""

    def at(self, problem: Problem) -> int:
        """M."""
        return int(problem["m"])

    def subject(self, problem: Problem) -> str:
        """The operation, and n."""
        return f"{problem['operation']}, n {problem['n']}"

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By n, then m."""
        return problem["n"], problem["m"]

    def flops(self, problem: Problem) -> float | None:
        """None: memory limits them."""
        return None

    def division(self, problem: Problem) -> str:
        """The operation."""
        return str(problem["operation"])


FAMILY = Gradients(
    name="activation_backward",
    groups={"activations": Group("{kind}", cases, "{kind}")},
    grid=("activations",),
    kinds={"bf16": "Gradients of activations and biases, bf16"},
    peers={"torch": "torch"},
    called={"torch": "torch's operators"},
    axis=("M", "M, rows"),
    divided="operation",
)
