"""What measuring and showing ask of a family: peers/NAME.py has one `FAMILY`, found by looking."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from benchmarks import peers
from benchmarks.problems import COUNT
from warploom.generator.configurations import cells
from warploom.generator.specification import KernelSpec
from warploom.runtime.contest import Contender, Floor, Sampling
from warploom.runtime.measure import graph_sampler
from warploom.tuning import problems as tuning

BEFORE = "warploom, before tuning"  # a contender: by the kernel of a call before it was tuned

CellJson = Mapping[str, Any]
Problem = Mapping[str, Any]  # of a cell, as JSON has it


@dataclass(frozen=True, slots=True)
class Asked:
    """What a run is to measure; what is empty leaves nothing out.

    `specs` are kernels that compete where they compute what a cell does, `baseline` a source to be
    compiled beside ours; `profile`: say where the time of Warploom's calls goes; `seed` and `count`
    are of problems that are drawn; `before` has the kernels that calls ran before their problems
    were tuned, by what tuning calls these.
    """

    cells: tuple[str, ...] = ()
    peers: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    m: tuple[int, ...] = ()
    match: str = ""
    specs: tuple[KernelSpec, ...] = ()
    baseline: Path | None = None
    seed: int = 0
    count: int = COUNT
    before: Mapping[str, str] = field(default_factory=dict)
    device: str = "cuda"
    profile: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """A cell that can be measured: `contenders` makes their operands, ours first.

    `again`: it is measured once more where its times are unsteady. `tuned` is what tuning calls its
    problem; "" of one that is not tuned.
    """

    name: str
    problem: Problem
    floor: Floor | None
    contenders: Callable[[Asked], Sequence[Contender]]
    sampler: Sampling = graph_sampler
    rounds: int = 9
    discarded: int = 2
    gpu: bool = True
    gradients: bool = False
    again: bool = True
    tuned: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """A set of cells: the title of its section, the README's row, and what measures it.

    `{kind}` in both, and each field of a problem in `row`, is replaced. Ratios of what is `listed`
    say little. One without `cases` was measured once and is only shown. `about` tells its cases
    from others of the same title. What is `fixed` is compared with the same contenders whatever
    peers are asked for.
    """

    title: str
    cases: Callable[[Asked], Iterable[Case]] | None = None
    row: str = ""
    listed: bool = False
    about: str = ""
    fixed: bool = False


@dataclass(frozen=True, kw_only=True)
class Family:
    """A family: its cells, their contenders, and how pages speak of them.

    groups    its sets of cells by name, in the order of pages
    grid      those that are measured where none is named, and drawn together
    kinds     its types, and what pages call its cells of each
    peers     their names, and those of their contenders, in the order of a legend
    axis      what `at` is, in a word and in a picture
    called    contenders that pages call something else
    absences  what a peer's own words mean
    divided   what `division` is
    drawn     what a picture of rates says of its cells
    examined  a problem by which GPUs of a cluster are examined: of about 200 us
    """

    name: str
    groups: Mapping[str, Group]
    grid: tuple[str, ...]
    kinds: Mapping[str, str]
    peers: Mapping[str, str]
    axis: tuple[str, str]
    called: Mapping[str, str] = field(default_factory=dict)
    absences: Mapping[str, str] = field(default_factory=dict)
    divided: str = "type"
    drawn: str = ""
    examined: tuning.Problem | None = None

    def at(self, problem: Problem) -> int:
        """The number along which a subject is measured: M, where the family says nothing."""
        return int(problem["m"])

    def subject(self, problem: Problem) -> str:
        """What a cell is of, but for `at`."""
        raise NotImplementedError

    def size(self, problem: Problem) -> tuple[int, ...]:
        """What cells are sorted by."""
        return (self.at(problem),)

    def flops(self, problem: Problem) -> float | None:
        """The work of a call, where that is counted; None where bytes decide."""
        return None

    def division(self, problem: Problem) -> str:
        """The line of its section's totals that a cell counts in: its operation's, or type's."""
        return str(problem.get("operation", problem.get("type", "all")))

    def label(self, cell: CellJson) -> str:
        """The name of a cell in a table."""
        return str(cell["name"])

    def further(self, cell: CellJson) -> Mapping[str, str]:
        """Columns of a table that its cells have beside those of every family."""
        return {}

    def panel(self, problem: Problem) -> tuple[str, str] | None:
        """Where rates over `at` are drawn, by row and column; None of all: ratios are, as a map."""
        return None


@cache
def families() -> dict[str, Family]:
    """Every family by name, in the order of cells.yaml."""
    names = [module.name for module in iter_modules(peers.__path__) if not module.ispkg]
    known = [name for name in names if not name.startswith("_")]
    order = [*cells()]
    return {
        name: import_module(f"{peers.__name__}.{name}").FAMILY
        for name in sorted(known, key=lambda name: [*order, name].index(name))
    }


def family_of(cell: CellJson) -> Family:
    """The family that a cell is of."""
    return families()[cell["problem"]["family"]]


def group_of(cell: CellJson) -> Group:
    """The set of cells that a cell is of."""
    return family_of(cell).groups[cell["problem"]["cells"]]
