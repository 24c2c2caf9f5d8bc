"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.cast import CastOperation, CastSchedule
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.cast.call import AnyCast, Details, call_of
from warploom.runtime.families.cast.family import FAMILY as RUNTIME
from warploom.runtime.families.cast.reference import Results

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
ON_CPU = 1 << 21  # values at most, of references that the CPU computes
TILE = CastSchedule(256)
BESIDE = 256  # elements on both sides of what is guarded


def spec(
    block: str = "1x128",
    schedule: CastSchedule | None = None,
    x: str = "bf16",
    q: str = "e4m3",
    **options: Any,
) -> KernelSpec:
    """A kernel, by the schedule that is given, or one that is legal."""
    operation = CastOperation(x, q, block, **options)  # type: ignore[arg-type]
    usual = TILE if operation.body == "tile" else CastSchedule(256, 2)
    return KernelSpec("sm_90a", operation, schedule or usual)


_SMOKE = [
    one for path in smoke() for one in expand_file(path).specs if one.operation.family == "cast"
]
_PLAIN = [one for one in _SMOKE if one.operation.gate == "none"]  # type: ignore[attr-defined]
SMOKE = [one for one in _PLAIN if not one.operation.offsets]  # type: ignore[attr-defined]
SQUARES = [
    spec(block, x=x, q=q, transpose=transpose, rounding=rounding)
    for block in ("1x128", "128x128", "tensor", "1x32", "row")
    for x, q in (("bf16", "e4m3"), ("fp32", "e5m2"), ("fp16", "int8"))
    for transpose in (False, True)
    for rounding in ("nearest", "stochastic")
    if (block, q) != ("1x32", "int8")
]
ROWS = [
    spec("row", CastSchedule(threads, vectors, reduce), x, q)  # type: ignore[arg-type]
    for threads, vectors, reduce in ((128, 1, "warp"), (256, 2, "cta"), (512, 1, "cta"))
    for x, q in (("bf16", "e4m3"), ("fp32", "e5m2"), ("fp16", "int8"))
]
STATIC = [
    spec(block, static=True, transpose=transpose, rounding=rounding)
    for block, transpose in (
        ("tensor", False),
        ("tensor", True),
        ("row", False),
        ("1x128", False),
        ("128x128", False),
        ("128x128", True),
    )
    for rounding in ("nearest", "stochastic")
]
POWERS = [
    spec("tensor", pow2=True, amax=True),
    spec("tensor", pow2=True, amax=True, transpose=True),
    spec("128x128", pow2=True),
    spec("1x128", CastSchedule(512, 4), pow2=True),
]
# Of relu every bit is right; other functions are off by what the fast units leave out.
GATES = [
    spec(block, x=x, q=q, transpose=True, pow2=block != "tensor", gate=gate, gradient=gradient)
    for block, x, q in (
        ("1x128", "bf16", "e4m3"),
        ("row", "fp16", "e4m3"),
        ("tensor", "bf16", "e5m2"),
        ("128x128", "bf16", "e4m3"),
    )
    for gate in ("relu", "silu", "gelu", "gelu_tanh")
    for gradient in (False, True)
]
# Of rows in groups, which only casts of both orientations have.
GROUPS = [
    spec(block, x=x, q=q, transpose=True, offsets=True, rounding=rounding)
    for block in ("1x128", "row", "tensor")
    for x, q in (("bf16", "e4m3"), ("fp32", "e5m2"), ("fp16", "int8"))
    for rounding in ("nearest", "stochastic")
] + [
    spec("1x128", transpose=True, offsets=True, pow2=True),
    spec("tensor", transpose=True, offsets=True, static=True, amax=True),
    spec("tensor", transpose=True, offsets=True, amax=True),
    spec("1x128", transpose=True, offsets=True, gate="relu"),
    spec("row", transpose=True, offsets=True, gate="relu", gradient=True),
    spec("tensor", transpose=True, offsets=True, gate="relu", gradient=True),
]
# Of given scales of x and of x.T.
GIVEN = [
    spec(block, x=x, q=q, static=True, transpose=True, rounding=rounding, offsets=offsets)
    for block in ("row", "1x128")
    for x, q in (("bf16", "e4m3"), ("fp32", "e5m2"), ("fp16", "int8"))
    for rounding in ("nearest", "stochastic")
    for offsets in (False, True)
] + [
    spec(block, static=True, transpose=True, gate="relu", gradient=gradient, offsets=offsets)
    for block, gradient, offsets in (
        ("1x128", False, False),
        ("row", True, False),
        ("1x128", True, True),
    )
]
EVERY = list({one.name: one for one in [*SMOKE, *SQUARES, *ROWS, *STATIC, *POWERS]}.values())


