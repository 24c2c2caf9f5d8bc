"""Calls of attention on guarded tensors: views into rooms of 0xff bytes, NaN in every float type.

`verify` is the check that most tests make: both results within their bounds of float64, no further
from it than twice the plain torch expression, nothing else written, nothing changed or copied.
All that they are held against is computed before the kernel runs, so that a clock may be put on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import attention_cases as cases
import torch
from attention_cases import Shape
from rooms import Guarded

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention import reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families._attention.samples import further

_ROOM = 8  # elements on each side of a row: 16 bytes
Pair = tuple[torch.Tensor, torch.Tensor]


def guarded(shape: tuple[int, ...], dtype: torch.dtype, *, turned: bool = False) -> Guarded:
    """Return an unfilled view of `shape` with a row and 16 bytes of room on every side.

    The view is [batch, heads, seq, dim], in memory so or, where `turned`, [batch, seq, heads, dim];
    or packed [total, heads, dim].
    """
    if len(shape) == 3:
        total, heads, dim = shape
        rooms: tuple[int, ...] = (total + 2, heads, dim + 2 * _ROOM)
    elif turned:
        batch, heads, seq, dim = shape
        rooms = (batch, seq + 2, heads, dim + 2 * _ROOM)
    else:
        batch, heads, seq, dim = shape
        rooms = (batch, heads, seq + 2, dim + 2 * _ROOM)
    room = torch.full(rooms, -1, dtype=torch.int16, device="cuda")
    inside = torch.zeros(rooms, dtype=torch.bool, device="cuda")
    seq_at = {3: 0, 4: 1 if turned else 2}[len(shape)]

    def inner(tensor: torch.Tensor) -> torch.Tensor:
        view = tensor.narrow(seq_at, 1, tensor.shape[seq_at] - 2)
        view = view[..., _ROOM : tensor.shape[-1] - _ROOM]
        return view.transpose(1, 2) if turned and len(shape) == 4 else view

    inner(inside).fill_(True)
    return Guarded(room, inner(room.view(dtype)), inside)


@dataclass
class Call:
    """Everything that one call of attention is given."""

    spec: KernelSpec | None
    q: Guarded
    k: Guarded
    v: Guarded
    out: Guarded
    keywords: dict[str, Any]

    @property
    def given(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The operands."""
        return self.q.view, self.k.view, self.v.view

    @property
    def last_row(self) -> int | None:
        """Where the last packed sequence ends; None where lengths are fixed."""
        offsets = self.keywords.get("cu_seqlens_q")
        return None if offsets is None else int(offsets[-1])

    def run(self) -> Pair:
        """Run the kernel; return out and lse."""
        keywords = {"spec": self.spec, "out": self.out.view, **self.keywords}
        return warploom.attention(*self.given, return_lse=True, **keywords)

    def reference(self, compute: reference.Attention) -> Pair:
        """What a function of the reference makes of the operands."""
        call = Arguments(*self.given, **self.keywords)
        return reference.of_call(call, band(call, extents(call)), compute)


def call(
    kernel: KernelSpec | None,
    shape: Shape,
    *,
    dim: int = 0,
    dim_v: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    turned: bool = False,
    size: float = 1.0,
    seed: int = 0,
    **keywords: Any,
) -> Call:
    """Make a call of fixed lengths on fresh random data; type and dims are the kernel's if any."""
    if kernel is not None:
        dtype = TORCH[cases.operation(kernel).element]
        dim = dim or cases.operation(kernel).dim
        dim_v = dim_v or cases.operation(kernel).dim_v
        keywords = {
            **told(kernel, (shape.batch, shape.heads, shape.seq_q, shape.seq_k), seed),
            **keywords,
        }
    rows = (shape.batch, shape.heads, shape.seq_q, dim)
    columns = (shape.batch, shape.kv_heads, shape.seq_k, dim)
    values, out = ((*extent[:-1], dim_v or dim) for extent in (columns, rows))
    made = Call(
        kernel,
        *(guarded(extent, dtype, turned=turned) for extent in (rows, columns, values, out)),
        keywords,
    )
    fill(made, seed, size)
    return made


