"""The arguments of a function, declared once.

A call is a dataclass whose fields say what they are: a tensor, a number that kernels are handed, an
option, a result. From these follow the key of its plan, the names in messages, the addresses of a
launch, and what an operator takes (function.py has the function).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar, cast, dataclass_transform

import torch

from warploom.errors import ProblemError
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import call as calls
from warploom.runtime import dispatch
from warploom.runtime.call import Draft, Key
from warploom.runtime.counters import counters
from warploom.runtime.operands import dense_copy
from warploom.runtime.tensors import refuse_dual, require_tensors

# ---- How an argument is declared -----------------------------------------------------------------

_ROLE = "role"  # in the metadata of a field
_NOT_HANDED = object()


@dataclass(frozen=True, slots=True)
class _Role:
    """What is said of a field.

    kind      tensor, result, number, option, dtype or spec
    schema    its type in the schema of operators, and of a pair both types and names; "" for what
              does not cross by position
    aligned   whether the alignment of the tensor's address decides a plan
    null      kernels are handed the address 0 where the tensor is left out
    kernel    what kernels call the tensor; "" for the name of the argument
    public    it is an argument of the function
    grad      whether the tensor requires grad decides a plan
    encode, decode  what its value is as an operator's argument, and the other way round
    planned   its value decides a plan, of a number whether it is None
    """

    kind: str
    schema: str
    aligned: bool = False
    null: bool = False
    kernel: str = ""
    public: bool = True
    grad: bool = False
    planned: bool = True
    encode: Callable[[Any], Any] | None = None
    decode: Callable[[Any], Any] | None = None


def _declared(default: object, role: _Role) -> Any:  # noqa: ANN401 (as dataclasses.field)
    return field(default=default, metadata={_ROLE: role})


def tensor(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    schema: str | None = None,
    aligned: bool = True,
    null: bool = False,
    kernel: str = "",
    grad: bool = False,
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare a tensor that kernels read; one with a default may be left out.

    schema    other than `Tensor` or `Tensor?`, and a name where operators have an older one; "" for
              one that crosses by keyword. What follows "=" is its default there
    aligned   False where its address may be any: a plan serves all
    null      kernels are handed the address 0 where it is left out
    kernel    what kernels call it, where that is another name
    grad      True where a plan also depends on whether it requires grad
    """
    if schema is None:
        schema = "Tensor" if default is MISSING else "Tensor?"
    return _declared(default, _Role("tensor", schema, aligned, null, kernel, grad=grad))


