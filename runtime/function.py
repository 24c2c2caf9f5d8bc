"""Functions whose arguments are declared, and how their calls run.

A call like an earlier one is recognised by torch's guards (kinds.py), and its plan is launched on
addresses: no call and no key is made. The first time that addresses come up, the call itself is
made and checked, as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, Generic, cast

import torch
from torch.autograd import forward_ad

from warploom.runtime.arguments import Arguments, ResultsT
from warploom.runtime.bounded import remember
from warploom.runtime.call import Key
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import maker
from warploom.runtime.operator import is_distributed, register
from warploom.runtime.plan import Plan, planned, run
from warploom.runtime.tensors import UnlikeError, WithoutMemoryError, explained, launchable

_BOUND = 4096  # kinds of calls remembered, of each function
_NUMBERS = (float, int)
_NOTHING: Mapping[str, str] = {}
_address = torch.Tensor.data_ptr
_nested = attrgetter("is_nested")
Values = tuple[Any, ...]  # the arguments of a call, in the order in which they are declared


def _getter(indices: Sequence[int]) -> Callable[[Values], tuple[Any, ...]]:
    """What takes these of the values, as a tuple."""
    if len(indices) > 1:
        return cast("Callable[[Values], tuple[Any, ...]]", itemgetter(*indices))
    return lambda values: tuple([values[index] for index in indices])


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Form:
    """What calls of one form share: the types of all arguments, and the values of options.

    tensors   those that guards compare: each once
    same      indices of arguments that are one tensor
    """

    types: tuple[type, ...]
    options: tuple[object, ...]
    tensors: Callable[[Values], tuple[torch.Tensor, ...]]
    same: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call: its plan, and where addresses and numbers come from.

    results   of each that is computed, the index of the argument that it goes to, or its maker
    missing   indices of results that are not computed
    nulls     addresses of tensors that are left out
    scalars   the numbers, but for those that are arguments: `numbers` are places and indices
    """

    plan: Plan[Any, Any]
    read: Callable[[Values], tuple[torch.Tensor, ...]]
    results: tuple[int | Callable[[], torch.Tensor], ...]
    missing: tuple[int, ...]
    nulls: tuple[int, ...]
    scalars: tuple[float, ...]
    numbers: tuple[tuple[int, int], ...]

    def launch(self, values: Values, call_of: Callable[[Values], Any]) -> tuple[Any, ...]:
        results: list[Any] = [
            values[source] if type(source) is int else source()  # type: ignore[operator]
            for source in self.results
        ]
        addresses = (*map(_address, self.read(values)), *map(_address, results), *self.nulls)
        scalars = self.scalars
        if self.numbers:
            changed = [*scalars]
            for place, index in self.numbers:
                changed[place] = values[index]
            scalars = tuple(changed)
        for index in self.missing:
            results.insert(index, None)
        made = tuple(results)
        self.plan.run_at((addresses, scalars), made, call_of, values)
        return made


