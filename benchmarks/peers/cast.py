"""Casts to 8 bits, compared with torch's operations, eager and compiled, torchao's kernels, and a
copy of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.families import Asked, Case, CellJson, Family, Group, Problem
from benchmarks.peers.libraries import imported, refusing
from benchmarks.peers.libraries.triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.families.cast import CastOperation, CastShape
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.cast import reference
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.cast.call import AnyCast
from warploom.runtime.families.cast.family import FAMILY as RUNTIME
from warploom.runtime.families.cast.reference import Results
from warploom.runtime.measure import largest_share
from warploom.runtime.plan import Plan, make

OPERATIONS = {
    "1x128": CastOperation("bf16", "e4m3", "1x128"),
    "1x128, transposed": CastOperation("bf16", "e4m3", "1x128", transpose=True),
    "1x128, transposed, stochastic": CastOperation(
        "bf16", "e4m3", "1x128", transpose=True, rounding="stochastic"
    ),
    "128x128, transposed": CastOperation("bf16", "e4m3", "128x128", transpose=True),
    "1x32, transposed": CastOperation("bf16", "e4m3", "1x32", transpose=True),
    "row": CastOperation("bf16", "e4m3", "row"),
    "row, transposed": CastOperation("bf16", "e4m3", "row", transpose=True),
    "tensor": CastOperation("bf16", "e4m3", "tensor"),
    "tensor, transposed": CastOperation("bf16", "e4m3", "tensor", transpose=True),
    "static tensor, transposed": CastOperation(
        "bf16", "e4m3", "tensor", static=True, transpose=True, amax=True
    ),
}
# Of x.T alone there is no kernel of ours: both orientations stand beside peers that write one.
ALONE, COPY = "1x128, x.T alone", "copy"
OPERATIONS[ALONE] = OPERATIONS["1x128, transposed"]
_TORCHAO = "torchao.prototype.blockwise_fp8_training.kernels"
# torchao's kernels, of x and of x.T; "weights" have results in column-major order.
_KERNELS = {
    "1x128": ("triton_fp8_blockwise_act_quant_lhs",),
    "1x128, transposed": (
        "triton_fp8_blockwise_act_quant_lhs",
        "triton_fp8_blockwise_act_quant_transposed_lhs",
    ),
    "128x128, transposed": (
        "triton_fp8_blockwise_weight_quant_rhs",
        "triton_fp8_blockwise_weight_quant_transposed_rhs",
    ),
    ALONE: ("triton_fp8_blockwise_act_quant_transposed_lhs",),
}


def cases(asked: Asked) -> Iterator[Case]:
    """Each operation at each of the listed extents."""
    for name in OPERATIONS:
        for m, n in cells()["cast"]["extents"]:
            floor = Floor.of(0.0, _moved(name, CastShape(m, n)))
            about = {"m": m, "n": n, "type": "bf16", "operation": name}
            yield Case(f"{name} {m}x{n}", about, floor, partial(contenders, name, CastShape(m, n)))


def _moved(name: str, shape: CastShape) -> int:
    """The bytes that an operation reads and writes at least."""
    return shape.m * shape.n * (OPERATIONS[name].value_bytes - (name == ALONE))


def contenders(name: str, shape: CastShape, asked: Asked) -> list[Contender]:
    """Warploom as dispatched, others, a copy, and each kernel that competes."""
    operation, moved = OPERATIONS[name], _moved(name, shape)
    calls = rotated(
        partial(RUNTIME.draw, operation, shape, asked.device, None), moved, asked.device
    )
    first = 2 if name == ALONE else 0  # of the results q, scale, q of x.T and its scale
    peers = []
    if operation.rounding == "nearest":
        peers += [torchs(calls, first), torchs(calls, first, is_compiled=True)]
    if name in _KERNELS:
        peers.append(torchaos(calls, _KERNELS[name], first))
    peers = [one for one in peers if not asked.peers or one.name in asked.peers]
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    copies = rotated(partial(_halves, moved, asked.device), moved, asked.device)
    copy = Contender(COPY, [partial(_copy, *one) for one in copies])
    return [ours(calls), *peers, copy, *(ours(calls, spec.name, spec) for spec in fitting)]


def ours(
    calls: Sequence[AnyCast], name: str = "warploom", spec: KernelSpec | None = None
) -> Contender:
    """Warploom: as dispatched, or by one kernel."""

    def run(one: AnyCast) -> tuple[torch.Tensor, ...]:
        return cast(
            one.x,
            one.dtype,
            block=one.block,
            transpose=one.transpose,
            scale=one.scale,
            rounding=one.rounding,
            rounding_state=one.rounding_state,
            amax=one.amax,
            spec=spec,
        )

    def told() -> tuple[str, str]:
        choice = make(replace(calls[0], spec=spec), Plan).choice
        return choice.spec.name, choice.reason

    return Contender(name, [partial(run, one) for one in calls], partial(_share, calls, run), told)


def torchs(calls: Sequence[AnyCast], first: int = 0, *, is_compiled: bool = False) -> Contender:
    """torch's operations: each a pass of its own, or fused by its compiler."""
    options = reference.Options(
        *(calls[0].dtype, calls[0].blocks, calls[0].transpose, calls[0].pow2)
    )

    def quantized(x: torch.Tensor, scale: torch.Tensor | None) -> Results:
        q, own, q_t, scale_t = reference.cast(x, options, (scale, None))
        q_t = None if q_t is None else q_t.contiguous()
        return (None, None, q_t, scale_t) if first else (q, own, q_t, scale_t)

    function = compiled(lambda: quantized) if is_compiled else quantized

    def run(one: AnyCast) -> Sequence[Any]:
        return function(one.x, _scale(one))[first:]

    name = "torch.compile" if is_compiled else "torch"
    calls_of = [partial(run, one) for one in calls]
    return Contender(name, calls_of, partial(_share, calls, run, first), peer=True)


