"""Functions whose arguments are declared, and how their calls run.

A call like an earlier one is recognised by torch's guards (kinds.py), and its plan is launched on
addresses: no call and no key is made. The first time that addresses come up, the call itself is
made and checked, as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
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

    Of a call's arguments and what `makers` make, `addressed` takes the tensors whose addresses
    kernels are handed, and `results` what is returned.
    nulls     addresses of tensors that are left out
    scalars   the numbers, but for those that are arguments: `numbers` are places and indices
    """

    plan: Plan[Any, Any]
    makers: tuple[Callable[[], torch.Tensor], ...]
    addressed: Callable[[Values], tuple[torch.Tensor, ...]]
    results: Callable[[Values], tuple[Any, ...]]
    nulls: tuple[int, ...]
    scalars: tuple[float, ...]
    numbers: tuple[tuple[int, int], ...]

    def replaced(self, values: Values) -> tuple[float, ...]:
        """The numbers, with those that are arguments."""
        scalars = [*self.scalars]
        for place, index in self.numbers:
            scalars[place] = values[index]
        return tuple(scalars)


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
                returns=", ".join(outputs[1:]),
                run=self._run,
                fake=self._fake,
                refuse=self._refuse,
                written={declaration.results[0]: "Tensor(a!)"},
            )

    def __call__(self, *values: Any) -> ResultsT:
        """Run a call: like an earlier one, by a plan, or as an operator where one is seen."""
        if not torch.compiler.is_compiling():
            results = self._again(values)
            if results is not None:
                return results  # type: ignore[return-value]
        call = self._of(values)
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
        self._keep(values, call, plan, made)
        return made

    def _of(self, values: Values) -> Arguments[Any, ResultsT]:
        return self._call(*values)

    # ---- Calls like an earlier one ---------------------------------------------------------------

    def _again(self, values: Values) -> tuple[Any, ...] | None:
        """Results of a call like an earlier one; None for others.

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
            if any(map(_nested, tensors)):  # of which guards ask what ends the process
                return None
            kind = self._kinds.find(form, *tensors)
        except Exception:  # arguments of no type that they may have: the call says so
            return None
        if kind is None:
            return None
        pool = (*values, *[make() for make in kind.makers]) if kind.makers else values
        addresses = (*map(_address, kind.addressed(pool)), *kind.nulls)
        scalars = kind.replaced(values) if kind.numbers else kind.scalars
        results = kind.results(pool)
        try:
            kind.plan.run_at((addresses, scalars), results, self._of, values)
        except UnlikeError:  # their addresses, which are new
            return None
        return results

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
        if {*numbers} - {*plan.draft.scalars}:  # a number that stands for none, as a softcap of 0
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
        places, sources = self._places, list[int]()
        makers = list[Callable[[], torch.Tensor]]()
        for one, name in zip_longest(results, call.declaration.results):
            place = places.get(name or "", places["spec"])  # None in all calls that are kept
            if one is not None and values[place] is None:
                place = len(values) + len(makers)
                makers.append(maker(one))
            sources.append(place)
        written = [i for i, one in zip(sources, results, strict=True) if one is not None]
        _, scalars = call.arguments(plan.details, results)
        numbers = [(place, places[name]) for place, name in enumerate(plan.draft.scalars)]
        return _Kind(
            plan,
            tuple(makers),
            _getter([*[places[name] for name, _ in call.read()], *written]),
            _getter(sources),
            (0,) * sum(getattr(call, name) is None for name in call.declaration.nulls),
            scalars,
            tuple([(place, index) for place, index in numbers if values[index] is not None]),
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
