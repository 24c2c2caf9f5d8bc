"""The arguments of a function, declared once.

A call is a dataclass whose fields say what they are: a tensor, a number that kernels are handed, an
option, a result, or a compound of several tensors and numbers. From these follow the key of its
plan, the names in messages, the addresses of a launch, and what an operator takes (function.py has
the function and its warm calls).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from itertools import islice
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
_NOTHING: Mapping[str, Any] = {}
_NONE = (None,)


@dataclass(frozen=True, slots=True)
class _Role:
    """What is said of a field.

    kind      tensor, result, compound, number, option, dtype or spec
    schema    its type in the schema of operators, and of a pair both types and names; "" for what
              does not cross by position
    aligned   whether the alignment of the tensor's address decides a plan
    null      kernels are handed the address 0 where the tensor is left out
    kernel    what kernels call the tensor; "" for the name of the argument
    public    it is an argument of the function
    grad      whether the tensor requires grad decides a plan
    encode, decode  what its value is as an operator's argument, and the other way round
    planned   its value decides a plan, of a number whether it is None
    compound  what an argument of several tensors and numbers is made of
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
    compound: Compound | None = None


class Compound(ABC):
    """What is said of arguments that are made of several tensors and numbers.

    schema    the types and names of what an operator takes in their place
    values    the names that a function's own arguments have for its tensors and numbers
    trailing  its tensors come behind the results, where kernels are handed them
    """

    schema: ClassVar[str]
    values: tuple[str, ...] = ()
    trailing: ClassVar[bool] = False

    @abstractmethod
    def key(self, value: Any) -> object:  # noqa: ANN401 (the argument)
        """What of an argument decides a plan; it is not asked of one that is empty."""

    @abstractmethod
    def named(self, value: Any) -> list[tuple[str, torch.Tensor]]:  # noqa: ANN401
        """Its tensors, by the names that messages have for them."""

    def kernels(self, value: Any) -> tuple[str, ...]:  # noqa: ANN401
        """What kernels call them, in the order of `addresses`: by default as messages do."""
        return tuple(name for name, _ in self.named(value))

    def written(self, value: Any) -> list[tuple[str, torch.Tensor]]:  # noqa: ANN401
        """Those of them that kernels write, each by the keyword that operators have for it."""
        return []

    @abstractmethod
    def addresses(self, value: Any) -> tuple[int, ...]:  # noqa: ANN401
        """The addresses of its tensors, in the order in which kernels are handed them."""

    @abstractmethod
    def encode(self, value: Any) -> Sequence[object]:  # noqa: ANN401
        """What an operator is handed by position, as the schema has it."""

    @abstractmethod
    def decode(self, values: Sequence[Any], written: Mapping[str, torch.Tensor | None]) -> object:
        """The argument of what an operator was handed by position and by keyword."""


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


def dtype(
    *,
    default: Any = MISSING,  # noqa: ANN401 (as dataclasses.field)
    schema: str = "ScalarType?",
) -> Any:  # noqa: ANN401 (as dataclasses.field)
    """Declare the type of the first result; None stands for that of a tensor given for it."""
    return _declared(default, _Role("dtype", schema))


def compound(parts: Compound, *, default: Any = MISSING) -> Any:  # noqa: ANN401
    """Declare an argument of several tensors and numbers."""
    return _declared(default, _Role("compound", parts.schema, compound=parts))


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


Operand = tuple[str, Compound | None]  # a tensor, or what is made of several, by its field's name


@dataclass(frozen=True, slots=True)
class Declaration:
    """What is said of the fields of a call.

    names       of all arguments of the function, in order
    tensors     names of what is read and of results, in order
    required    those of them that cannot be left out
    results, numbers, options   names by role; `options` are also dtype and spec
    values      names of all tensors and numbers, as a function's own arguments have them
    graded      names of tensors where a plan depends on whether they require grad
    operands    tensors, results and compounds, in order, trailing ones last; `read`: those whose
                addresses come before results; `compounds`: the latter, of which `inner` are read
    decisive    takes the class that declares the arguments, and the options that decide a plan
    lying_of    takes the tensors whose addresses' alignment decides a plan; `further` others by
                name, each with whether its alignment, and that it requires grad, does
    counted     names of numbers that decide a plan by whether they are None
    read_of     takes the tensors of `read`
    nulls       names of tensors whose address is 0 where they are left out
    kernels     what kernels call what is read, by name
    crossing    what an operator takes by position
    """

    names: tuple[str, ...]
    tensors: tuple[str, ...]
    required: tuple[str, ...]
    results: tuple[str, ...]
    numbers: tuple[str, ...]
    options: tuple[str, ...]
    values: frozenset[str]
    graded: tuple[str, ...]
    operands: tuple[Operand, ...]
    read: tuple[Operand, ...]
    compounds: tuple[tuple[str, Compound], ...]
    inner: tuple[tuple[str, Compound], ...]
    decisive: Callable[[Any], Key]
    lying_of: Callable[[Any], tuple[torch.Tensor | None, ...]]
    further: tuple[tuple[str, bool, bool], ...]
    counted: tuple[str, ...]
    read_of: Callable[[Any], tuple[Any, ...]]
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


