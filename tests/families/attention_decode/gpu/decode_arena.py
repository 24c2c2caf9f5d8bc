"""Calls of decode attention on guarded tensors: views into rooms of 0xff bytes, NaN in most types.

Only rows of caches that count are filled: all others, pages that no table names and what is past a
table's used entries are poison. `verify` is the check that most tests make: results within their
bounds of float64, nothing else written, nothing changed or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import decode_cases as cases
import torch
from attention_arena import assert_within
from decode_cases import Shape
from decode_operands import DEVICE, INTEGERS, SIZES, Making
from rooms import Guarded

import warploom
from warploom.generator.families.attention_decode import DecodeOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families.attention_decode import reference
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall
from warploom.runtime.families.attention_decode.extents import extents

Pair = tuple[torch.Tensor, torch.Tensor]
# What rows hold that do not count: NaN, and the largest that a type has.
POISON = {"bf16": (-1, 0x7F80), "fp16": (-1, 0x7C00), "e4m3": (-1, 0x7E), "int8": (127, -128)}
# Of all elements together: a probability is rounded to the type of q, and so is the result. One key
# of a few thousand, left out or counted twice, makes more.
SPREAD = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-8}


@dataclass
class Call:
    """Everything that one call is given. `used`: which rows of the cache count, [entries, rows],
    of packed keys [total].
    """

    spec: KernelSpec | None
    shape: Shape
    q: Guarded
    k: Guarded
    v: Guarded
    out: Guarded
    used: torch.Tensor
    keywords: dict[str, Any] = field(default_factory=dict)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as they are passed: [.., heads, rows, dim], packed [total, heads, dim]."""
        return self.q.view, self.k.view, self.v.view

    def run(self) -> Pair:
        """Run the kernel; return out and lse."""
        given = {"out": self.out.view, "spec": self.spec, **self.keywords}
        found: Pair = warploom.attention_decode(*self.tensors, return_lse=True, **given)
        return found

    def reference(self, compute: reference.Attention) -> Pair:
        """What a function of the reference makes of the operands, without what is poison."""
        clean = replace(
            self,
            k=replace(self.k, view=self.k.view.clone()),
            v=replace(self.v, view=self.v.view.clone()),
            keywords={
                name: one.clone() if name.startswith("scale_") else one
                for name, one in self.keywords.items()
            },
        )
        poison(clean, 0, 1.0)
        call = AttentionDecodeCall(*clean.tensors, **clean.keywords)
        sizes = extents(call)
        return reference.of_call(call, sizes, band(call.plain, sizes), compute)

    def rooms(self) -> list[torch.Tensor]:
        """All that is read."""
        lists = (one for one in self.keywords.values() if isinstance(one, torch.Tensor))
        return [self.q.room, self.k.room, self.v.room, *lists]


def call(
    kernel: KernelSpec | None,
    shape: Shape,
    *,
    lengths: Sequence[int] | None = None,
    seed: int = 0,
    of: DecodeOperation | None = None,
    heads_first: bool | None = None,
    size: float = 1.0,
    **keywords: Any,
) -> Call:
    """Make a call of a kernel, or of an operation, on random data.

    heads_first: pages, or sequences, lie as [kv_heads, rows, dim], else as [rows, kv_heads, dim];
    by default the seed says.
    """
    operation = of or cases.of(kernel)  # type: ignore[arg-type]
    lengths = cases.lengths(shape, seed) if lengths is None else lengths
    made = Making(operation, shape, list(lengths), seed, heads_first)
    k, v = made.cache(), made.cache()
    q = made.queries()
    values = made.normal(*q.view.shape) * size
    if operation.queries == "fixed":
        values = values.transpose(1, 2)
    made_call = Call(
        kernel,
        shape,
        Guarded(q.room, _turned(q.view), q.inside),
        *(Guarded(one.room, made.seen(one.view), one.inside) for one in (k, v)),
        (lambda one: Guarded(one.room, _turned(one.view), one.inside))(made.queries()),
        made.used,
        {**made.options(), **keywords},
    )
    made_call.q.view.copy_(values)
    fill(made_call, operation, seed)
    return made_call


def _turned(view: torch.Tensor) -> torch.Tensor:
    """Rows of queries as they are passed: heads first where lengths are fixed."""
    return view.transpose(1, 2) if view.dim() == 4 else view