def torchaos(calls: Sequence[AnyCast], names: tuple[str, ...], first: int = 0) -> Contender:
    """torchao's Triton kernels, one launch for x and one for x.T."""

    def run(one: AnyCast) -> tuple[torch.Tensor, ...]:
        module = imported("torchao", _TORCHAO)
        return tuple(result for name in names for result in getattr(module, name)(one.x))

    run = refusing("torchao", run)
    calls_of = [partial(run, one) for one in calls]
    return Contender("torchao", calls_of, partial(_share, calls, run, first), peer=True)


def _share(
    calls: Sequence[AnyCast], run: Callable[[AnyCast], Sequence[Any]], first: int = 0
) -> float:
    """The largest error of what the first call returns, as a share of two steps of its type.

    Others divide where we multiply, so that a value halfway may be rounded up or down.
    """
    shares = [0.0]
    for one, other in zip(run(calls[0]), RUNTIME.expected(calls[0])[first:], strict=False):
        if other is not None:
            exact = other.double()
            step = 2.0**-22 if other.dtype == torch.float32 else 2.0**-3
            bound = 2 * step * exact.abs() + 2.0**-8 * (other.dtype.itemsize == 1)
            shares.append(largest_share(one, exact, bound))
    return max(shares)


def _scale(one: AnyCast) -> torch.Tensor | None:
    return None if one.scale is None else one.scale.reshape(1, 1)


def _halves(moved: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors that are as many bytes together."""
    half = moved // 2
    return (
        torch.empty(half, dtype=torch.uint8, device=device),
        torch.empty(half, dtype=torch.uint8, device=device),
    )


def _copy(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return to.copy_(source)


class Casts(Family):
    """Casts to 8 bits with scales."""

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

    def further(self, cell: CellJson) -> dict[str, str]:
        """The rate in bytes, as a share of that of a copy and of the fastest torchao kernels."""
        times = {one["contender"]: one["seconds"] for one in cell["entries"] if one["seconds"]}
        beside = {"of a copy's rate": COPY, "torchao / Warploom": "torchao"}
        return {
            title: f"{times[name] / times['warploom']:.2f}"
            for title, name in beside.items()
            if name in times and "warploom" in times
        }


FAMILY = Casts(
    name="cast",
    groups={"casts": Group("{kind}", cases, "{kind}", about="one and both orientations")},
    grid=("casts",),
    kinds={"bf16": "Casts of bf16 to e4m3"},
    peers={name: name for name in ("torch", "torch.compile", "torchao")},
    called={"torch": "torch's operations", "torchao": "torchao's kernels"},
    axis=("M", "M, rows"),
    divided="blocks",
)