def places_of(crossing: Iterable[Crossing]) -> dict[str, int]:
    """Where an operator takes each of these arguments, by its name in the schema."""
    types = (one.partition("=")[0] for one in schema_of(crossing).split(", "))
    return {one.split()[-1]: place for place, one in enumerate(types)}


def _taking(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What takes these attributes of a call, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    if not names:
        return lambda call: ()
    (name,) = names
    return lambda call: (getattr(call, name),)


def _declaration(kind: type[Any]) -> Declaration:
    roles: list[tuple[Field[Any], _Role]] = [(one, one.metadata[_ROLE]) for one in fields(kind)]

    def names(*kinds: str) -> tuple[str, ...]:
        return tuple(one.name for one, role in roles if role.kind in kinds)

    tensors = [(one, role) for one, role in roles if role.kind in ("tensor", "result")]
    required = tuple(one.name for one, _ in tensors if one.default is MISSING)
    compounds = tuple((one.name, role.compound) for one, role in roles if role.compound)
    trailing = {name for name, parts in compounds if parts.trailing}
    operands = [(name, dict(compounds).get(name)) for name in names("tensor", "result", "compound")]
    operands.sort(key=lambda one: one[0] in trailing)
    read = tuple(one for one in operands if one[0] not in {*trailing, *names("result")})
    within = (name for _, parts in compounds for name in parts.values)
    options = [(one, role) for one, role in roles if role.kind in ("option", "dtype", "spec")]
    decisive = [one.name for one, role in options if role.planned]
    optional = [one.name for one, role in options if role.schema.startswith("Tensor")]
    lying = [one.name for one, role in tensors if role.aligned and not role.grad]
    return Declaration(
        names=tuple(one.name for one, role in roles if role.public),
        tensors=names("tensor", "result"),
        required=required,
        results=names("result"),
        numbers=names("number"),
        options=tuple(one.name for one, _ in options),
        values=frozenset((*names("tensor", "result", "number"), *optional, *within)),
        graded=tuple(one.name for one, role in tensors if role.grad),
        operands=tuple(operands),
        read=read,
        compounds=compounds,
        inner=tuple((name, parts) for name, parts in compounds if not parts.trailing),
        decisive=attrgetter("kind", *decisive),
        lying_of=_taking(lying),
        further=tuple(
            (one.name, role.aligned, role.grad) for one, role in tensors if one.name not in lying
        ),
        counted=tuple(one.name for one, role in roles if role.kind == "number" and role.planned),
        read_of=_taking([name for name, parts in read if parts is None]),
        nulls=tuple(one.name for one, role in tensors if role.null),
        kernels={one.name: role.kernel or one.name for one, role in tensors},
        crossing=tuple((one.name, role) for one, role in roles if role.schema),
    )


KindT = TypeVar("KindT")


@dataclass_transform(
    field_specifiers=(tensor, number, option, dtype, result, named_spec, compound),
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
ResultsT = TypeVar("ResultsT", bound=tuple[torch.Tensor | None, ...] | torch.Tensor)


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
        """Everything that decides the plan: how each tensor lies, and what is asked for.

        Every call that is not recognised asks, so there is no function in this.
        """
        declaration = self.declaration
        key = declaration.decisive(self)
        for one in declaration.lying_of(self):
            if one is None:
                key += _NONE
            else:
                key += (
                    one.shape,
                    one.stride(),
                    one.dtype,
                    one.data_ptr() & 15,
                    one.get_device(),
                    one.is_neg(),
                )
        for name, aligned, grad in declaration.further:
            one = getattr(self, name)
            if one is None:
                key += _NONE
            else:
                lies = one.shape, one.stride(), one.dtype, one.get_device(), one.is_neg()
                key += (*lies, aligned and one.data_ptr() & 15, grad and one.requires_grad)
        for name, parts in declaration.compounds:
            value = getattr(self, name)
            key += (parts.key(value),) if value else _NONE
        for name in declaration.counted:
            key += (getattr(self, name) is None,)
        return key

    def named(self) -> list[tuple[str, torch.Tensor | None]]:
        """The tensors of the call, by the names that messages have for them."""
        return self.tensors_of(self.declaration.operands)

    def tensors_of(self, operands: tuple[Operand, ...]) -> list[tuple[str, torch.Tensor | None]]:
        """The tensors of these operands, by the names that messages have for them."""
        tensors: list[tuple[str, torch.Tensor | None]] = []
        for name, parts in operands:
            value = getattr(self, name)
            if parts is None:
                tensors.append((name, value))
            elif value:
                tensors += parts.named(value)
        return tensors

    def read(self) -> list[tuple[str, torch.Tensor]]:
        """Every tensor that is read, by the name that messages have for it; not trailing ones."""
        named = self.tensors_of(self.declaration.read)
        return [(name, one) for name, one in named if one is not None]

    def trailing(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are read or written whose addresses come behind those of results."""
        tensors = list[tuple[str, torch.Tensor]]()
        for name, parts in self.declaration.compounds:
            value = getattr(self, name)
            if parts.trailing and value:
                tensors += parts.named(value)
        return tensors

    def written(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that are given for a kernel to write."""
        tensors = list[tuple[str, torch.Tensor]]()
        for name in self.declaration.results:
            one = getattr(self, name)
            if one is not None:
                tensors.append((name, one))
        for name, parts in self.declaration.compounds:
            if value := getattr(self, name):
                tensors += parts.written(value)
        return tensors

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        require_tensors(
            self.function,
            self.named(),
            self.declaration.required,
            nested=self.nested,
            gradients=self.gradients,
        )
        if self.spec is not None:  # type: ignore[attr-defined]
            dispatch.named(self.spec)  # type: ignore[attr-defined]

    # ---- Operators -------------------------------------------------------------------------------

    def crossing(self) -> tuple[list[Any], dict[str, torch.Tensor | None]]:
        """What the operator is handed, by position and by keyword."""
        written: dict[str, torch.Tensor | None] = {}
        for name, parts in self.declaration.compounds:
            written |= dict(parts.written(getattr(self, name)))
        return self.encoded(self.declaration.crossing), written

    @classmethod
    def crossed(cls, *given: Any, **written: torch.Tensor | None) -> Self:
        """The call of what an operator was handed."""
        arguments = cls.decoded(cls.declaration.crossing, given, written)
        return cls(**{**arguments, **cls.keywords(written)})

    def encoded(self, crossing: Iterable[Crossing]) -> list[Any]:
        """These arguments as an operator takes them."""
        values: list[Any] = []
        for name, role in crossing:
            value = getattr(self, name)
            if role.compound is not None:
                values += role.compound.encode(value)
            elif "," in role.schema:  # a pair
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
    def decoded(
        cls,
        crossing: Iterable[Crossing],
        values: Iterable[Any],
        written: Mapping[str, torch.Tensor | None] = _NOTHING,
    ) -> dict[str, Any]:
        """The arguments that an operator took so; those that it was not handed are left out."""
        remaining, arguments = iter(values), dict[str, Any]()
        for name, role in crossing:
            parts = [*islice(remaining, 1 + role.schema.count(","))]
            if not parts:
                break
            if role.compound is not None:
                arguments[name] = role.compound.decode(parts, written)
                continue
            value = parts[0]
            if len(parts) > 1:
                value = None if parts == [None, None] else tuple(parts)
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
        kernels, names = self.declaration.kernels, list[str]()
        for name, parts in self.declaration.read:
            value = getattr(self, name)
            if parts is not None:
                names += parts.kernels(value)
            elif value is not None:
                names.append(kernels[name])
        for name, is_computed in zip(self.outputs, self.computed(), strict=True):
            if is_computed:
                names.append(name)
        for name in self.declaration.nulls:
            if getattr(self, name) is None:
                names.append(kernels[name])
        return tuple(names)

    def arguments(self, details: DetailsT, results: ResultsT) -> calls.Arguments:
        """The addresses of tensors, as `addressed` names them, and the numbers."""
        addresses = list[int]()
        for one in (*self.declaration.read_of(self), *results):
            if one is not None:
                addresses.append(one.data_ptr())
        for name in self.declaration.nulls:
            if getattr(self, name) is None:
                addresses.append(0)
        return tuple(addresses), self.scalars(details)

    def numbered(self, draft: Draft[DetailsT]) -> tuple[str, ...]:
        """The names that arguments have for the numbers that kernels are handed, in order."""
        return draft.scalars
