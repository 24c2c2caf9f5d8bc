"""Functions whose arguments are declared, and how their calls run.

A call like an earlier one is recognised by torch's guards (kinds.py), and its plan is launched on
addresses: no call and no key is made. The first time that addresses come up, the call itself is
made and checked, as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from operator import itemgetter
from typing import Any, Generic, cast

import torch
from torch.autograd import forward_ad

from warploom.generator.locks import remember
from warploom.runtime.arguments import Arguments, Declaration, ResultsT
from warploom.runtime.call import Key
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import maker
from warploom.runtime.operator import is_distributed, register
from warploom.runtime.plan import Plan, increment_versions, planned, run
from warploom.runtime.tensors import UnlikeError, WithoutMemoryError, explained, launchable

_BOUND = 4096  # kinds of calls remembered, of each function
_FORMS = 8  # of calls with the same types and options
_NUMBERS = (float, int)
_NUMERIC = (float, int, bool)
_NOTHING: Mapping[str, Any] = {}
_address = torch.Tensor.data_ptr
Values = tuple[Any, ...]  # the arguments of a call, in the order in which they are declared
declared: dict[str, type[Arguments[Any, Any]]] = {}
"""What the calls of every function are, by the name of its operators."""


def _getter(indices: Sequence[int]) -> Callable[[Values], tuple[Any, ...]]:
    """What takes these of the values, as a tuple."""
    first = next(iter(indices), 0)
    getter: Any = itemgetter(*indices if len(indices) > 1 else [slice(first, first + len(indices))])
    return cast("Callable[[Values], tuple[Any, ...]]", getter)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Form:
    """What calls of one form share: the types of all arguments, and the values of options.

    tensors   those that guards compare: each once
    same      indices of arguments that are one tensor
    others    all but tensors and numbers that kernels are handed: they have the values `shared`
    typed     numbers, and those of `others` that have the value of one: they have these `types`,
              since True is 1. The types of tensors are for guards to compare
    """

    tensors: Callable[[Values], tuple[torch.Tensor, ...]]
    same: tuple[tuple[int, int], ...]
    others: Callable[[Values], Values]
    shared: Values
    typed: Callable[[Values], Values]
    types: tuple[type, ...]

    def is_like(self, other: _Form) -> bool:
        """Whether the same calls are of the other form."""
        own = self.same, self.shared, self.types
        return own == (other.same, other.shared, other.types)


Derive = Callable[[Values, Any], Any]  # results as autograd knows them, of a pool and results
CallOf = Callable[[Values], Arguments[Any, Any]]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call: its plan, and where addresses and numbers come from.

    A pool has a call's arguments, and what `makers` make: of it `addressed` takes the tensors whose
    addresses kernels are handed, and `results` what is returned: a tuple, or the tensor that is
    all. `call_of` makes the call of a pool.
    nulls     addresses of tensors that are left out
    scalars   the numbers, but for those that are arguments: `numbers` are places and indices
    written   takes the arguments that kernels write, whose versions count that
    derive    where autograd is to know of the results
    """

    plan: Plan[Any, Any]
    makers: tuple[Callable[[], torch.Tensor | None], ...]
    addressed: Callable[[Values], tuple[torch.Tensor, ...]]
    results: Callable[[Values], Any]
    nulls: tuple[int, ...]
    scalars: tuple[float, ...]
    numbers: tuple[tuple[int, int], ...]
    written: Callable[[Values], tuple[torch.Tensor, ...]] | None
    derive: Derive | None
    call_of: CallOf

    def replaced(self, values: Values) -> tuple[float, ...]:
        """The numbers, with those that are arguments."""
        scalars = [*self.scalars]
        for place, index in self.numbers:
            scalars[place] = values[index]
        return tuple(scalars)