def packed(
    kernel: KernelSpec | None,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    heads: int = 4,
    kv_heads: int = 2,
    past: int = 0,
    seed: int = 0,
    dim: int = 64,
    dim_v: int = 0,
    **keywords: Any,
) -> Call:
    """Make a call of packed lengths; `past` rows at the end belong to no sequence: NaN."""
    dtype = torch.bfloat16
    if kernel is not None:
        dtype, dim = TORCH[cases.operation(kernel).element], cases.operation(kernel).dim
        dim_v = cases.operation(kernel).dim_v
        longest = (len(lengths_q), heads, max(lengths_q), max(lengths_k))
        keywords = {**told(kernel, longest, seed), **keywords}
    offsets_q, offsets_k = (
        torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        for lengths in (lengths_q, lengths_k)
    )
    rows, columns = (
        (sum(lengths_q) + past, heads, dim),
        (sum(lengths_k) + past, kv_heads, dim),
    )
    keywords |= {
        "cu_seqlens_q": offsets_q,
        "cu_seqlens_k": offsets_k,
        "max_seqlen_q": max(lengths_q),
        "max_seqlen_k": max(lengths_k),
    }
    values, out = ((*extent[:-1], dim_v or dim) for extent in (columns, rows))
    made = Call(
        kernel, *(guarded(extent, dtype) for extent in (rows, columns, values, out)), keywords
    )
    fill(made, seed)
    if past:
        for operand in made.given:
            operand[-past:] = torch.nan
    return made


def told(kernel: KernelSpec, scores: tuple[int, int, int, int], seed: int) -> dict[str, Any]:
    """What a kernel's calls are given beside q, k, v, lengths and the mask."""
    operation = cases.operation(kernel)
    random = torch.Generator("cuda").manual_seed(seed + 2)
    found: dict[str, Any] = dict(further(operation, scores, "cuda", random))
    return {"softcap": 3.0, **found} if operation.softcap else found


def fill(made: Call, seed: int, size: float = 1.0) -> None:
    """Fill q, k and v with normal numbers; q and k times `size`."""
    generator = torch.Generator("cuda").manual_seed(seed)
    for operand, factor in zip(made.given, (size, size, 1.0), strict=True):
        values = torch.randn(operand.shape, generator=generator, device="cuda")
        operand.copy_((values * factor).to(operand.dtype))


# ---- Checks --------------------------------------------------------------------------------------


def assert_within(name: str, found: torch.Tensor, exact: torch.Tensor, bound: torch.Tensor) -> None:
    """Assert that every element is within its bound; say where it is not."""
    wide = found.double()
    wrong = ~((wide == exact) | ((wide - exact).abs() <= bound))
    if not wrong.any():
        return
    places = wrong.nonzero()
    first = tuple(places[0].tolist())
    spans = [f"{int(p.min())}..{int(p.max())}" for p in places.T]
    raise AssertionError(
        f"{len(places)} of {found.numel()} elements of {name} {list(found.shape)} are wrong, in "
        f"[{', '.join(spans)}]; first {list(first)}: {found[first].item()} is not "
        f"{exact[first].item()} +- {bound[first].item()}"
    )


def expectations(made: Call) -> list[Pair]:
    """What is right, how far off it may be, and what plain torch makes of it; nothing if empty."""
    if made.q.view.numel() == 0 or made.k.view.numel() == 0:
        return []
    return [made.reference(f) for f in (reference.exact, reference.bound, reference.plain)]


def assert_right(
    made: Call,
    out: torch.Tensor,
    lse: torch.Tensor,
    *,
    beside_plain: bool = True,
    computed: Sequence[Pair] | None = None,
) -> None:
    """Assert that out and lse are within their bounds, and within twice the plain expression's.

    `computed` are the expectations, where they are there already.
    """
    computed = expectations(made) if computed is None else computed
    if not computed:
        assert (out == 0).all()
        assert (lse == -torch.inf).all()
        return
    for name, found, *others in zip(("out", "lse"), (out, lse), *computed, strict=True):
        if made.last_row is not None:  # packed: what lies past it is nobody's
            rows = slice(made.last_row) if name == "out" else (..., slice(made.last_row))
            found, *others = (tensor[rows] for tensor in (found, *others))
        wanted, allowed, theirs = others
        assert_within(name, found, wanted, allowed)
        shown = wanted.isfinite()
        if not (beside_plain and shown.any()):
            continue
        ours, peer = (((t.double() - wanted)[shown]).abs().max().item() for t in (found, theirs))
        assert ours <= 2 * peer + reference.ulp(found.dtype, wanted[shown].abs().max().item()), name


def verify(
    made: Call,
    *,
    beside_plain: bool = True,
    clock: AbstractContextManager[object] | None = None,
) -> Pair:
    """Run a call; assert its results right, nothing else written, no operand changed or copied.

    Only the call is made within `clock`.
    """
    computed = expectations(made)
    operands = (made.q, made.k, made.v)
    before = [operand.room.clone() for operand in operands]
    copies = warploom.counters.copies
    with clock or nullcontext():
        out, lse = made.run()
    assert out is made.out.view
    assert warploom.counters.copies == copies
    assert_right(made, out, lse, beside_plain=beside_plain, computed=computed)
    assert made.out.untouched_outside()
    assert all(torch.equal(now.room, then) for now, then in zip(operands, before, strict=True))
    return out, lse


def with_kernel(made: Call, kernel: KernelSpec) -> Call:
    """The same call by another kernel."""
    return replace(made, spec=kernel)
