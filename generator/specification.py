"""Operation x Schedule -> KernelSpec: what is computed, how, and for which architecture.

A spec that constructs is valid. Its identity is the digest of every field, but for those that
joined later (see knob.py) and are at their defaults; its name is a readable view that ends in 8
digits of the digest and parses back to the spec.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import Field, asdict, dataclass, fields, is_dataclass
from functools import cache, cached_property
from html import escape
from typing import Any, ClassVar, Generic, Protocol, Self

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.errors import SpecificationError, UnknownNameError
from warploom.generator import names
from warploom.generator.architectures import Architecture, architecture
from warploom.generator.families import every, family
from warploom.generator.knob import knobs, stored_names


def counted(value: Any) -> Any:  # noqa: ANN401 (a field's)
    """What of a dataclass, or of a field's value, its identity is made of."""
    if is_dataclass(value):
        kind: type = type(value)
        content: dict[str, Any] = {}
        for one, stored, later in _identifying(kind):
            item = getattr(value, one.name)
            if not (later and item == one.default):
                content[stored] = item if isinstance(item, str | int) else counted(item)
        return content
    return [counted(one) for one in value] if isinstance(value, tuple) else value


@cache
def _identifying(kind: type) -> tuple[tuple[Field[Any], str, bool], ...]:
    """The fields of a dataclass, the name each is stored by and whether it joined later."""
    said, stored = knobs(kind), stored_names(kind)
    return tuple((one, stored[one.name], said[one.name].later) for one in fields(kind))


class Operation(Protocol):
    """What is computed: a frozen dataclass of a family. Specs of one operation agree on results."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def family(self) -> str:
        """The name of its family."""
        ...


class Schedule(Protocol):
    """How it is computed: a frozen dataclass of a family."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    @property
    def tile(self) -> tuple[int, ...]:
        """What one block works on at a time, by dimension."""
        ...

    @property
    def threads(self) -> int:
        """Threads of one block."""
        ...


OperationT = TypeVar("OperationT", bound=Operation, covariant=True, default=Operation)
ScheduleT = TypeVar("ScheduleT", bound=Schedule, covariant=True, default=Schedule)


@dataclass(frozen=True)
class KernelSpec(Generic[OperationT, ScheduleT]):
    """One kernel: architecture, operation and schedule, checked against the family's rules."""

    arch: str
    operation: OperationT
    schedule: ScheduleT

    def __post_init__(self) -> None:
        known = family(self.operation.family)
        reasons = known.reasons(self.architecture, self.operation, self.schedule)
        if reasons:
            fix = "change the schedule (`warploom list FILE --rejected`)"
            raise SpecificationError("; ".join(reasons), fix=fix)

    @classmethod
    def of_legal(cls, arch: str, operation: Operation, schedule: Schedule) -> Self | None:
        """Return the spec of an operation that is legal; None where its schedule is not."""
        if family(operation.family).schedule_faults(architecture(arch), operation, schedule):
            return None
        spec = object.__new__(cls)
        for name, value in (("arch", arch), ("operation", operation), ("schedule", schedule)):
            object.__setattr__(spec, name, value)
        return spec

    @property
    def architecture(self) -> Architecture:
        """The architecture's row in the table."""
        return architecture(self.arch)

    @cached_property
    def fields(self) -> dict[str, Any]:
        """Every field, as plain JSON values."""
        return {
            "arch": self.arch,
            "operation": asdict(self.operation),
            "schedule": asdict(self.schedule),
        }

    @cached_property
    def canonical_json(self) -> str:
        """Every field that counts, with sorted keys and no white space: what the digest is of."""
        content = {
            "arch": self.arch,
            "operation": counted(self.operation),
            "schedule": counted(self.schedule),
        }
        return json.dumps(content, sort_keys=True, separators=(",", ":"))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the canonical JSON, in hex."""
        return hashlib.sha256(self.canonical_json.encode()).hexdigest()

    @cached_property
    def name(self) -> str:
        """The procedural name, see names.py: a C identifier, unique by its last 8 digits."""
        told = names.short(self.operation), names.short(self.schedule)
        return "_".join((self.operation.family, self.architecture.token, *told, self.digest[:8]))

    def _repr_html_(self) -> str:
        """Its name and what is not at its default, for notebooks, and how to see all of it."""
        rows = [("kernel", self.name), ("digest", self.digest)]
        for of, record in (("operation", self.operation), ("schedule", self.schedule)):
            rows += [
                (f"{of} {name}", str(value)) for name, value in counted(record).items() if value
            ]
        cells = "".join(
            f"<tr><th>{escape(name)}</th><td><code>{escape(text)}</code></td></tr>"
            for name, text in rows
        )
        code = escape(f'warploom.kernel_report("{self.name}", "kernel.html")')
        return f"<table>{cells}</table><p><code>{code}</code> shows its machine code.</p>"


def parse_name(name: str) -> KernelSpec:
    """Return the spec that `name`, of this version or an older one, names; or UnknownNameError."""
    for known in every():
        found = names.read(name, known.name, known.operation, known.schedule)
        if found is None:
            continue
        try:
            spec = KernelSpec(*found)
        except SpecificationError as error:
            raise UnknownNameError(f"kernel name {name!r}", rule=str(error)) from error
        if name.endswith(spec.digest[:8]):
            return spec
        raise UnknownNameError(
            f"kernel name {name!r}",
            rule=f"its digest is {spec.digest[:8]} for these fields",
            fix=f"the name may be from another version; this version's is {spec.name}",
        )
    raise UnknownNameError(
        f"kernel name {name!r}",
        rule="a name is family_arch_operation_schedule_digest",
        fix="`warploom list FILE` prints the names of a configuration",
    )