@dataclass
class Made:
    """A call of one kernel, whose results lie in rooms where every byte is 0xff."""

    call: AnyCast
    guarded: list[Guarded]

    def run(self) -> list[torch.Tensor]:
        """Run it on poisoned results, and return those that there are."""
        for one in self.guarded:
            one.room.fill_(-1)
        if self.call.amax is not None:
            self.call.amax.zero_()
        plan.run(self.call)
        return [one.view for one in self.guarded]

    def expected(self) -> list[torch.Tensor]:
        """What is right, by torch: on the CPU, but for large calls."""
        call = self.call
        if call.x.numel() <= ON_CPU:
            names = ["x", "scale", "scale_t", "rounding_state", "gradient"]
            names += ["offsets"] * (call.offsets is not None)
            moved = ((name, getattr(call, name)) for name in names)
            call = replace(call, **{n: None if t is None else t.cpu() for n, t in moved})
        return [one for one in RUNTIME.expected(call) if one is not None]

    def verify(self) -> list[torch.Tensor]:
        """Run it, and assert that each bit is right and that nothing else was written."""
        results, last = self.run(), self.last
        names = [
            n
            for n, is_computed in zip(self.call.outputs, self.call.computed(), strict=True)
            if is_computed
        ]
        for name, one, right in zip(names, results, self.expected(), strict=True):
            if self.call.offsets is not None:
                assert_unwritten(name, one, last, self.last_t)
                one, right = (of_groups(name, t, last, self.last_t) for t in (one, right))
            wrong = differ(one.cpu(), right.cpu())
            assert not wrong.any(), (name, int(wrong.sum()), wrong.nonzero()[:4].tolist())
        assert all(one.untouched_outside() for one in self.guarded)
        if self.call.amax is not None:
            assert self.call.amax.item() == self.call.x[:last].abs().max().item()
        return results

    @property
    def last(self) -> int:
        """The rows that count: all, or those of groups."""
        offsets = self.call.offsets
        return self.call.x.shape[0] if offsets is None else int(offsets.amax().clamp(min=0))

    @property
    def last_t(self) -> int:
        """The columns of x.T that groups of rows have."""
        assert self.call.offsets is not None
        lengths = self.call.offsets.diff(prepend=self.call.offsets.new_zeros(1))
        return 128 * int((lengths + 127).div(128, rounding_mode="floor").sum())


