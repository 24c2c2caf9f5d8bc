"""Casts to 8 bits, compared with torch's operations, eager and compiled, torchao's kernels, and a
copy of as many bytes.

Rows in groups, which end at offsets on the device, are those of experts. No other library casts
them so: its functions get rows that were padded before, so that groups begin at multiples of 128.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import torch

from benchmarks.families import Asked, Case, CellJson, Family, Group, Problem
from benchmarks.peers import _routing
from benchmarks.peers._moving import COPY, copy_of
from benchmarks.peers._routing import Routed
from benchmarks.peers.libraries import imported, refusing
from benchmarks.peers.libraries.triton import compiled
from benchmarks.protocol import rotated
from warploom.generator.configurations import cells
from warploom.generator.families.cast import CastOperation, CastShape
from warploom.generator.families.cast.schedule import COLUMNS
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor
from warploom.runtime.families.cast import reference
from warploom.runtime.families.cast.api import cast
from warploom.runtime.families.cast.call import AnyCast, call_of
from warploom.runtime.families.cast.family import FAMILY as RUNTIME
from warploom.runtime.families.cast.reference import Results
from warploom.runtime.measure import largest_share
from warploom.runtime.plan import Plan, make
from warploom.runtime.tensors import normal

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
    "static 1x128, transposed": CastOperation("bf16", "e4m3", "1x128", static=True, transpose=True),
    "static row, transposed": CastOperation("bf16", "e4m3", "row", static=True, transpose=True),
}
# Of x.T alone there is no kernel of ours: both orientations stand beside peers that write one.
ALONE = "1x128, x.T alone"
OPERATIONS[ALONE] = OPERATIONS["1x128, transposed"]
_OF_GROUPS = ("1x128, transposed", "row, transposed")
# Of rows in groups. Their peers are those of the same operation without groups.
GROUPED = {name: replace(OPERATIONS[name], offsets=True) for name in _OF_GROUPS}
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
    return [ours(calls), *_peers(name, calls, asked), *_others(operation, calls, moved, asked)]


def _peers(name: str, calls: Sequence[AnyCast], asked: Asked) -> list[Contender]:
    """What other libraries make of calls of an operation."""
    operation, peers = OPERATIONS[name], []
    first = 2 if name == ALONE else 0  # of the results q, scale, q of x.T and its scale
    if operation.rounding == "nearest":
        peers += [torchs(calls, first), torchs(calls, first, is_compiled=True)]
    if name in _KERNELS:
        peers.append(torchaos(calls, _KERNELS[name], first))
    return [one for one in peers if not asked.peers or one.name in asked.peers]


def _others(
    operation: CastOperation, calls: Sequence[AnyCast], moved: int, asked: Asked
) -> list[Contender]:
    """A copy of as many bytes, and each kernel that competes."""
    fitting = [spec for spec in asked.specs if spec.operation == operation]
    return [copy_of(moved, asked.device), *(ours(calls, spec.name, spec) for spec in fitting)]


def ours(
    calls: Sequence[AnyCast], name: str = "warploom", spec: KernelSpec | None = None
) -> Contender:
    """Warploom: as dispatched, or by one kernel."""

    def run(one: AnyCast) -> tuple[torch.Tensor, ...]:
        of_groups: Any = {} if one.offsets is None else {"offsets": one.offsets}
        return cast(
            one.x,
            one.dtype,
            block=one.block,
            transpose=one.transpose,
            scale=one.scale,
            scale_t=one.scale_t,
            rounding=one.rounding,
            rounding_state=one.rounding_state,
            amax=one.amax,
            spec=spec,
            **of_groups,
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

    def quantized(x: torch.Tensor, scales: reference.Scales) -> Results:
        q, own, q_t, scale_t = reference.cast(x, options, scales)
        q_t = None if q_t is None else q_t.contiguous()
        return (None, None, q_t, scale_t) if first else (q, own, q_t, scale_t)

    function = compiled(lambda: quantized) if is_compiled else quantized

    def run(one: AnyCast) -> Sequence[Any]:
        return function(one.x, _scales(one))[first:]

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
    return _largest(run(calls[0]), RUNTIME.expected(calls[0])[first:])


def _largest(results: Sequence[Any], expected: Sequence[torch.Tensor | None]) -> float:
    """The largest error of results, as a share of two steps of their types."""
    shares = [0.0]
    for one, other in zip(results, expected, strict=False):
        if other is not None:
            exact = other.double()
            step = 2.0**-22 if other.dtype == torch.float32 else 2.0**-3
            bound = 2 * step * exact.abs() + 2.0**-8 * (other.dtype.itemsize == 1)
            shares.append(largest_share(one, exact, bound))
    return max(shares)


def _scales(one: AnyCast) -> reference.Scales:
    """The scales of x and of x.T that are given."""
    if one.scale is None or one.scale.dim() == 2:
        return one.scale, one.scale_t
    return one.scale.reshape(1, 1), one.scale_t


# ---- Rows in groups ------------------------------------------------------------------------------


def grouped(_asked: Asked) -> Iterator[Case]:
    """The listed rows of experts, drawn evenly and by Zipf's law."""
    for name in GROUPED:
        for groups, m, n in cells()["cast"]["groups"]:
            for routed in ("even", "zipf"):
                shape = CastShape(m, n)
                ends = _routing.ends(m, groups, routed, 0)
                floor = Floor.of(0.0, _moved_of_groups(name, shape, ends))
                told = f"{name}, {groups} groups {routed}"
                about = {"m": m, "n": n, "type": "bf16", "operation": told}
                made = partial(_contenders_of_groups, name, shape, groups, routed)
                yield Case(f"{told}, {m}x{n}", about, floor, made)


