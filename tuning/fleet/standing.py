"""Whom to believe: every GPU is examined by one kernel, the anchor, and held against its kind.

One that is slower or faster than the others, whose clocks are held down, that others use too or
that has another driver, gives times that do not compare. Nothing here measures.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from statistics import median

from warploom.generator.restore import restore
from warploom.tuning.journal import Result

OFF = 0.03  # of the anchor's usual time: further from it is off


@dataclass(frozen=True, slots=True)
class Condition:
    """What its driver says of a GPU, beside any measurement.

    driver   its version; empty where nobody asked
    others   processes that use the GPU too
    slowed   why its clocks are held down; empty where they are not
    """

    driver: str = ""
    others: int = 0
    slowed: str = ""

    def checked(self) -> Condition:
        """Return it; SpecificationError if a node filled it with anything else."""
        return restore(Condition, asdict(self))


@dataclass(frozen=True, slots=True)
class Examination:
    """What became of the anchor on a GPU, and the GPU's condition just after."""

    anchor: Result
    condition: Condition


class Standing:
    """The last examination of each GPU, by its name."""

    def __init__(self) -> None:
        self._found: dict[str, Examination] = {}

    def __len__(self) -> int:
        return len(self._found)

    def note(self, name: str, examination: Examination) -> None:
        """Take what was found of a GPU, in place of what was known of it."""
        self._found[name] = examination

    def forget(self, name: str) -> None:
        """Leave a GPU out that has gone."""
        self._found.pop(name, None)

    def faults(self) -> dict[str, str]:
        """What is wrong with whom; nothing of those that are like their kind."""
        told = {name: self._fault(one) for name, one in self._found.items()}
        return {name: fault for name, fault in told.items() if fault}

    def _fault(self, one: Examination) -> str:
        found, condition = one.anchor, one.condition
        if found.outcome != "correct" or not found.seconds:
            return f"a kernel that is right on others ended as {found.outcome}: {found.reason}"
        if condition.slowed:
            return f"its clocks are held down: {condition.slowed}"
        if condition.others:
            return f"other processes use it: {condition.others}"
        usual = self._driver()
        if condition.driver and condition.driver != usual:
            return f"it has driver {condition.driver}, the others have {usual}"
        share = found.seconds / self._seconds() - 1
        if abs(share) > OFF:
            more = "longer" if share > 0 else "shorter"
            return (
                f"a kernel that takes {self._seconds() * 1e6:.1f} us on its kind takes "
                f"{found.seconds * 1e6:.1f} us on it, {abs(share):.1%} {more}"
            )
        return ""

    def _driver(self) -> str:
        """What most have; of as many, what was found first. One that did not say it has any."""
        counts = Counter(filter(None, (one.condition.driver for one in self._found.values())))
        return next((driver for driver, _ in counts.most_common(1)), "")

    def _seconds(self) -> float:
        """The usual time of the anchor; of two that differ, the shorter: faults make it longer."""
        times = [one.anchor.seconds for one in self._found.values() if one.anchor.seconds]
        return median(times) if len(times) > 2 else min(times)
