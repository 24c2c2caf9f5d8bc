"""A plan: what is found out once for all calls of a kind, and what runs each of them.

A call is looked up by its signature; only a miss checks it, chooses a kernel, lays out its launches
and loads it. It knows no family, and nothing here waits for the GPU.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Generic, TypeVar, overload
from weakref import WeakValueDictionary

import torch

from warploom import hooks
from warploom.errors import KernelMissingError
from warploom.generator.build import require
from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import fork_lock, remember
from warploom.generator.specification import KernelSpec
from warploom.runtime import kinds, targets
from warploom.runtime.call import Arguments, Call, DetailsT, Draft, Key, ResultsT
from warploom.runtime.counters import counters
from warploom.runtime.dispatch import Choice
from warploom.runtime.kernel import store
from warploom.runtime.launch_plan import LaunchPlan, plan_launches
from warploom.runtime.tensors import (
    UnlikeError,
    WithoutMemoryError,
    explained,
    laid_out_as_resolved,
    negated,
    refuse_negated,
    require_memory,
    resolved,
)

increment_versions: Callable[[Iterable[torch.Tensor]], None] = torch._C._increment_version
"""torch.autograd.graph's, of several tensors: torch does not see what kernels write."""

_BOUND = 4096  # plans remembered
known: dict[Key, Any] = {}  # of all families, by signature: what a warm call looks up
_numbers = itertools.count()
_alive: WeakValueDictionary[int, Plan[Any, Any]] = WeakValueDictionary()
_types: dict[type, type[Plan[Any, Any]]] = {}  # of the plans of some types of calls

os.register_at_fork(after_in_child=known.clear)  # a forked call is planned anew, and so refused


@dataclass
class Plan(Generic[DetailsT, ResultsT]):
    """What a kind of call needs: its kernel and launches, and what is done around them.

    launch    None on the CPU, and where there is nothing to launch
    copies    operands that are copied first, since TMA cannot read them or torch has negated them
    details   what the family knows of such calls
    draft     the call that it was made of, as `warploom.autotune` needs it for another kernel
    repeated  it ran a call before that nothing is kept of
    writes    calls are given tensors to write, whose versions count that
    """

    key: Key
    choice: Choice
    launch: LaunchPlan | None
    copies: tuple[str, ...]
    details: DetailsT
    device: int
    draft: Draft[DetailsT]
    number: int = field(default_factory=_numbers.__next__, compare=False, repr=False)
    repeated: bool = field(default=False, compare=False, repr=False)
    writes: bool = field(default=False, compare=False, repr=False)

    def __init_subclass__(cls, of: type | None = None) -> None:
        """Have calls of the type `of` planned by this class, whoever plans them."""
        if of is not None:
            _types[of] = cls

    def __post_init__(self) -> None:
        _alive[self.number] = self

    def run(self, call: Call[DetailsT, ResultsT]) -> ResultsT:
        """Launch on tensors that are known to fit; on the CPU, and without products, compute.

        Every call passes here: what it does not need stays out, and no function is made.
        """
        launch, details = self.launch, self.details
        results = call.results(details)
        if launch is None:
            call.check(details, results)
            call.compute(details, results)
        else:
            read = call
            if self.copies:
                require_memory(call.named())  # torch copies from address 0 too
                read = resolved(call).copied(details)  # and is held until all is launched
            addresses, scalars = read.arguments(details, results)
            launch.run(addresses, scalars, call.check, details, results)
        if self.writes:
            increment_versions([one for _, one in call.written() if one is not None])
        return results

    def run_at(
        self,
        arguments: Arguments,
        results: ResultsT,
        call_of: Callable[..., Call[DetailsT, ResultsT]],
        *given: object,
    ) -> None:
        """Launch on tensors at these addresses, with no call made where they came up before.

        It is for a plan without copies, and counts no version. `call_of`, given what follows it,
        returns the call. Raises UnlikeError where that is not one of this plan's, of these
        `arguments`.
        """
        launch = self.launch
        if launch is not None:
            launch.run(*arguments, self._checked, arguments, results, call_of, given)
        else:
            self._checked(arguments, results, call_of, given).compute(self.details, results)

    def _checked(
        self,
        arguments: Arguments,
        results: ResultsT,
        call_of: Callable[..., Call[DetailsT, ResultsT]],
        given: tuple[object, ...],
    ) -> Call[DetailsT, ResultsT]:
        call = call_of(*given)
        own = call.signature() == self.key
        if not (own and call.arguments(self.details, results) == arguments):
            raise UnlikeError(
                f"{type(call).__name__} on other tensors than those of {self}",
                rule="must have the shapes, strides and dtypes of the planned ones",
                fix="make another plan for them",
            )
        call.check(self.details, results)
        return call

    def gradients(self) -> Choice | None:
        """The kernel that autograd runs for results of this plan; None where there is none."""
        return None

    def relaunch(self, choice: Choice, launch: LaunchPlan) -> None:
        """Run these launches of the same problem from now on; calls that run take the old ones."""
        self.choice, self.launch = choice, launch

    def described(self, result: str) -> str:
        """The line that a plan is shown as: its result, its kernel, and where it runs."""
        where = f"cuda:{self.device}" if self.launch else "the reference"
        copied = f", after copies of {' and '.join(self.copies)}" if self.copies else ""
        return f"<{type(self).__name__} {result} on {where}{copied}: {self.choice.spec.name}>"


PlanT = TypeVar("PlanT", bound=Plan[Any, Any])