def _moved_of_groups(name: str, shape: CastShape, ends: torch.Tensor) -> int:
    """The bytes of x, q and q of x.T, in which zeros are behind groups."""
    _, sizes = _routing.padded(ends, shape.m, COLUMNS)
    return _moved(name, shape) + (int(sizes.sum()) - shape.m) * shape.n


def _contenders_of_groups(
    name: str, shape: CastShape, groups: int, routed: Routed, asked: Asked
) -> list[Contender]:
    operation, seeds = GROUPED[name], iter(range(1 << 20))
    moved = _moved_of_groups(name, shape, _routing.ends(shape.m, groups, routed, 0))

    def drawn() -> AnyCast:
        x = normal((shape.m, shape.n), None, asked.device).bfloat16()
        ends = _routing.ends(shape.m, groups, routed, next(seeds)).to(asked.device)
        return call_of(x, torch.float8_e4m3fn, block=operation.block, transpose=True, offsets=ends)

    calls = rotated(drawn, moved, asked.device)
    padded, places = zip(*(_padded(one) for one in calls), strict=True)
    peers = [_of_groups(one, calls[0], places[0]) for one in _peers(name, padded, asked)]
    first = replace(ours(calls), error_share=partial(_share_of_groups, ours(calls), calls[0]))
    return [first, *peers, *_others(operation, calls, moved, asked)]


def _padded(one: AnyCast) -> tuple[AnyCast, torch.Tensor]:
    """The same rows with zeros behind groups, as a call without groups, and where rows are."""
    assert one.offsets is not None  # noqa: S101 (for type checkers)
    place, sizes = _routing.padded(one.offsets, one.x.shape[0], COLUMNS)
    x = one.x.new_zeros(int(sizes.sum()), one.x.shape[1])
    x[place] = one.x
    return call_of(x, one.dtype, block=one.block, transpose=True), place


def _of_groups(peer: Contender, given: AnyCast, place: torch.Tensor) -> Contender:
    """A library's function of padded rows, whose results must be those of groups."""
    share = partial(_share_of_groups, peer, given, place)
    return replace(peer, name=f"{peer.name}, rows padded before", error_share=share)


def _share_of_groups(peer: Contender, given: AnyCast, place: torch.Tensor | None = None) -> float:
    """The largest error of what the first call returns, without what is behind the last group.

    `place` says where the rows of x are in q and its scales; None: where they are in x.
    """
    found: Any = peer.calls[0]()
    right: Any = RUNTIME.expected(given)
    *expected, ends = right
    if place is None and not torch.equal(found[4], ends):
        return inf
    q, scale, q_t, scale_t = found[:4]
    if place is not None:
        q, scale = q.float()[place], scale[place]
    last = int(ends[-1])

    def counted(q_t: torch.Tensor, scale_t: torch.Tensor) -> Sequence[torch.Tensor]:
        return q_t[:, :last], scale_t[:, : max(1, last // COLUMNS)]

    results = [q, scale, *counted(q_t, scale_t)]
    return _largest(results, [*expected[:2], *counted(*expected[2:])])


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
    groups={
        "casts": Group("{kind}", cases, "{kind}", about="one and both orientations"),
        "groups": Group(
            "Casts of bf16 to e4m3, rows in groups that end at offsets on the device",
            grouped,
            listed=True,
        ),
    },
    grid=("casts",),
    kinds={"bf16": "Casts of bf16 to e4m3"},
    peers={name: name for name in ("torch", "torch.compile", "torchao")},
    called={"torch": "torch's operations", "torchao": "torchao's kernels"},
    axis=("M", "M, rows"),
    divided="blocks",
)