class WarmCalls(Generic[ResultsT]):
    """The calls of one function that ran before, by which others like them are launched.

    names    of the function's arguments: as a call declares them, where they are its tensors and
             numbers. The others are hashable, and decide what is done by their values
    call_of  makes the call of a function's arguments, a tuple
    at_second  what is known is kept from the second call of a plan on: of many there is one

    `places` are those of the names; `call_of` may be given more than the arguments.
    """

    def __init__(
        self,
        names: Sequence[str],
        declaration: Declaration,
        call_of: Callable[..., Arguments[Any, ResultsT]],
        *,
        at_second: bool = False,
    ) -> None:
        count = len(names)
        self.call_of: CallOf = lambda pool: call_of(pool[:count])
        self._at_second = at_second
        self.places = places = {name: index for index, name in enumerate(names)}
        self._values = [places[name] for name in names if name in declaration.values]
        self._options = _getter([at for name, at in places.items() if at not in self._values])
        self._is_zero_none = bool(declaration.numbers)
        self._kinds: Kinds[_Kind] = Kinds(_BOUND)
        self._forms: dict[Key, tuple[_Form, ...]] = {}
        self._last: _Form | None = None

    def again(self, values: Values) -> ResultsT | None:
        """Results of a call like an earlier one; None for others.

        Types of all arguments are compared before any value is: a tensor may equal a number, and
        would be waited for.
        """
        form = self._last
        if form is None:
            return None
        try:
            kind = self._of_form(form, values)
        except Exception:  # another form has no tensor, or a number, in the place of one
            kind = None
        if kind is None:
            try:
                kind = self._of_forms(values)
            except Exception:  # arguments of no type that they may have: the call says so
                return None
        if kind is None:
            return None
        pool = (*values, *[make() for make in kind.makers]) if kind.makers else values
        addresses = (*map(_address, kind.addressed(pool)), *kind.nulls)
        scalars = kind.replaced(values) if kind.numbers else kind.scalars
        # A number of 0 may stand for none, and is then no number of a kernel.
        if kind.numbers and self._is_zero_none and 0 in scalars:
            return None
        results: Any = kind.results(pool)
        try:
            kind.plan.run_at((addresses, scalars), results, kind.call_of, pool)
        except UnlikeError:  # their addresses, which are new
            return None
        if kind.written is not None:
            increment_versions(kind.written(pool))
        return results if kind.derive is None else kind.derive(pool, results)  # type: ignore[no-any-return]

    def _of_forms(self, values: Values) -> _Kind | None:
        for form in self._forms.get(((*map(type, values),), self._options(values)), ()):
            kind = self._of_form(form, values)
            if kind is not None:
                self._last = form
                return kind
        return None

    def _of_form(self, form: _Form, values: Values) -> _Kind | None:
        typed = (*map(type, form.typed(values)),)
        if typed != form.types or form.others(values) != form.shared:
            return None
        for first, again in form.same:
            if values[first] is not values[again]:
                return None
        tensors = form.tensors(values)
        for tensor in tensors:
            if tensor.is_nested:  # of which guards ask what ends the process
                return None
        return self._kinds.find(form, *tensors)

    def keep(
        self,
        values: Values,
        call: Arguments[Any, ResultsT],
        plan: Plan[Any, ResultsT],
        results: ResultsT,
        derive: Derive | None = None,
        made: Mapping[str, torch.Tensor] = _NOTHING,
        call_of: CallOf | None = None,
    ) -> None:
        """Keep what is known of a call that a plan ran, for others like it.

        Args:
            values: The arguments of the function.
            call: What was run, which is `call_of` of a pool, by default that of the arguments.
            plan: What ran it.
            results: What was returned.
            derive: Has autograd know of the results of calls like this one.
            made: Tensors of the call that are made anew for each, as these are, by their names:
                they come last in a pool.
        """
        if plan.copies or not call.repeats:
            return
        if self._at_second and not plan.repeated:
            plan.repeated = True
            return
        places, addressed = self.places, [*call.read(), *call.trailing()]
        for name, tensor in addressed:
            own = values[places[name]] if name in places else None
            if own is tensor or made.get(name) is tensor:
                continue
            if not isinstance(own, torch.Tensor) or own.data_ptr() != tensor.data_ptr():
                return  # it is another tensor that is read
        present = [at for at in self._values if isinstance(values[at], torch.Tensor)]
        if not launchable(*[values[index] for index in present]):
            return
        numbers = [at for at in self._values if at not in present and values[at] is not None]
        if any(type(values[at]) not in _NUMBERS for at in numbers):
            return
        # One that stands for none, as 0 may, is what all calls of a form have.
        handed = [places[name] for name in call.numbered(plan.draft) if name in places]
        numbers = [at for at in numbers if at in handed]
        key = (*map(type, values),), self._options(values)
        first = {id(values[at]): at for at in reversed(present)}
        same = tuple([(first[id(values[at])], at) for at in present if first[id(values[at])] != at])
        try:
            forms = self._forms.get(key, ())
        except TypeError:  # a list in the place of a tuple
            return
        own = {*present, *numbers}
        others = [at for at in range(len(values)) if at not in own]
        if any(isinstance(values[at], torch.Tensor) for at in others):  # no value to compare
            return
        typed = sorted({*numbers, *[at for at in others if type(values[at]) in _NUMERIC]})
        form = _Form(
            _getter(sorted(first.values())),
            same,
            _getter(others),
            _getter(others)(values),
            _getter(typed),
            tuple([type(values[at]) for at in typed]),
        )
        known = next((one for one in forms if form.is_like(one)), None)
        if known is None:
            remember(self._forms, key, (form, *forms[: _FORMS - 1]), _BOUND)
        form = known or form
        ways = derive, made, call_of or self.call_of
        kind = self._known(values, call, plan, results, *ways)
        self._last = form
        self._kinds.keep(kind, form, *form.tensors(values))

    def _known(
        self,
        values: Values,
        call: Arguments[Any, ResultsT],
        plan: Plan[Any, ResultsT],
        results: ResultsT,
        derive: Derive | None,
        made: Mapping[str, torch.Tensor],
        call_of: CallOf,
    ) -> _Kind:
        places, sources = {**self.places}, list[int]()
        makers = list[Callable[[], torch.Tensor | None]]()
        is_one = isinstance(results, torch.Tensor)
        returned = (results,) if is_one else results
        for one, name in zip_longest(returned, call.declaration.results):
            place = places.get(name or "", -1)
            if place < 0 or values[place] is None:
                place = len(values) + len(makers)
                makers.append(type(None) if one is None else maker(one))
            sources.append(place)
        for name, one in made.items():
            places[name] = len(values) + len(makers)
            makers.append(maker(one))
        handed = [i for i, one in zip(sources, returned, strict=True) if one is not None]
        written = [self.places[name] for name, _ in call.written() if name in self.places]
        read = [places[name] for name, _ in call.read()]
        trailing = [places[name] for name, _ in call.trailing()]
        _, scalars = call.arguments(plan.details, results)
        numbers = [
            (at, places[name])
            for at, name in enumerate(call.numbered(plan.draft))
            if name in places
        ]
        return _Kind(
            plan,
            tuple(makers),
            _getter([*read, *handed, *trailing]),
            itemgetter(*sources) if is_one else _getter(sources),
            (0,) * sum(getattr(call, name) is None for name in call.declaration.nulls),
            scalars,
            tuple([(at, index) for at, index in numbers if values[index] is not None]),
            _getter(written) if written else None,
            derive,
            call_of,
        )