class Function(Generic[ResultsT]):
    """A function without gradients whose calls are declared, and its operators.

    It is called with all arguments, in the order in which they are declared, and returns the
    results. Compilers, and modes that decide by operator, see the operator `warploom::name`.

    into      there is a second operator, `name_out`, which writes the first result where the call
              says; else that is copied to
    written   keywords that the operator writes to, with their types
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
        self._kinds: Kinds[_Kind] = Kinds(_BOUND)
        self._forms: dict[Key, _Form] = {}
        self._last: _Form | None = None
        places = {name: index for index, name in enumerate(declaration.names)}
        self._places = places
        self._options = _getter([places[name] for name in declaration.options])
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
        if into:
            register(
                f"{name}_out",
                declaration.schema,
                returns=", ".join(outputs[1:]),
                run=self._run,
                fake=self._fake,
                refuse=self._refuse,
                written={declaration.results[0]: "Tensor(a!)"},
            )

    def __call__(self, *values: Any) -> ResultsT:
        """Run a call: like an earlier one, by a plan, or as an operator where one is seen."""
        if not torch.compiler.is_compiling():
            kind = self._find(values)
            if kind is not None:
                try:
                    return cast("ResultsT", kind.launch(values, self._of))
                except UnlikeError:  # their addresses, which are new
                    pass
        call = self._of(values)
        if forward_ad._current_level >= 0:
            call.refuse_tangents()
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            return self._operator(call)
        try:
            plan: Plan[Any, ResultsT] = planned(call, Plan)
            call.refuse()
            results = plan.run(call)
        except WithoutMemoryError:  # torch knows which code is to see these tensors
            return self._operator(call)
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
        self._keep(values, call, plan, results)
        return results

    def _of(self, values: Values) -> Arguments[Any, ResultsT]:
        return self._call(*values)

    # ---- Calls like an earlier one ---------------------------------------------------------------

    def _find(self, values: Values) -> _Kind | None:
        """What is kept of calls like this one; None for those of a new kind.

        Types of all arguments are compared before any value is: a tensor may equal a number.
        """
        types, form = (*map(type, values),), self._last
        try:
            options = self._options(values)
            if form is None or form.types != types or form.options != options:
                form = self._forms.get((types, options))
                if form is None:
                    return None
                self._last = form
            for one, other in form.same:
                if values[one] is not values[other]:
                    return None
            tensors = form.tensors(values)
            if True in map(_nested, tensors):  # of which guards ask what ends the process
                return None
            return self._kinds.find(form, *tensors)
        except Exception:  # arguments of no type that they may have: the call says so
            return None

    def _keep(
        self,
        values: Values,
        call: Arguments[Any, ResultsT],
        plan: Plan[Any, ResultsT],
        results: ResultsT,
    ) -> None:
        """Keep what is known of a call that a plan ran, for others like it."""
        declaration, places = call.declaration, self._places
        present = [places[name] for name in declaration.tensors if name in places]
        present = [index for index in present if values[index] is not None]
        if plan.copies or not launchable(*[values[index] for index in present]):
            return
        numbers = [name for name in declaration.numbers if values[places[name]] is not None]
        if any(type(values[places[name]]) not in _NUMBERS for name in numbers):
            return
        if call.kernel is not None:
            return
        types, options = (*map(type, values),), self._options(values)
        try:
            form = self._forms.get((types, options))
        except TypeError:  # a list in the place of a tuple
            return
        first = {id(values[index]): index for index in reversed(present)}
        same = [(first[id(values[index])], index) for index in present]
        pairs = tuple([(one, other) for one, other in same if one != other])
        if form is None or form.same != pairs:
            form = _Form(types, options, _getter(sorted(first.values())), pairs)
            remember(self._forms, (types, options), form, _BOUND)
        kind = self._known(values, call, plan, results)
        self._last = form
        self._kinds.keep(kind, form, *form.tensors(values))

    def _known(
        self,
        values: Values,
        call: Arguments[Any, ResultsT],
        plan: Plan[Any, ResultsT],
        results: ResultsT,
    ) -> _Kind:
        places, given = self._places, dict.fromkeys(range(len(results)))
        for index, name in enumerate(call.declaration.results):
            if name in places and values[places[name]] is not None:
                given[index] = places[name]
        _, scalars = call.arguments(plan.details, results)
        names = plan.draft.scalars
        return _Kind(
            plan,
            _getter([places[name] for name, _ in call.read()]),
            tuple(
                maker(one) if (place := given[index]) is None else place
                for index, one in enumerate(results)
                if one is not None
            ),
            tuple(index for index, one in enumerate(results) if one is None),
            (0,) * sum(getattr(call, name) is None for name in call.declaration.nulls),
            scalars,
            tuple(
                (index, places[name])
                for index, name in enumerate(names)
                if values[places[name]] is not None
            ),
        )

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
        found = getattr(operators, self._name)(*values, **written)
        found = found if len(call.outputs) > 1 else (found,)
        given += [None] * (len(found) - len(given))
        results = [
            None if not is_computed else one if into is None else into.copy_(one)
            for is_computed, one, into in zip(call.computed(), found, given, strict=True)
        ]
        return cast("ResultsT", tuple(results))
