"""Backward passes on guarded tensors: views into rooms of 0xff bytes, NaN in every float type.

Gradients go into such views, too. What the forward pass would leave, out and lse, comes from
float64, so that what is tested is the backward pass alone. `verify` is the check of most tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import attention_arena as arena
import torch
from attention_cases import Shape
from rooms import Guarded

import warploom
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention import reference as forward_reference
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.modifiers import Sinks
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.arguments import room_of_ds
from warploom.runtime.families.attention_backward.call import BackwardCall, attention_backward
from warploom.runtime.families.attention_backward.reference import Gradients

NAMES = ("dq", "dk", "dv")


@dataclass
class Pass:
    """Everything that one backward pass is given."""

    forward: arena.Call  # q, k, v, out and keywords; its spec is the backward kernel
    lse: torch.Tensor
    dout: Guarded
    gradients: tuple[Guarded, Guarded, Guarded]
    dlse: torch.Tensor | None = None
    dsinks: torch.Tensor | None = None
    ds: torch.Tensor | None = None

    @property
    def call(self) -> BackwardCall:
        """The call, which puts gradients where they are guarded."""
        forward = self.forward
        arguments = Arguments(*forward.given, **forward.keywords, backward_spec=forward.spec)
        dq, dk, dv = (one.view for one in self.gradients)
        results = (forward.out.view, self.lse, self.dout.view, self.dlse)
        return BackwardCall(arguments, *results, (dq, dk, dv), self.dsinks, self.ds)

    @property
    def read(self) -> tuple[torch.Tensor, ...]:
        """All that the kernels read, with the rooms that it lies in."""
        forward = self.forward
        guarded = (forward.q, forward.k, forward.v, forward.out, self.dout)
        rows = (self.lse,) if self.dlse is None else (self.lse, self.dlse)
        state = forward.keywords.get("dropout_state")
        states = () if state is None else (state,)
        rooms = (one.room for one in guarded)
        return (*rooms, *(one.view(torch.int32) for one in rows), *states)

    def run(self) -> Gradients:
        """Run the kernels; return dq, dk and dv."""
        return attention_backward(self.call)

    def reference(self, compute: reference.Backward) -> Gradients:
        """What a function of the reference makes of the operands."""
        call = self.call
        return reference.of_call(call, band(call.forward, extents(call.forward)), compute)


def _pass(forward: arena.Call, seed: int, *, turned: bool, dlse: bool) -> Pass:
    q, k, v = forward.given
    like = (forward.out.view, q, k, v)
    dout, *gradients = (arena.guarded(tuple(t.shape), q.dtype, turned=turned) for t in like)
    lead = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    lse = torch.empty(lead, device="cuda")
    made = Pass(
        forward,
        lse,
        dout,
        (gradients[0], gradients[1], gradients[2]),
        torch.empty_like(lse) if dlse else None,
        torch.empty_like(forward.keywords["sinks"]) if "sinks" in forward.keywords else None,
    )
    fill(made, seed)
    if forward.spec is not None and cast("Any", forward.spec.operation).bias_gradient:
        made.ds = room_of_ds(made.call.forward)
    return made


def make(
    kernel: KernelSpec | None,
    shape: Shape,
    *,
    turned: bool = False,
    size: float = 1.0,
    seed: int = 0,
    dlse: bool = False,
    **others: Any,
) -> Pass:
    """Make a pass of fixed lengths on fresh random data; type and dim are the kernel's if any."""
    forward = arena.call(kernel, shape, turned=turned, size=size, seed=seed, **others)
    return _pass(forward, seed, turned=turned, dlse=dlse)


def packed(
    kernel: KernelSpec | None,
    lengths_q: list[int],
    lengths_k: list[int],
    *,
    seed: int = 0,
    dlse: bool = False,
    **others: Any,
) -> Pass:
    """Make a pass of packed lengths; rows that belong to no sequence are NaN."""
    forward = arena.packed(kernel, lengths_q, lengths_k, seed=seed, **others)
    return _pass(forward, seed, turned=False, dlse=dlse)


