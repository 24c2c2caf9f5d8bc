"""D = epilogue(A B) on torch tensors: look the call's plan up, or make it, and launch.

A call is looked up by everything but addresses and scalar values; only a miss checks, chooses a
kernel and copies what TMA cannot read. Nothing here waits for the GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Unpack, cast

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.launches import DeviceLimits
from warploom.runtime import dispatch, driver, targets
from warploom.runtime.alike import alike
from warploom.runtime.counters import counters, launch_numbers
from warploom.runtime.decision import Choice
from warploom.runtime.elements import name_of
from warploom.runtime.families.gemm import epilogue, reference
from warploom.runtime.families.gemm.epilogue import Item, Keywords
from warploom.runtime.families.gemm.operands import Copy, check_apart, named, refuse_grad
from warploom.runtime.families.gemm.problem import CheckedCall, Options, check_call
from warploom.runtime.plan import Launches, LaunchPlan, described, plan_launches, remember
from warploom.runtime.tensors import (
    WithoutMemoryError,
    explained,
    refuse_dual,
    require_memory,
    require_tensors,
)

Launch = Callable[[], tuple[object, ...]]  # returns the driver's status first, 0 being success

_BOUND = 4096  # problems remembered
_READY = 1 << 14  # calls of plans remembered, over all plans, by addresses and stream
_plans: dict[tuple[object, ...], GemmPlan] = {}
_ready: dict[tuple[int, ...], tuple[Callable[..., bool], Launch]] = {}
_numbers = itertools.count()

os.register_at_fork(after_in_child=_ready.clear)
os.register_at_fork(after_in_child=_plans.clear)  # a forked call is planned anew, and so refused


@dataclass
class GemmPlan:
    """What a kind of call needs: its kernel and launch, and which operands are copied first.

    `plan(a, b, out, ...)` runs it for tensors of the planned shapes, strides and types; it is what
    `warploom.gemm` itself runs after looking the plan up.
    """

    key: tuple[object, ...]
    out_shape: tuple[int, ...]
    out_dtype: torch.dtype
    launch: LaunchPlan | None  # None on the CPU, and where an extent is 0
    copy_a: Copy | None  # where TMA cannot read it
    copy_b: Copy | None
    choice: Choice
    _device: int = -1
    _number: int = field(default_factory=_numbers.__next__)  # of no other plan of the process

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        **keywords: Unpack[Keywords],
    ) -> torch.Tensor:
        """Run the plan with the keywords that it was made with, and tensors like those."""
        key = None
        dual = forward_ad._current_level >= 0
        if out is not None and self._device >= 0 and not (keywords or dual):
            stream = driver.current_stream(self._device)
            key = (self._number, a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
            ready = _ready.get(key)
            if ready is not None:
                fits, launch = ready
                if fits(a, b, out) and not launch()[0]:
                    next(launch_numbers)
                    return out
        listed = epilogue.items(**keywords) if keywords else ()
        if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            # They import this module.
            from warploom.runtime.families.gemm import operators

            return operators.call(a, b, listed, out, *cast("Options", self.key[-1]))
        self._require(a, b, out, listed)
        if torch.is_grad_enabled():
            refuse_grad(a, b, out, listed)
        if dual:
            refuse_tangents(a, b, out, listed)
        if out is None:
            out = a.new_empty(self.out_shape, dtype=self.out_dtype)
        launches = self.run(a, b, out, listed)
        if key is not None and self._repeatable and not launches[0].roams:
            remember(_ready, key, (alike(a, b, out), launches[0].launch), _READY)
        return out

    def __repr__(self) -> str:
        result = f"{list(self.out_shape)} {name_of(self.out_dtype, 'out')}"
        return described("GemmPlan", result, self.choice.spec, self.launch, self.copies)

    @property
    def copies(self) -> tuple[str, ...]:
        """The operands that are copied first, since TMA cannot read them."""
        return copied(self)

    @property
    def _repeatable(self) -> bool:
        """True when a call is one launch and nothing else: no copies, no workspaces."""
        launch = self.launch
        alone = launch is not None and len(launch.launches) == 1 and not launch.workspaces
        return alone and not (self.copy_a or self.copy_b)

    def _require(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
    ) -> None:
        options = cast("Options", self.key[-1])
        try:
            key = signature(a, b, out, listed, options)
        except Exception as error:
            raise explained(error, require_kinds, a, b, out, listed) from error.__cause__
        if key != self.key:
            raise ProblemError(
                f"a {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype}",
                rule="a plan runs only what it was made for: shapes, strides, types, alignment",
                fix="call warploom.plan again, or warploom.gemm",
            )

    def run(
        self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor, listed: Sequence[Item]
    ) -> Launches:
        """Launch on tensors that are known to fit; on the CPU, and without products, compute."""

        def check() -> None:
            require_memory(named(a, b, out, listed))
            check_apart(out, a, b, listed)
            epilogue.check_finite(listed)

        if self.launch is None:
            check()
            with torch.no_grad(), torch.autocast(out.device.type, enabled=False):
                out.copy_(reference.gemm(a, b, listed, self.out_dtype))
            return ()
        if self.copy_a or self.copy_b:
            require_memory((("a", a), ("b", b)))  # torch copies from address 0 too
        read_a = self.copy_a(a) if self.copy_a else a
        read_b = self.copy_b(b) if self.copy_b else b
        addresses = (read_a.data_ptr(), read_b.data_ptr(), out.data_ptr())
        if not listed:
            return self.launch.run(addresses, (), check)
        addresses_listed = (*addresses, *epilogue.addresses(listed))
        return self.launch.run(addresses_listed, epilogue.scalars(listed), check)


def copied(call: GemmPlan | CheckedCall) -> tuple[str, ...]:
    """The operands that a call copies first."""
    return tuple(name for name, layout in (("a", call.copy_a), ("b", call.copy_b)) if layout)


def signature(
    a: torch.Tensor,
    b: torch.Tensor,
    out: torch.Tensor | None,
    listed: Sequence[Item],
    options: Options,
) -> tuple[object, ...]:
    """Everything that decides the plan: all but addresses (their alignment counts) and scalars."""
    return (
        a.shape,
        a.stride(),
        a.dtype,
        a.data_ptr() & 15,
        a.get_device(),
        b.shape,
        b.stride(),
        b.dtype,
        b.data_ptr() & 15,
        b.get_device(),
        None
        if out is None
        else (out.shape, out.stride(), out.dtype, out.data_ptr() & 15, out.get_device()),
        epilogue.signature(listed) if listed else (),
        options,
    )


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
) -> torch.Tensor:
    """Run the planned call, planning it first when it is new."""
    key = signature(a, b, out, listed, options)
    planned = _plans.get(key)
    if planned is None:
        planned = plan(a, b, listed, out, options)
    if torch.is_grad_enabled():
        refuse_grad(a, b, out, listed)
    if out is None:
        out = a.new_empty(planned.out_shape, dtype=planned.out_dtype)
    planned.run(a, b, out, listed)
    return out


def refuse_tangents(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> None:
    """Raise ProblemError for tensors that carry a forward-mode derivative."""
    epilogue.check_items(listed)
    refuse_dual("warploom.gemm", (a, b, out, *(item[1] for item in listed)))


def require_kinds(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> None:
    """Raise ProblemError for arguments that are of no type that they may have."""
    epilogue.check_items(listed)
    require_tensors("warploom.gemm", named(a, b, out, listed))


def plan(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
) -> GemmPlan:
    """Check a call, choose its kernel, load it, and remember the plan."""
    key = signature(a, b, out, listed, options)
    planned = _make(key, a, b, listed, out, options)
    counters.add("plans")
    remember(_plans, key, planned, _BOUND)
    return planned


def draft(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
    target: DeviceLimits,
) -> tuple[CheckedCall, Choice]:
    """Check a call and choose its kernel for a GPU; nothing is built, and no driver asked.

    Of the tensors only what decides a plan is used: they may be on any device, also `meta`.
    """
    checked = check_call(a, b, listed, out, options)
    choice = dispatch.choose(
        checked.operation,
        checked.shape,
        spec=options.spec,
        device=target,
        requires=checked.store,
    )
    return checked, choice


def _make(
    key: tuple[object, ...],
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    options: Options,
) -> GemmPlan:
    device = a.get_device()
    target = targets.at_hand(device)
    require_kinds(a, b, out, listed)
    try:
        require_memory(named(a, b, out, listed))
    except WithoutMemoryError:
        draft(a, b, listed, out, options, target)  # which may find more to say
        raise
    checked, choice = draft(a, b, listed, out, options, target)
    if torch.is_grad_enabled():
        refuse_grad(a, b, out, listed)
    problem, bound, launch = checked.problem, checked.epilogue, None
    if device >= 0 and not checked.empty:
        tensors = ("a", "b", "d", *bound.tensors)
        launch = plan_launches(choice.spec, problem, device, tensors, bound.scalars)
    return GemmPlan(
        key=key,
        out_shape=checked.out_shape,
        out_dtype=checked.out_dtype,
        launch=launch,
        copy_a=checked.copy_a,
        copy_b=checked.copy_b,
        choice=choice,
        _device=device,
    )