def number(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    planned: bool = True,
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare a number that kernels are handed: if `planned`, whether it is None decides a plan."""
    return _declared(default, _Role("number", "float?", planned=planned))


def option(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    schema: str,
    planned: bool = True,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare what decides a plan by its value, unless it is not `planned`.

    A schema of two types and names is a pair's; "" is that of what does not cross by itself. An
    operator is handed what `encode` makes of the value, of which `decode` makes the value.
    """
    role = _Role("option", schema, planned=planned, encode=encode, decode=decode)
    return _declared(default, role)


def dtype(*, default: Any = MISSING) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare the type of the first result; None stands for that of a tensor given for it."""
    return _declared(default, _Role("dtype", "ScalarType?"))


def result(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    aligned: bool = True,
    public: bool = True,
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare where a result goes; the first such field is for the first result, and so on."""
    return _declared(default, _Role("result", "", aligned, public=public))


def named_spec(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    planned: bool = True,
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare a kernel, by itself or by its name: the one to run, unless it is not `planned`."""
    return _declared(default, _Role("spec", "str?", planned=planned))


Crossing = tuple[str, _Role]  # an argument of an operator: its name and what is said of it


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is said of the fields of a call.

    names       of all arguments of the function, in order
    tensors     names of what is read and of results, in order
    required    those of them that cannot be left out
    read, results, numbers, options   names by role; `options` are also dtype and spec
    aligned, grads  of each of `tensors`, whether its alignment, and that it requires grad, decides
                a plan
    graded      names of tensors of the latter
    tensors_of, read_of  take the tensors of a call, and those that are read
    planned_of, counted_of  take the options that decide a plan by their values, and the numbers
                that decide it by whether they are None
    nulls       names of tensors whose address is 0 where they are left out
    kernels     what kernels call what is read, by name
    crossing    what an operator takes by position
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    required: tuple[str, ...]
    read: tuple[str, ...]
    results: tuple[str, ...]
    numbers: tuple[str, ...]
    options: tuple[str, ...]
    aligned: tuple[bool, ...]
    grads: tuple[bool, ...]
    graded: tuple[str, ...]
    tensors_of: Callable[[object], tuple[Any, ...]]
    read_of: Callable[[object], tuple[Any, ...]]
    planned_of: Callable[[object], tuple[Any, ...]]
    counted_of: Callable[[object], tuple[Any, ...]]
    nulls: tuple[str, ...]
    kernels: Mapping[str, str]
    crossing: tuple[Crossing, ...]

    @property
    def schema(self) -> str:
        """What an operator takes by position, in the notation of torch."""
        return schema_of(self.crossing)

    def part(self, *names: str) -> tuple[Crossing, ...]:
        """What crosses by these names, in this order."""
        crossing = {name: (name, role) for name, role in self.crossing}
        return tuple(crossing[name] for name in names)


def written(name: str, schema: str) -> Crossing:
    """A result as an operator takes it by position: `schema` has type and name."""
    return name, _Role("result", schema)


def schema_of(crossing: Iterable[Crossing]) -> str:
    """What an operator takes of these arguments, in the notation of torch."""
    parts = ((name, *role.schema.partition("=")) for name, role in crossing)
    return ", ".join(
        types if " " in types else f"{types} {name}{equals}{default}"
        for name, types, equals, default in parts
    )


def _taking(names: tuple[str, ...]) -> Callable[[object], tuple[Any, ...]]:
    """What takes these attributes of a call, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda call: tuple([getattr(call, name) for name in names])


def _declaration(kind: type[Any]) -> Declaration:
    roles: list[tuple[Field[Any], _Role]] = [(one, one.metadata[_ROLE]) for one in fields(kind)]

    def names(*kinds: str, planned: tuple[bool, ...] = (True, False)) -> tuple[str, ...]:
        matching = ((one, role) for one, role in roles if role.kind in kinds)
        return tuple(one.name for one, role in matching if role.planned in planned)

    tensors = [(one, role) for one, role in roles if role.kind in ("tensor", "result")]
    return Declaration(
        names=tuple(one.name for one, role in roles if role.public),
        tensors=names("tensor", "result"),
        required=tuple(one.name for one, _ in tensors if one.default is MISSING),
        read=names("tensor"),
        results=names("result"),
        numbers=names("number"),
        options=names("option", "dtype", "spec"),
        aligned=tuple(role.aligned for _, role in tensors),
        grads=tuple(role.grad for _, role in tensors),
        graded=tuple(one.name for one, role in tensors if role.grad),
        tensors_of=_taking(names("tensor", "result")),
        read_of=_taking(names("tensor")),
        planned_of=_taking(names("option", "dtype", "spec", planned=(True,))),
        counted_of=_taking(names("number", planned=(True,))),
        nulls=tuple(one.name for one, role in tensors if role.null),
        kernels={one.name: role.kernel or one.name for one, role in tensors},
        crossing=tuple((one.name, role) for one, role in roles if role.schema),
    )


KindT = TypeVar("KindT")


@dataclass_transform(
    field_specifiers=(tensor, number, option, dtype, result, named_spec),
)
def declared(kind: type[KindT]) -> type[KindT]:
    """Make a dataclass of a class of Arguments, whose fields are declared by the functions above.

    Fields that are not public come last.
    """
    made: Any = dataclass(slots=True)(kind)
    made.declaration, made.kind = _declaration(made), made
    return cast("type[KindT]", made)


# ---- A call --------------------------------------------------------------------------------------


class Copying(Protocol):
    """What a plan's details say of operands that kernels cannot read where they lie."""

    @property
    def copies(self) -> tuple[str, ...]:
        """Their names."""
        ...


DetailsT = TypeVar("DetailsT", bound=Copying)
ResultsT = TypeVar("ResultsT", bound=tuple[torch.Tensor | None, ...])


class Declared:
    """The arguments of a call, as they were declared. The first tensor says where it runs.

    function     what users call, as messages name it
    nested, gradients   end the advice for nested tensors, and where torch.func wants gradients
    kind         the class that declares them, which classes that inherit it share plans by
    """

    __slots__ = ()
    function: ClassVar[str]
    nested: ClassVar[str] = ""
    gradients: ClassVar[str] = ""
    declaration: ClassVar[Declaration]
    kind: ClassVar[type]

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        number: int = getattr(self, self.declaration.tensors[0]).get_device()
        return number

    @property
    def kernel(self) -> KernelSpec | None:
        """The spec to run, where the call names one."""
        return dispatch.named(self.spec)  # type: ignore[attr-defined]

    @property
    def repeats(self) -> bool:
        """Whether another call like it launches the same, on the addresses of its own tensors."""
        return self.kernel is None

    def signature(self) -> Key:
        """Everything that decides the plan: how each tensor lies, and what is asked for."""
        declaration = self.declaration
        described = zip(
            declaration.tensors_of(self), declaration.aligned, declaration.grads, strict=True
        )
        return (
            self.kind,
            *[
                None
                if one is None
                else (
                    one.shape,
                    one.stride(),
                    one.dtype,
                    one.data_ptr() & 15 if aligned else 0,
                    one.get_device(),
                    one.is_neg(),
                    grad and one.requires_grad,
                )
                for one, aligned, grad in described
            ],
            *declaration.planned_of(self),
            *[number is None for number in declaration.counted_of(self)],
        )

    def named(self) -> list[tuple[str, torch.Tensor | None]]:
        """The tensors of the call, by the names that messages have for them."""
        return [(name, getattr(self, name)) for name in self.declaration.tensors]

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that is read, by the name that messages have for it."""
        names = self.declaration.read
        return [(name, one) for name in names if (one := getattr(self, name)) is not None]

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are given for a kernel to write."""
        names = self.declaration.results
        return [(name, one) for name in names if (one := getattr(self, name)) is not None]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        require_tensors(
            self.function,
            self.named(),
            self.declaration.required,
            nested=self.nested,
            gradients=self.gradients,
        )
        dispatch.named(self.spec)  # type: ignore[attr-defined]

    # ---- Operators -------------------------------------------------------------------------------

    def crossing(self) -> tuple[list[Any], dict[str, torch.Tensor | None]]:
        """What the operator is handed, by position and by keyword."""
        return self.encoded(self.declaration.crossing), {}

    @classmethod
    def crossed(cls, *given: Any, **written: torch.Tensor | None) -> Self:
        """The call of what an operator was handed."""
        return cls(**{**cls.decoded(cls.declaration.crossing, given), **cls.keywords(written)})

    def encoded(self, crossing: Iterable[Crossing]) -> list[Any]:
        """These arguments as an operator takes them."""
        values: list[Any] = []
        for name, role in crossing:
            value = getattr(self, name)
            if "," in role.schema:  # a pair
                values += (None, None) if value is None else value
            elif role.kind == "spec":
                values.append(value.name if isinstance(value, KernelSpec) else value)
            elif role.kind == "dtype" and value is None:
                result = getattr(self, self.declaration.results[0])
                values.append(None if result is None else result.dtype)
            else:
                values.append(value if role.encode is None else role.encode(value))
        return values

    @classmethod
    def decoded(cls, crossing: Iterable[Crossing], values: Iterable[Any]) -> dict[str, Any]:
        """The arguments that an operator took so; those that it was not handed are left out."""
        remaining, arguments = iter(values), dict[str, Any]()
        for name, role in crossing:
            value = next(remaining, _NOT_HANDED)
            if value is _NOT_HANDED:
                break
            if "," in role.schema:
                pair = value, next(remaining)
                value = None if pair == (None, None) else pair
            arguments[name] = value if role.decode is None else role.decode(value)
        return arguments

    @classmethod
    def keywords(cls, written: Mapping[str, torch.Tensor | None]) -> dict[str, Any]:
        """The arguments that an operator was handed by keyword."""
        return {**written}


class Arguments(Declared, ABC, Generic[DetailsT, ResultsT]):
    """What the calls of every declared function have.

    outputs      what kernels call the results
    no_gradient  value, rule and fix of the error for tensors that require grad
    """

    __slots__ = ()
    outputs: ClassVar[tuple[str, ...]]
    no_gradient: ClassVar[tuple[str, str, str]]

    @abstractmethod
    def draft(self, target: DeviceLimits) -> Draft[DetailsT]:
        """Check the call and choose its kernel."""

    @abstractmethod
    def results(self, details: DetailsT) -> ResultsT:
        """Where results go: as they were given, or new; None where one is not computed."""

    @abstractmethod
    def fake(self) -> ResultsT:
        """New results of an unchecked call on tensors without data."""

    @abstractmethod
    def check(self, details: DetailsT, results: ResultsT) -> None:
        """Raise ProblemError for memory that is missing or shared."""

    @abstractmethod
    def compute(self, details: DetailsT, results: ResultsT) -> None:
        """Write the results by plain torch operations."""

    def computed(self) -> tuple[bool, ...]:
        """Which of the results there are."""
        return (True,) * len(self.outputs)

    def scalars(self, details: DetailsT) -> tuple[float, ...]:
        """The numbers that kernels are handed."""
        return ()

    def refuse(self) -> None:
        """Raise ProblemError for tensors that autograd expects to see differentiated."""
        if torch.is_grad_enabled():
            for _, one in self.named():
                if one is not None and one.requires_grad:
                    value, rule, fix = self.no_gradient
                    raise ProblemError(value, rule=rule, fix=fix)

    def refuse_tangents(self) -> None:
        """Raise ProblemError for tensors that carry a forward-mode derivative."""
        refuse_dual(self.function, [one for _, one in self.named()])

    def copied(self, details: DetailsT) -> Self:
        """The same call, of contiguous copies of what kernels cannot read."""
        copies: dict[str, Any] = {}
        for name in details.copies:
            copies[name] = dense_copy(getattr(self, name))
            counters.add("copies")
        return replace(self, **copies)  # type: ignore[type-var]

    def addressed(self) -> tuple[str, ...]:
        """What kernels call the tensors whose addresses they are handed, in order."""
        kernels = self.declaration.kernels
        outputs = zip(self.outputs, self.computed(), strict=True)
        return (
            *[kernels[name] for name, _ in self.read()],
            *[name for name, is_computed in outputs if is_computed],
            *[kernels[name] for name in self.declaration.nulls if getattr(self, name) is None],
        )

    def arguments(self, details: DetailsT, results: ResultsT) -> calls.Arguments:
        """The addresses of tensors, as `addressed` names them, and the numbers."""
        nulls, tensors = self.declaration.nulls, (*self.declaration.read_of(self), *results)
        addresses = [one.data_ptr() for one in tensors if one is not None]
        if nulls:
            addresses += [0 for name in nulls if getattr(self, name) is None]
        return tuple(addresses), self.scalars(details)