def fill(made: Pass, seed: int) -> None:
    """Fill out and lse with the exact results for q, k and v, and their gradients with noise."""
    generator = torch.Generator("cuda").manual_seed(seed + 1)
    out, lse = made.forward.reference(forward_reference.exact)
    made.forward.out.view.copy_(out)
    made.lse.copy_(lse)
    for noise in (made.dout.view, made.dlse):
        if noise is not None:
            values = torch.randn(noise.shape, generator=generator, device="cuda")
            noise.copy_(values.to(noise.dtype))
    last = made.forward.last_row
    if last is not None:  # packed: what lies past it is nobody's
        made.forward.out.view[last:] = made.dout.view[last:] = torch.nan
        made.lse[:, last:] = torch.nan
        if made.dlse is not None:
            made.dlse[:, last:] = torch.nan


# ---- Checks --------------------------------------------------------------------------------------


def expectations(made: Pass) -> list[Gradients]:
    """What is right, how far off it may be, and what autograd makes of the plain expression."""
    return [made.reference(f) for f in (reference.exact, reference.bound, reference.plain)]


def assert_right(
    made: Pass,
    found: Gradients,
    *,
    beside_plain: bool = True,
    computed: Sequence[Gradients] | None = None,
) -> None:
    """Assert that gradients are within their bounds, and within twice the plain expression's.

    `computed` are the expectations, where they are there already.
    """
    computed = expectations(made) if computed is None else computed
    for name, one, wanted, allowed, theirs in zip(NAMES, found, *computed, strict=True):
        arena.assert_within(name, one, wanted, allowed)
        if not (beside_plain and one.numel()):
            continue
        ours, peer = ((t.double() - wanted).abs().max().item() for t in (one, theirs))
        # It rounds nothing where each row attends to one column: there gradients of q and k are
        # differences of equal numbers, which the bound alone is for.
        if peer > 0:
            ulp = forward_reference.ulp(one.dtype, wanted.abs().max().item())
            assert ours <= 2 * peer + ulp, f"{name} is off by {ours}, the plain one by {peer}"


def assert_sinks_right(made: Pass) -> None:
    """Assert that the gradient of sinks, if there are any, is within its bound."""
    if made.dsinks is None:
        return
    rows = reference.row_sums(made.call, torch.float64)
    sinks = Sinks(made.forward.keywords["sinks"])
    exact, allowed = sinks.column_gradient(rows), sinks.column_gradient_bound(rows)
    arena.assert_within("dsinks", made.dsinks, exact, allowed)


def assert_ds_right(made: Pass) -> None:
    """Assert that the gradients of scores, if they are written, are within their bounds."""
    if made.ds is None:
        return
    call = made.call
    masked = band(call.forward, extents(call.forward))
    exact, allowed = (
        reference.ds_of_call(call, masked, compute)
        for compute in (reference.exact_ds, reference.ds_bound)
    )
    arena.assert_within("ds", made.ds, exact, allowed)


def verify(
    made: Pass,
    *,
    beside_plain: bool = True,
    clock: AbstractContextManager[object] | None = None,
) -> Gradients:
    """Run a pass; assert its gradients right, nothing else written, nothing read changed or copied.

    Where they lie, every gradient was NaN before. Only the pass is made within `clock`.
    """
    computed = expectations(made)
    if made.dsinks is not None:
        made.dsinks.fill_(torch.nan)
    before = [tensor.clone() for tensor in made.read]
    copies = warploom.counters.copies
    for one in made.gradients:
        one.room.fill_(-1)
    with clock or nullcontext():
        found = made.run()
    assert all(one is guarded.view for one, guarded in zip(found, made.gradients, strict=True))
    assert warploom.counters.copies == copies
    assert_right(made, found, beside_plain=beside_plain, computed=computed)
    assert_sinks_right(made)
    assert_ds_right(made)
    for name, guarded in zip(NAMES, made.gradients, strict=True):
        assert guarded.untouched_outside(), name
    assert all(torch.equal(now, then) for now, then in zip(made.read, before, strict=True))
    return found


def clones(found: Gradients) -> Gradients:
    """Gradients as they are now."""
    dq, dk, dv = (one.clone() for one in found)
    return dq, dk, dv


def with_kernel(made: Pass, kernel: KernelSpec) -> Pass:
    """The same pass by another kernel."""
    return replace(made, forward=replace(made.forward, spec=kernel))
