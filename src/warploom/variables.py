"""The environment variables that Warploom reads: the one list of them.

`choice` reads a variable that takes one of a few words. What `doctor`, `warploom --help` and the
guide say of variables comes from this list.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from warploom.errors import ConfigurationError
from warploom.suggestions import suggestion

PREFIX = "WARPLOOM_"


@dataclass(frozen=True, slots=True)
class Variable:
    """What a variable means; of `choices`, the first is the default."""

    meaning: str
    default: str
    choices: tuple[str, ...] = ()

    @property
    def told(self) -> str:
        """The meaning, and what holds where the variable is not set."""
        return f"{self.meaning} (default: {self.default})"


VARIABLES: Mapping[str, Variable] = {
    "WARPLOOM_CACHE_DIR": Variable("the kernel cache", "`warploom` in the user's cache folder"),
    "WARPLOOM_CACHE_PATH": Variable("stores that are only read, separated like PATH", "none"),
    "WARPLOOM_COMPILE": Variable(
        "`forbid`: a missing kernel is an error, never a stall", "allow", ("allow", "forbid")
    ),
    "WARPLOOM_RECORDS_DIR": Variable(
        "your records and journals", "`records` in the user's data folder"
    ),
    "WARPLOOM_RECORDS": Variable(
        "`ignore`: the defaults decide everywhere; `borrow`: the records and models of other GPU "
        "kinds do, as on a kind without its own",
        "use",
        ("use", "ignore", "borrow"),
    ),
    "WARPLOOM_AUTOTUNE": Variable(
        "`1`: tune the problems that calls meet; or the milliseconds of GPU time for each", "0"
    ),
    "WARPLOOM_LOG": Variable(
        "what is logged on standard error; `info`: a line for each kernel compiled or loaded",
        "warning",
        ("warning", "info", "debug"),
    ),
}


def choice(name: str, given: str | None = None) -> str:
    """Return `given`, or what a variable is set to, or its default.

    ConfigurationError for what is none of the variable's choices.
    """
    given, choices = given or os.environ.get(name), VARIABLES[name].choices
    if given and given not in choices:
        raise ConfigurationError(
            f"{name}={given}", rule=f"must be {_listed(choices)}", fix="set it to one of them"
        )
    return given or choices[0]


def autotune_milliseconds() -> float:
    """What WARPLOOM_AUTOTUNE is set to: 0 where nothing is to be tuned, 1 for the usual time.

    ConfigurationError for what is no number of 0 or more.
    """
    given = os.environ.get("WARPLOOM_AUTOTUNE") or "0"
    try:
        found = float(given)
    except ValueError:
        found = -1.0
    if not 0 <= found < math.inf:
        raise ConfigurationError(
            f"WARPLOOM_AUTOTUNE={given}",
            rule="must be 1, or the milliseconds of GPU time for a new problem",
            fix="set it to 1, or to nothing",
        )
    return found


def mistakes() -> dict[str, str]:
    """Return what is wrong with the variables that are set: those unknown, and values not taken."""
    found = {}
    for name in sorted(name for name in os.environ if name.startswith(PREFIX)):
        if name not in VARIABLES:
            near = suggestion(name, VARIABLES)
            found[name] = f"is not read: {near}" if near else "is not read"
            continue
        try:
            if VARIABLES[name].choices:
                choice(name)
            elif name == "WARPLOOM_AUTOTUNE":
                autotune_milliseconds()
        except ConfigurationError as error:
            found[name] = error.rule
    return found


@cache
def warn() -> None:
    """Log a warning for each variable that is set and not read, once in a process."""
    for name, told in mistakes().items():
        if name not in VARIABLES:  # a value that is not taken is an error where it is read
            logging.getLogger("warploom").warning("%s %s", name, told)


def _listed(words: tuple[str, ...]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]])
