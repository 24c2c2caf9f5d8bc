"""A family's measured table: which schedules a problem may have for which nothing was tuned.

configs/NAME/schedules.yaml has classes of problems, each with its schedules; the first class that
a problem is in is its own. A class, or a schedule of it, states conditions on features of the
problem: [low, high] is an inclusive range, a list of words has what the feature may be, anything
else is its value. What features there are, and which schedule of a class comes first, the family
says; where it says nothing, these are the fields of operation and shape, and the first listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from functools import cached_property
from typing import Any, Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator import configurations
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import LARGEST, Shape
from warploom.generator.specification import KernelSpec, Operation, Schedule

OperationT = TypeVar("OperationT", bound=Operation, default=Any)
ScheduleT = TypeVar("ScheduleT", bound=Schedule, default=Any)
ShapeT = TypeVar("ShapeT", bound=Shape, default=Any)

Feature = int | str  # a number, of which True is one, or a word
Row = Mapping[str, Any]  # fields of a schedule, conditions, its `cost`, and whether it is `last`
Demand = tuple[str, str]  # a rule that a schedule breaks, and the fix


class Table(Generic[OperationT, ScheduleT, ShapeT]):
    """What a family knows of choosing a kernel, beside which ones are legal.

    `requires`, of which several methods are told, is what the tensors of a call ask of a schedule,
    as the family has it: None for a family whose tensors ask nothing.

    kinds     features that tell kinds of kernels: the model chooses among the schedules of all
              classes of a problem's kind
    advice    what to do about an operation that is not legal
    family    whose table it is
    unsuited  why no schedule of a space may suit a problem, and what to do about that
    """

    kinds: tuple[str, ...] = ()
    advice = "leave out what is not supported"
    unsuited: Demand = ("none of them is legal for this operation", "add others")

    def __init__(self, family: str) -> None:
        self.family = family

    @cached_property
    def classes(self) -> tuple[dict[str, Any], ...]:
        """The classes, as they stand in the file."""
        return tuple(configurations.table(self.family)["classes"])

    def features(self, operation: OperationT, shape: ShapeT) -> dict[str, Feature]:
        """What conditions of the table may be stated on, of a problem."""
        said = {one.name: getattr(of, one.name) for of in (operation, shape) for one in fields(of)}
        return {name: value for name, value in said.items() if isinstance(value, int | str)}

    def first(self, operation: OperationT, shape: ShapeT) -> dict[str, Any]:
        """The class of a problem."""
        features = self.features(operation, shape)
        return next(row for row in self.classes if _holds(row, features))

    def rows(self, operation: OperationT, shape: ShapeT) -> Iterator[Row]:
        """The schedules of a problem's class that are for it."""
        features = self.features(operation, shape)
        rows = self.first(operation, shape)["schedules"]
        return (row for row in rows if _holds(row, features))

    def portfolio(self, operation: OperationT, shape: ShapeT) -> Iterator[Row]:
        """What the model chooses from: the class that is told by a problem's kind alone.

        Where there is none, the schedules of all classes of the kind, whatever their conditions.
        """
        features = self.features(operation, shape)
        kind = {name: features[name] for name in self.kinds}
        own = [one for one in self.classes if _holds(one, kind)]
        every = [one for one in own if one.keys() == {*self.kinds, "schedules"}] or own
        return (row for one in every for row in one["schedules"])

    def kernels(
        self, operation: OperationT, shape: ShapeT, arch: str, requires: object = None
    ) -> Iterator[KernelSpec]:
        """Those of the portfolio that a legal operation can have, as its tensors require it."""
        rows = self.portfolio(operation, shape)
        found = (self.kernel(row, operation, shape, arch, requires) for row in rows)
        return (one for one in found if one is not None)

    def kernel(
        self, row: Row, operation: OperationT, shape: ShapeT, arch: str, requires: object = None
    ) -> KernelSpec | None:
        """The kernel of a row for a legal operation, in the first way that is legal, if any is."""
        complete = family(self.family).complete
        for way in self.fields(row, operation, shape, requires):
            spec = KernelSpec.of_legal(arch, operation, complete(arch, operation, way))
            if spec is not None:
                return spec
        return None

    def refuse(
        self, row: Row, operation: OperationT, shape: ShapeT, arch: str, requires: object = None
    ) -> None:
        """Raise SpecificationError with the rule that a row's kernel breaks, in its last way."""
        *_, way = self.fields(row, operation, shape, requires)
        KernelSpec(arch, operation, family(self.family).complete(arch, operation, way))

    def fields(
        self, row: Row, operation: OperationT, shape: ShapeT, requires: object
    ) -> Iterable[dict[str, Any]]:
        """The fields of a row's schedule; where there are several, the first legal ones count."""
        apart = {"cost", "last", *self.features(operation, shape)}
        found = {name: _plain(value) for name, value in row.items() if name not in apart}
        return self.variants(found, requires)

    # ---- What families differ in -----------------------------------------------------------------

    def modelled(self, operation: OperationT) -> bool:
        """Whether the model may choose for an operation: it was held against such ones."""
        return True

    def uses_near_records(self, operation: OperationT) -> bool:
        """Whether the record of a near shape decides before this table.

        It does unless it chose worse where each tuned shape was left out of the records in turn.
        """
        return True

    def timed_as(self, operation: OperationT) -> OperationT:
        """The operation whose records tell of one that has none: its own, or a plainer one."""
        return operation

    def variants(self, fields: dict[str, Any], requires: object) -> Iterable[dict[str, Any]]:
        """The fields of a listed schedule as a call may have it, the best first."""
        return (fields,)

    def order(
        self,
        row: Row,
        schedule: ScheduleT,
        shape: ShapeT,
        device: DeviceLimits,
        requires: object,
    ) -> tuple[float, ...]:
        """What a class's schedules are ordered by, the least first; equal ones stay as listed."""
        return ()

    def reason(self, operation: OperationT, shape: ShapeT, order: tuple[float, ...]) -> str:
        """Why the table has the schedule that came first, with this order."""
        return "default table: first of its class"

    def required(self, operation: OperationT, shape: ShapeT) -> object:
        """What dense tensors of a shape require."""
        return None

    def fitted(self, schedule: ScheduleT, requires: object) -> ScheduleT:
        """A schedule that was measured for other tensors, as these require it."""
        return schedule

    def lacks(self, schedule: ScheduleT, requires: object) -> Demand | None:
        """What a schedule that was asked for lacks for tensors."""
        return None

    def suits(self, schedule: ScheduleT, shape: ShapeT) -> bool:
        """Whether a schedule, legal as it is, is worth a thought for a shape."""
        return True

    def serves(self, have: OperationT, wanted: OperationT) -> bool:
        """Whether kernels of one operation compute what another one is wanted for."""
        return have == wanted


def _plain(value: Any) -> Any:  # noqa: ANN401 (of YAML)
    return tuple(value) if isinstance(value, list) else value


def _holds(row: Row, features: Mapping[str, Feature]) -> bool:
    """True where a row states nothing of these features that is not so."""
    return all(_met(row[name], feature) for name, feature in features.items() if name in row)


def _met(condition: Any, feature: Feature) -> bool:  # noqa: ANN401 (of YAML)
    if not isinstance(condition, list):
        return bool(condition == feature)
    if isinstance(feature, str):
        return feature in condition
    low, high = condition
    return bool(low <= min(feature, LARGEST) <= high)  # of more, launches tell