def fill(made: Call, operation: DecodeOperation, seed: int, which: int = 0) -> None:
    """Fill the cache with normal numbers, and poison what does not count: NaN, or infinity."""
    draws = torch.Generator(DEVICE).manual_seed(seed + 1)
    name = operation.element if operation.cache == "same" else operation.cache
    for one in (made.k.view, made.v.view):
        values = torch.randn(one.shape, generator=draws, device=DEVICE)
        values *= SIZES.get(name, 1.0)
        one.copy_(values.clamp_(-127, 127) if name == "int8" else values)
    poison(made, POISON[name][which])


def poison(made: Call, code: int, scale: float = torch.nan) -> None:
    """Put the bits of `code` where rows of caches do not count, and `scale` where scales do not."""
    hidden = ~made.used
    for one in (made.k.view, made.v.view):
        rows = one.view(INTEGERS[one.element_size()])
        (rows if rows.dim() == 3 else rows.transpose(1, 2))[hidden] = code
    for one in (made.keywords.get("scale_k"), made.keywords.get("scale_v")):
        if one is not None and one.dim() == made.k.view.dim() - 1 and one.dim() > 1:
            (one if one.dim() == 2 else one.transpose(1, 2))[hidden] = scale


def plant(made: Call, chosen: torch.Tensor) -> None:
    """Give one key of each sequence and kv head, [batch, kv_heads], nearly all of the weight.

    It is q of the head's first row, so that of the other rows each has a weight of its own.
    """
    q, k, _ = made.tensors
    shape, table = made.shape, made.keywords.get("page_table")
    packed_q, packed_k = made.keywords.get("cu_seqlens_q"), made.keywords.get("cu_seqlens_k")
    for index in range(shape.batch):
        for head in range(shape.kv_heads):
            at = int(chosen[index, head])
            row = min(int(packed_q[index]), len(q) - 1) if packed_q is not None else 0
            first = q[row] if packed_q is not None else q[index, :, 0]
            wanted = 3 * first[head * shape.group].float()
            place: tuple[int, ...] = (index, head, at)
            if packed_k is not None:
                place = (int(packed_k[index]) + at, head)
            elif table is not None:
                page = k.shape[2]
                place = (int(table[index, at // page]), head, at % page)
            if k.dtype.itemsize == 1:
                scale = made.keywords["scale_k"]  # of all, of heads, or of tokens
                own = scale if scale.dim() == 0 else scale[head if scale.dim() == 1 else place]
                wanted = (wanted / own).clamp(-100, 100)
            k[place] = wanted.to(k.dtype)


# ---- Checks --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What is right of out and lse, and how far off each may be."""

    exact: Pair
    bound: Pair


def expected(made: Call) -> Expected:
    """Compute both in float64."""
    return Expected(made.reference(reference.exact), made.reference(reference.bound))


def assert_right(made: Call, found: Pair, wanted: Expected | None = None) -> None:
    """Assert that every element is within its bound, and all together within what they are like.

    Rows past the last packed sequence are nobody's.
    """
    wanted = wanted or expected(made)
    last = None
    if (ends := made.keywords.get("cu_seqlens_q")) is not None:
        last = int(ends[-1])
    for name, one, exact, bound in zip(
        ("out", "lse"), found, wanted.exact, wanted.bound, strict=True
    ):
        rows: Any = ... if last is None else slice(last) if name == "out" else (..., slice(last))
        assert_within(name, one[rows], exact[rows], bound[rows])
    out, exact_out = found[0][:last].double(), wanted.exact[0][:last]
    together = (out - exact_out).norm() / exact_out.norm().clamp_min(1e-30)
    assert together <= SPREAD[found[0].dtype], f"out is {float(together):.3g} off, all together"


def verify(made: Call, *, clock: AbstractContextManager[object] | None = None) -> Pair:
    """Run a call; assert its results right, nothing else written, no operand changed or copied.

    Only the call is made within `clock`.
    """
    wanted = expected(made)
    before = [room.clone() for room in made.rooms()]
    copies = warploom.counters.copies
    made.out.room.fill_(-1)
    with clock or nullcontext():
        found = made.run()
    assert found[0] is made.out.view
    assert warploom.counters.copies == copies
    assert_right(made, found, wanted)
    assert made.out.untouched_outside()
    assert all(map(same_bits, made.rooms(), before))
    return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have the same bits: NaN is NaN."""
    kind = INTEGERS.get(one.element_size(), one.dtype)
    return torch.equal(one.view(kind), other.view(kind))


def bits(made: Call, times: int = 1) -> Pair:
    """Results of the last of some runs, copied."""
    runs: Callable[[], Pair] = made.run
    for _ in range(times):
        found = runs()
    return found[0].clone(), found[1].clone()