def of_groups(name: str, result: torch.Tensor, last: int, last_t: int) -> torch.Tensor:
    """What of a result groups have, of so many rows of x and columns of x.T."""
    if name in ("q", "scale"):
        return result[:last] if result.dim() else result
    if name == "scale_t" and result.dim() == 2 and result.shape[1] > 1:
        return result[:, : last_t // 128]
    return result[:, :last_t] if name == "q_t" else result


def assert_unwritten(name: str, result: torch.Tensor, last: int, last_t: int) -> None:
    """Rows of no group, and columns behind the last, are as they were."""
    rest = {"q": result[last:], "scale": result[last:]} if result.dim() else {}
    if name == "q_t":
        rest = {"q_t": result[:, last_t:]}
    elif name == "scale_t" and result.dim() == 2 and result.shape[1] > 1:
        rest = {"scale_t": result[:, last_t // 128 :]}
    if name in rest:
        one = rest[name].contiguous()
        assert (one.view(INTEGERS[one.dtype.itemsize]) == -1).all(), name


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Where two results have other bits; of NaN any are right."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    integer = INTEGERS[one.dtype.itemsize]
    wrong = one.contiguous().view(integer) != other.contiguous().view(integer)
    if one.dtype.is_floating_point:
        wrong &= ~(one.float().isnan() & other.float().isnan())
    return wrong


def guarded(like: torch.Tensor, pad: int, shift: int) -> Guarded:
    """A tensor like a new one, whose rows (or columns) are longer and begin `shift` elements on."""
    if like.dim() == 1:
        row = guarded(like[None], pad, shift)
        return Guarded(row.room, row.view[0], row.inside)
    rows, columns = like.shape if like.dim() else (1, 1)
    is_turned = like.dim() == 2 and like.stride(1) > like.stride(0)
    if is_turned:
        rows, columns = columns, rows
    pitch = -(-columns // 16) * 16 + pad
    size = 2 * BESIDE + rows * pitch + shift
    room = torch.full((size,), -1, dtype=INTEGERS[like.dtype.itemsize], device="cuda")
    inside = torch.zeros(size, dtype=torch.bool, device="cuda")
    down, across = torch.arange(rows, device="cuda"), torch.arange(columns, device="cuda")
    inside[down[:, None] * pitch + across + BESIDE + shift] = True
    view = room.view(like.dtype)[BESIDE + shift :].as_strided((rows, columns), (pitch, 1))
    return Guarded(room, view.t() if is_turned else view if like.dim() else view[0, 0], inside)


def padded(values: torch.Tensor, pad: int, shift: int) -> torch.Tensor:
    """The same values, in rows that are `pad` elements longer and begin `shift` elements on."""
    m, n = values.shape
    room = torch.empty(m * (n + pad) + shift, device="cuda", dtype=values.dtype)
    return room[shift:].view(m, n + pad)[:, :n].copy_(values)


def made(
    kernel: KernelSpec,
    m: int,
    n: int,
    *,
    pad: int = 0,
    shift: int = 0,
    seed: int = 0,
    layout: str = "column_major",
    ends: Sequence[int] | None = None,
) -> Made:
    """A call of a kernel; rows of x and of results are `pad` elements longer.

    Magnitudes differ from block to block, and the largest is the last. Rows are in groups that end
    at `ends`, or where it is drawn, if the kernel's are; those of no group are NaN.
    """
    operation: CastOperation = kernel.operation  # type: ignore[assignment]
    random = torch.Generator("cuda").manual_seed(seed + 7 * m + n)
    is_gate, gradient = operation.gate != "none", None
    columns = 2 * n if is_gate and not operation.gradient else n
    drawn = torch.randn(m, columns, generator=random, device="cuda")
    drawn *= torch.exp2(torch.randint(-9, 9, (m, 1), generator=random, device="cuda").float())
    drawn *= torch.exp2(torch.randint(-3, 3, (1, columns), generator=random, device="cuda").float())
    drawn[torch.rand(m, columns, generator=random, device="cuda") < 0.1] = 0
    drawn[-1, -1] = 30_000.0
    if is_gate:  # whose functions are steep near 0 alone
        drawn = drawn.clamp(-30, 30)
    x = padded(drawn.to(TORCH[operation.x]), pad, shift)
    if operation.gradient:
        of_result = torch.randn(m, n // 2, generator=random, device="cuda").to(x.dtype)
        gradient = padded(of_result, pad, shift)
    offsets = None
    if operation.offsets:
        if ends is None:
            drawn_ends = torch.randint(m + 1, (9,), generator=random, device="cuda").sort()[0]
            ends = drawn_ends.clamp(min=1).tolist()
        offsets = torch.tensor(ends, device="cuda", dtype=torch.int32)
        x[max(0, min(m, max(ends))) :] = torch.nan
    call = call_of(
        x,
        TORCH[operation.q],
        offsets=offsets,
        block=operation.block,
        transpose=operation.transpose,
        pow2=operation.pow2,
        rounding=operation.rounding,
        scale_layout=layout,
        gate=operation.gate if is_gate else None,
        gradient=gradient,
        spec=kernel,
    )
    if operation.static:
        for name, usual in zip(("scale", "scale_t"), call.results(Details(()))[1:4:2], strict=True):
            if usual is not None:
                scale = torch.rand(usual.shape, generator=random, device="cuda") + 0.01
                setattr(call, name, scale)
    if operation.rounding == "stochastic":
        call.rounding_state = torch.randint(
            2**62, (2,), generator=random, device="cuda", dtype=torch.int64
        )
    if operation.amax:
        call.amax = torch.zeros(1, device="cuda")
    blank: Results = call.results(Details(()))
    rooms = [None if one is None else guarded(one, pad, shift) for one in blank]
    for name, one in zip(call.declaration.results, rooms, strict=True):
        setattr(call, name, None if one is None else one.view)
    return Made(call, [one for one in rooms if one is not None])


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("cast_sm90a_")
