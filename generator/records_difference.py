"""What differs between two files of records: which problems would run another schedule, and how
much faster that is, as far as either file has measured both in one loop.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from warploom.errors import RecordsError
from warploom.generator.records import Record, Records, problem_key


@dataclass(frozen=True, slots=True)
class Difference:
    """A problem that the two decide otherwise; None of one that has no record of it.

    gain   the old schedule's time over the new one's; None where nobody measured both
    """

    old: Record | None
    new: Record | None
    gain: float | None = None


def differences(old: Records, new: Records) -> list[Difference]:
    """Every problem that runs another schedule by `new` than by `old`, in the order of problems.

    RecordsError for records of two GPU kinds.
    """
    if old.gpu != new.gpu:
        raise RecordsError(
            f"records of {old.gpu} and of {new.gpu}",
            rule="must be of one GPU kind",
            fix="compare those of each kind by themselves",
        )
    before, after = _newest(old), _newest(new)
    found = []
    for key in sorted(before.keys() | after.keys()):
        mine, its = before.get(key), after.get(key)
        if mine is None or its is None:
            found.append(Difference(mine, its))
        elif mine.best.schedule != its.best.schedule:
            found.append(Difference(mine, its, _gain(mine, its)))
    return found


def _newest(records: Iterable[Record]) -> dict[tuple[str, ...], Record]:
    """One record of each problem: of several, such as of two compilers, the last measured."""
    ordered = sorted(records, key=lambda record: record.when)
    return {problem_key(one.operation, one.shape): one for one in ordered}


def _gain(old: Record, new: Record) -> float | None:
    """By the newer file, where it timed both; else by the older one, else beside the default."""
    for record in (new, old):
        times = {one.schedule: one.seconds for one in record.contenders}
        if old.best.schedule in times and new.best.schedule in times:
            return times[old.best.schedule] / times[new.best.schedule]
    same = old.default and new.default and old.default.schedule == new.default.schedule
    if same and old.speedup and new.speedup:
        return new.speedup / old.speedup
    return None
