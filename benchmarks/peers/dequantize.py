"""Dense weights of quantized ones, next to torch's operators and a copy of as many bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.families import Asked, Case, Family, Group, Problem
from benchmarks.peers._moving import contenders as moving
from benchmarks.peers._moving import copy_of
from warploom.generator.configurations import cells
from warploom.generator.families.dequantize import DequantizeOperation, DequantizeShape
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.dequantize.call import Details
from warploom.runtime.families.dequantize.family import FAMILY as RUNTIME
from warploom.runtime.families.dequantize.family import AnyCall
from warploom.runtime.plan import run

OPERATIONS = {
    "int4": DequantizeOperation("bf16", "int4", 128, "bf16"),
    "uint4": DequantizeOperation("bf16", "uint4", 128, "bf16"),
    "mxfp4": DequantizeOperation("bf16", "mxfp4", 32, "e8m0"),
    "nvfp4": DequantizeOperation("bf16", "nvfp4", 16, "e4m3"),
    "e4m3": DequantizeOperation("bf16", "e4m3", 0, "fp32"),
    "e4m3 128x128": DequantizeOperation("bf16", "e4m3", 128, "fp32", layout="rows"),
}


def cases(_asked: Asked) -> Iterator[Case]:
    """Each format of each listed weight whose K its groups divide."""
    for name, operation in OPERATIONS.items():
        for experts, n, k in cells()["dequantize"]["weights"]:
            if operation.layout == "slabs" and k % (operation.group or 1):
                continue
            floor = Floor.of(0.0, operation.moved(experts, n, k))
            about = {"experts": experts, "n": n, "k": k, "type": "bf16", "operation": name}
            make = partial(contenders, operation, DequantizeShape(experts, n, k))
            yield Case(f"{name} {experts}x{n}x{k}", about, floor, make)


def contenders(
    operation: DequantizeOperation, shape: DequantizeShape, asked: Asked
) -> list[Contender]:
    """Warploom as dispatched, torch, a copy, and each kernel that competes."""
    moved = operation.moved(shape.experts, shape.n, shape.k)
    draw = partial(RUNTIME.draw, operation, shape, asked.device, None)
    found = moving(draw, moved, operation, asked, ours=run, torchs=torchs, error_share=_wrong)
    return [*found, copy_of(moved, asked.device)]


def torchs(given: Sequence[AnyCall]) -> Contender:
    """The operators by which torch dequantizes each expert."""
    calls = [partial(_torch, one) for one in given]
    return Contender("torch", calls, lambda: _wrong(given[0], calls[0]), peer=True)


def _torch(one: AnyCall) -> None:
    if one.out is None:
        raise ValueError("a case without a place for its result")
    one.compute(Details(), (one.out,))


def _wrong(one: AnyCall, call: Callable[[], Any]) -> float:
    """0 where a call leaves the bits of the reference."""
    right = RUNTIME.expected(one)
    call()
    return RUNTIME.share(RUNTIME.results(one), right)


class Dequantizations(Family):
    """Quantized weights that become dense."""

    def subject(self, problem: Problem) -> str:
        """The format, and the rows and columns of an expert."""
        return f"{problem['operation']}, {problem['n']}x{problem['k']}"

    def at(self, problem: Problem) -> int:
        """Experts."""
        return int(problem.get("experts", 1))

    def size(self, problem: Problem) -> tuple[int, ...]:
        """By the weight, then experts."""
        return problem["n"] * problem["k"], self.at(problem)

    def flops(self, problem: Problem) -> float | None:
        """None: memory limits them."""
        return None


FAMILY = Dequantizations(
    name="dequantize",
    groups={"dequantizations": Group("{kind}", cases, listed=True)},
    grid=("dequantizations",),
    kinds={"bf16": "Dense bf16 weights of quantized ones"},
    peers={"torch": "torch"},
    called={"torch": "torch's operators"},
    axis=("experts", "experts"),
    divided="format",
)
