"""D = epilogue(A B) on torch tensors: look the call's plan up, or make it, and launch."""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.runtime import driver
from warploom.runtime.alike import alike
from warploom.runtime.bounded import remember
from warploom.runtime.counters import launch_numbers
from warploom.runtime.decision import Choice
from warploom.runtime.elements import name_of
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import Keywords
from warploom.runtime.families.gemm.call import CheckedCall, GemmCall, requiring_grad
from warploom.runtime.launch_plan import LaunchPlan
from warploom.runtime.plan import Plan, make, planned
from warploom.runtime.template import Bound
from warploom.runtime.tensors import explained

Fits = Callable[..., bool]
Launch = Callable[[int, int], tuple[object, ...]]  # returns the driver's status, 0 being success

_READY = 1 << 14  # calls of plans remembered, over all plans, by addresses and stream
_ready: OrderedDict[tuple[int, ...], tuple[Fits, Launch, Bound]] = OrderedDict()
_numbers = itertools.count()

os.register_at_fork(after_in_child=_ready.clear)


@dataclass
class GemmPlan(Plan[CheckedCall, torch.Tensor]):
    """What a kind of call needs: its kernel and launch, and which operands are copied first.

    `plan(a, b, out, ...)` runs it for tensors of the planned shapes, strides and types; it is what
    `warploom.gemm` itself runs after looking the plan up.
    """

    rules: dict[tuple[object, ...], Any] = field(default_factory=dict)  # of gradients
    reads: tuple[int, ...] | None = None  # the items whose tensors are read
    saving: GemmPlan | None = None  # stores what the activation is given, too
    _fits: Fits | None = None  # of the tensors that it ran on last
    _number: int = field(default_factory=_numbers.__next__)  # of no other plan of the process

    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor | None = None,
        **keywords: Unpack[Keywords],
    ) -> torch.Tensor:
        """Run the plan with the keywords that it was made with, and tensors like those.

        A launch that ran before, on the same addresses and stream, is only fired again: that it may
        be is seen in less time than the driver's own, and all that follows takes some times it.
        """
        key = None
        dual = forward_ad._current_level >= 0
        traced = torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
        if out is not None and self.device >= 0 and not (keywords or dual or traced):
            stream = driver.current_stream(self.device)
            key = (self._number, a.data_ptr(), b.data_ptr(), out.data_ptr(), stream)
            ready = _ready.get(key)
            if ready is not None:
                fits, launch, bound = ready
                if fits(a, b, out) and not launch(bound[1], 0)[0]:
                    next(launch_numbers)
                    return out
        listed = epilogue.items(**keywords) if keywords else ()
        if traced:  # compilers, and modes that decide by operator
            # They import this module.
            from warploom.runtime.families.gemm import operators

            return operators.call(a, b, listed, out, *self.details.options)
        call = GemmCall(a, b, listed, out, *self.details.options)
        try:
            same = call.signature() == self.key
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
        if not same:
            raise ProblemError(
                f"a {list(a.shape)} {a.dtype}, b {list(b.shape)} {b.dtype}",
                rule="a plan runs only what it was made for: shapes, strides, types, alignment",
                fix="call warploom.plan again, or warploom.gemm",
            )
        if dual:
            call.refuse_tangents()
        if torch.is_grad_enabled() and requiring_grad(a, b, out, listed) is not None:
            from warploom.runtime.families.gemm import gradient  # which imports this module

            return gradient.run(self, call)
        laid_out, details = self.launch, self.details
        if key is None or laid_out is None or not self._repeatable:
            return self.run(call)
        results = call.results(details)
        arguments = call.arguments(details, results)
        (launched,), bound = laid_out.run(*arguments, call.check, details, results)
        if not launched.roams:
            last = self._fits
            fits = last if last and last(a, b, results) else alike(a, b, results)
            self._fits = fits
            remember(_ready, key, (fits, launched.launch, bound), _READY)
        return results

    def relaunch(self, choice: Choice, launch: LaunchPlan) -> None:
        """Run these launches from now on; what was ready to be fired again is not."""
        super().relaunch(choice, launch)
        self._number = next(_numbers)

    def __repr__(self) -> str:
        shape, dtype = self.details.out_shape, self.details.out_dtype
        return self.described(f"{list(shape)} {name_of(dtype, 'out')}")

    @property
    def _repeatable(self) -> bool:
        """True when a call is one launch and nothing else: no copies, no workspaces."""
        launch = self.launch
        alone = launch is not None and len(launch.launches) == 1 and not launch.workspaces
        return alone and not self.copies


def gemm(call: GemmCall) -> torch.Tensor:
    """Run the planned call, planning it first when it is new; autograd does not see it."""
    return planned(call, GemmPlan).run(call)


def plan(call: GemmCall) -> GemmPlan:
    """Check a call, choose its kernel, load it, and remember the plan."""
    return make(call, GemmPlan)