class Function(Generic[ResultsT]):
    """A function without gradients whose calls are declared, and its operators.

    It is called with all arguments, in the order in which they are declared, and returns the
    results. Compilers, and modes that decide by operator, see the operator `warploom::name`.

    into      there is a second operator, `name_out`, which writes the first result where the call
              says; else that is copied to
    written   keywords that the operator writes to, with their types; where all may be left out,
              there is an operator without them, `name_functional`
    sharding  registers how the operator takes distributed tensors, where such a tensor comes
    """

    def __init__(
        self,
        name: str,
        kind: type[Arguments[Any, ResultsT]],
        *,
        into: bool = False,
        written: Mapping[str, str] = _NOTHING,
        sharding: Callable[[], None] | None = None,
    ) -> None:
        declaration = kind.declaration
        self._name, self._call, self._into, self._sharding = name, kind, into, sharding
        declared[name] = kind
        self._warm: WarmCalls[ResultsT] = WarmCalls(
            declaration.names, declaration, lambda values: kind(*values)
        )
        outputs = ["Tensor"] * len(kind.outputs)
        register(
            name,
            declaration.schema,
            returns=outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})",
            run=self._run,
            fake=self._fake,
            refuse=self._refuse,
            written=written,
        )
        # What a compiler may move and remove, as it may none that might write. torch's inductor
        # leaves one that might, beside e8m0 tensors, where it cannot compile it.
        schemas = (declaration.schema, *written.values())
        self._functional = bool(written) and all(
            "!" not in schema or schema.endswith("?") for schema in schemas
        )
        if self._functional:
            register(
                f"{name}_functional",
                declaration.schema,
                returns=outputs[0] if len(outputs) == 1 else f"({', '.join(outputs)})",
                run=self._run,
                fake=self._fake,
                refuse=self._refuse,
            )
        if into:
            register(
                f"{name}_out",
                declaration.schema,
                returns=", ".join(outputs[1:]) or "()",
                run=self._run,
                fake=self._fake,
                refuse=self._refuse,
                written={declaration.results[0]: "Tensor(a!)"},
            )

    def __call__(self, *values: Any) -> ResultsT:
        """Run a call: like an earlier one, by a plan, or as an operator where one is seen."""
        if not torch.compiler.is_compiling():
            results = self._warm.again(values)
            if results is not None:
                return results
        call = self._call(*values)
        if forward_ad._current_level >= 0:
            call.refuse_tangents()
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self._operator(call)
        try:
            plan: Plan[Any, ResultsT] = planned(call, Plan)
            call.refuse()
            made = plan.run(call)
        except WithoutMemoryError:  # torch knows which code is to see these tensors
            return self._operator(call)
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
        self._warm.keep(values, call, plan, made)
        return made

    # ---- Operators -------------------------------------------------------------------------------

    def _run(self, *given: Any, **written: torch.Tensor | None) -> Any:  # noqa: ANN401
        call = self._call.crossed(*given, **written)
        with torch.no_grad():
            return self._returned(call, run(call))

    def _fake(self, *given: Any, **written: torch.Tensor | None) -> Any:  # noqa: ANN401
        call = self._call.crossed(*given, **written)
        return self._returned(call, call.fake())

    def _refuse(self, *given: Any, **written: torch.Tensor | None) -> None:
        self._call.crossed(*given, **written).refuse()

    def _returned(self, call: Arguments[Any, ResultsT], results: ResultsT) -> Any:  # noqa: ANN401
        """What an operator returns: of a result that there is not, a tensor of no elements."""
        first: torch.Tensor = getattr(call, call.declaration.tensors[0])
        is_out = self._into and getattr(call, call.declaration.results[0]) is not None
        there = [first.new_empty(0) if one is None else one for one in results[is_out:]]
        if not there:  # the only result was written to
            return None
        return there[0] if len(there) == 1 else tuple(there)

    def _operator(self, call: Arguments[Any, ResultsT]) -> ResultsT:
        """Run a call as an operator, for a compiler to trace."""
        declaration, operators = call.declaration, torch.ops.warploom
        if self._sharding is not None and is_distributed(getattr(call, declaration.tensors[0])):
            self._sharding()
        given = [getattr(call, name) for name in declaration.results]
        values, written = call.crossing()
        if self._into and given[0] is not None:
            others = getattr(operators, f"{self._name}_out")(
                *values, **{declaration.results[0]: given[0]}
            )
            return cast("ResultsT", (given[0], others))
        if self._functional and all(one is None for one in written.values()):
            found = getattr(operators, f"{self._name}_functional")(*values)
        else:
            found = getattr(operators, self._name)(*values, **written)
        found = found if len(call.outputs) > 1 else (found,)
        given += [None] * (len(found) - len(given))
        results = [
            None if not is_computed else one if into is None else into.copy_(one)
            for is_computed, one, into in zip(call.computed(), found, given, strict=True)
        ]
        return cast("ResultsT", tuple(results))
