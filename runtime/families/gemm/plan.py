"""D = epilogue(A B) on torch tensors: look the call's plan up, or make it, and launch.

Autograd sees the launch as one function. What it keeps are the operands that a wanted gradient is a
GEMM of, scales, and what the activation needs; see gradient_rule.py. A second derivative is refused
when it is computed, not before.
"""

from __future__ import annotations

import itertools
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Unpack

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.epilogue import MOST_CHARACTERS
from warploom.generator.locks import remember
from warploom.runtime import driver
from warploom.runtime.counters import launch_numbers
from warploom.runtime.dispatch import Choice
from warploom.runtime.elements import name_of
from warploom.runtime.families._product import epilogue
from warploom.runtime.families._product.epilogue import Keywords
from warploom.runtime.families.gemm import operators
from warploom.runtime.families.gemm.block_scales import without_gradients
from warploom.runtime.families.gemm.call import CheckedCall, GemmCall, requiring_grad
from warploom.runtime.families.gemm.gradient import Tensors, gradients, once
from warploom.runtime.families.gemm.gradient_plans import Ways, simple
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    Rule,
    kept_type,
    numbers_of,
    reads_of,
    rule,
    storing_items,
    way_of,
)
from warploom.runtime.kinds import alike
from warploom.runtime.launch_plan import Bound, LaunchPlan
from warploom.runtime.plan import Plan, make, planned
from warploom.runtime.tensors import explained

Fits = Callable[..., bool]
Launch = Callable[[int, int], tuple[object, ...]]  # returns the driver's status, 0 being success

_READY = 1 << 14  # calls of plans remembered, over all plans, by addresses and stream
_ready: OrderedDict[tuple[int, ...], tuple[Fits, Launch, Bound]] = OrderedDict()
_numbers = itertools.count()

os.register_at_fork(after_in_child=_ready.clear)


@dataclass
class GemmPlan(Plan[CheckedCall, torch.Tensor], of=GemmCall):
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
            return run(self, call)
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
    """Run the planned call, planning it first when it is new, for autograd to differentiate."""
    return run(planned(call, GemmPlan), call)


_CHARACTERS = 48  # of what is put into an epilogue for gradients, in the name of its kernel


def run(plan: GemmPlan, call: GemmCall) -> torch.Tensor:
    """Run a planned call, so that autograd can differentiate it where a gradient is wanted.

    Raises ProblemError for what autograd would have to know of: `out`, and outputs of steps that
    require grad.
    """
    if not torch.is_grad_enabled():
        return plan.run(call)
    a, b, listed = call.a, call.b, call.listed
    if requiring_grad(a, b, call.out, listed) is None:
        return plan.run(call)
    if plan.details.scales:
        raise without_gradients()
    if call.out is not None:
        call.refuse()
    if not listed:
        return _apply(call, plan, a, b)
    if plan.reads is None:
        plan.reads = tuple(reads_of(listed))
    if len(plan.reads) < len(listed):  # some items have no tensor, or an output
        call.refuse()
    return _apply(call, plan, a, b, *[listed[index][1] for index in plan.reads])


class _Gemm(torch.autograd.Function):
    """D of a call, differentiable in what it reads."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        call: GemmCall,
        plan: GemmPlan,
        *tensors: torch.Tensor,
    ) -> torch.Tensor:
        needed = ctx.needs_input_grad  # in call and plan too, which need none
        options = call.gradient_options
        kind = (call.preactivation, needed, options.accumulate_into is None)
        how, ways = plan.rules.get(kind) or _rule(call, plan, tensors, kind)
        kept = [tensors[place] for place in how.kept]
        if how.way == "save":
            d, z = _saving(call, plan)
            kept.append(z)
        else:
            d = plan.run(call)
            if how.way == "output":
                kept.append(d)
        ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        # Nothing of this is a tensor with a graph, which would escape hooks and be kept alive.
        if ways is not None:
            ctx.run = ways.run
        else:
            numbers = numbers_of(call.listed) if how.numbered else ()
            ctx.run = partial(gradients, how, numbers, options)
        return d

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dd: torch.Tensor | None,
    ) -> Tensors:
        """Return the gradients that are wanted."""
        found: Tensors = (None,) * len(ctx.needs_input_grad[2:])
        if dd is not None:
            found = once(ctx.run, dd, *ctx.saved_tensors)
        return None, None, *found


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Gemm).apply


def _rule(
    call: GemmCall, plan: GemmPlan, tensors: Sequence[torch.Tensor], kind: tuple[Any, ...]
) -> tuple[Rule, Ways | None]:
    """How the calls of a kind are differentiated. A kernel that was named stores nothing more."""
    needed = kind[1][2:]
    asked = call.preactivation if call.spec is None else "recompute"
    stored = plan.details.out_dtype in FLOATS
    way = way_of(call.listed, needed, preactivation=asked, stored=stored)
    written = sum(len(step.token) + 1 for step in plan.details.epilogue.steps)
    if way in ("save", "recompute") and written + _CHARACTERS > MOST_CHARACTERS:
        way = "composite"
    how, options = rule(tensors, call.listed, needed, way), call.gradient_options
    ways = None
    plain = options.accumulation == "fast" and options.accumulate_into is None
    if plain and plan.details.out_dtype == call.b.dtype and simple(tensors, call.listed, how):
        ways = Ways(how, partial(gradients, how, (), options), of_weight=False)
    plan.rules[kind] = how, ways
    return how, ways


def _saving(call: GemmCall, plan: GemmPlan) -> tuple[torch.Tensor, torch.Tensor]:
    """D, and what its activation was given, by a plan of its own that is found once."""
    details, listed = plan.details, call.listed
    shape = (*details.out_shape[:-1], call.b.shape[-1])  # a gate is given twice as many columns
    z = call.a.new_empty(shape, dtype=kept_type(details.out_dtype, call.a.dtype))
    storing = GemmCall(
        call.a, call.b, storing_items(listed, z), None, call.out_dtype, call.accumulation
    )
    if plan.saving is None:
        plan.saving = make(storing, GemmPlan)
    return plan.saving.run(storing), z