def draft(call: Call[DetailsT, Any], target: DeviceLimits) -> Draft[DetailsT]:
    """Check a call and choose its kernel: of operands that torch has negated, for their copies."""
    refuse_negated(call.written())
    names = negated(call.named())
    if not names:
        return call.draft(target)
    drafted = laid_out_as_resolved(call).draft(target)
    return replace(drafted, copies=tuple(dict.fromkeys((*names, *drafted.copies))))


def make(call: Call[Any, Any], kind: type[PlanT], key: Key | None = None) -> PlanT:
    """Check a call, choose its kernel, load it, and remember the plan by `key`, its signature."""
    device = call.device
    target = targets.at_hand(device)
    call.require()
    try:
        require_memory(call.named())
    except WithoutMemoryError:
        draft(call, target)  # which may find more to say
        raise
    drafted = draft(call, target)
    call.refuse()
    launch, key = None, key or call.signature()
    if device >= 0 and drafted.problem is not None:
        spec, problem = drafted.choice.spec, drafted.problem
        try:
            launch = plan_launches(spec, problem, device, drafted.tensors, drafted.scalars)
        except KernelMissingError:
            rest = drafted.copies, drafted.details, device, drafted
            _require_all(call, kind(key, drafted.choice, None, *rest))
            raise
    given = drafted.choice, launch, drafted.copies, drafted.details, device, drafted
    planned = kind(key, *given, writes=bool(call.written()))
    counters.add("plans")
    if hooks.observer is not None:
        hooks.observer.planned(planned)
    remember(known, key, planned, _BOUND)
    return planned


def _require_all(call: Call[Any, Any], unlaunched: Plan[Any, Any]) -> None:
    """Raise KernelMissingError for all kernels that a call lacks, with those of its gradients.

    Whoever hears of calls is told of this one, which ends before it is run.
    """
    for hear in tuple(_listeners):
        hear(unlaunched)
    needed = [unlaunched.choice.spec]
    tensors = (one for _, one in call.named() if isinstance(one, torch.Tensor))
    if any(one.requires_grad for one in tensors) and (later := unlaunched.gradients()):
        needed.append(later.spec)
    require(needed, store())


@overload
def planned(call: Call[DetailsT, ResultsT]) -> Plan[DetailsT, ResultsT]: ...


@overload
def planned(call: Call[Any, Any], kind: type[PlanT]) -> PlanT: ...


def planned(call: Call[Any, Any], kind: type[Plan[Any, Any]] | None = None) -> Plan[Any, Any]:
    """The plan of a call, which is made where there is none: of its type's class, or this one."""
    key = call.signature()
    plan: Plan[Any, Any] | None = known.get(key)
    return plan or make(call, kind or _types.get(type(call), Plan), key)


def run(call: Call[Any, ResultsT]) -> ResultsT:
    """Run a call by its plan, which is made where there is none: all that a plain family needs."""
    try:
        key = call.signature()
        found: Plan[Any, ResultsT] | None = known.get(key)
    except Exception as error:
        raise explained(error, call.require) from error.__cause__
    call.refuse()
    return (found or make(call, Plan, key)).run(call)


_listeners: list[Callable[[Plan[Any, Any]], None]] = []
_unheard: dict[tuple[type[Plan[Any, Any]], str], Callable[..., Any]] = {}
_hearing = fork_lock()


@contextmanager
def heard(hear: Callable[[Plan[Any, Any]], None]) -> Iterator[None]:
    """Tell `hear` of the plan of every call while the block runs, in all threads; may be nested.

    A call is told of before it is launched, also where its plan was kept by a layer, a backward
    pass, a compiled function or the user. Methods of the classes are replaced meanwhile: with
    nobody to hear of it, a call does what it does without this function. `hear` must not raise.
    """
    with _hearing:
        _listeners.append(hear)
        if not _unheard:
            kinds_of: list[type[Plan[Any, Any]]] = [Plan, *_subclasses(Plan)]
            for kind in kinds_of:
                for name in {"run", "run_at", "__call__"} & vars(kind).keys():
                    _unheard[kind, name] = vars(kind)[name]
                    setattr(kind, name, _telling(vars(kind)[name]))
    try:
        yield
    finally:
        with _hearing:
            _listeners.remove(hear)
            if not _listeners:
                for (kind, name), method in _unheard.items():
                    setattr(kind, name, method)
                _unheard.clear()


def _subclasses(kind: type[Plan[Any, Any]]) -> Iterator[type[Plan[Any, Any]]]:
    for one in kind.__subclasses__():
        yield one
        yield from _subclasses(one)


def _telling(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same method, which first tells who wants to hear of the call."""

    @wraps(method)
    def told(self: Plan[Any, Any], *given: Any, **keywords: Any) -> Any:  # noqa: ANN401
        if not torch.compiler.is_dynamo_compiling():  # the operator that is traced runs a plan, too
            for hear in tuple(_listeners):
                hear(self)
        return method(self, *given, **keywords)

    return told


def alive() -> list[Plan[Any, Any]]:
    """The plans that somebody has: this map, a layer, a backward pass, or the user."""
    return [plan for one in _alive.valuerefs() if (plan := one()) is not None]


def forget() -> None:
    """Plan every call anew: what chose its kernel may have changed."""
    known.clear()
    kinds.forget()


def forget_named(specs: Collection[KernelSpec]) -> None:
    """Forget the plans of calls that named one of these kernels themselves."""
    for key, plan in list(known.items()):
        if isinstance(plan, Plan) and plan.choice.asked is None and plan.choice.spec in specs:
            known.pop(key, None)
