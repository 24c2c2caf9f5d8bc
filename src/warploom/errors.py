"""The errors Warploom raises: each names the value, the rule it breaks, and the fix.

Command-line exit codes follow the class: 1 the user's input, 2 compilation, 3 wrong result.
"""

from __future__ import annotations

import copyreg
import re

from warploom.printable import printable


class WarploomError(Exception):
    """Base of every error Warploom raises on purpose.

    `value` says what was met, `rule` what holds instead, `fix` what to do about it.
    """

    exit_code = 1

    def __init__(self, value: str, *, rule: str = "", fix: str = "") -> None:
        self.value = value
        self.rule = rule
        self.fix = fix
        super().__init__(printable(": ".join(part for part in (value, rule, fix) if part)))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy by message and attributes: what a subclass is made of is its own."""
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


class ConfigurationError(WarploomError):
    """A YAML file that cannot be read as a configuration; `value` starts with file:line: field."""


class SpecificationError(WarploomError):
    """An operation, schedule or kernel specification that breaks a rule of its family."""


class UnknownNameError(WarploomError):
    """A kernel, family, element or architecture name that Warploom does not know."""


class ProblemError(WarploomError, ValueError):
    """Arguments of a call that the operation does not accept: their values or their types."""


class DeviceError(WarploomError):
    """A GPU, driver or stream state in which the call cannot be made."""


class StoreError(WarploomError):
    """A kernel store that cannot be used as asked (permissions, hostile archives)."""


class RecordsError(WarploomError):
    """A file of tuned records, or a journal of measurements, that cannot be read or written."""


class KernelMissingError(WarploomError):
    """The store lacks kernels and WARPLOOM_COMPILE=forbid rules out compiling them.

    `kernels` has the names of all that are missing, not of the first alone.
    """

    def __init__(
        self, value: str, *, rule: str = "", fix: str = "", kernels: tuple[str, ...] = ()
    ) -> None:
        self.kernels = kernels
        super().__init__(value, rule=rule, fix=fix)


class ToolchainError(WarploomError):
    """NVRTC or a header set that is missing or of a version known not to work."""

    exit_code = 2


class CompilationError(WarploomError):
    """NVRTC rejected a source; the first error is the message, the rest hangs on the object.

    `lost` is True where nobody answered, as of a node that is gone: then it says nothing of the
    kernel.
    """

    exit_code = 2

    def __init__(self, name: str, *, log: str, source: str, lost: bool = False) -> None:
        self.name = name
        self.lost = lost
        self.log = log
        self.source = source
        lines = log.splitlines()
        first = next(
            (line for line in lines if re.search(r"\berror\s*:", line)), "".join(lines[:1])
        )
        super().__init__(
            f"{name}: {first.strip() or 'NVRTC gave no log'}",
            fix="the whole log and the source are on the error's `log` and `source`",
        )


class ResultError(WarploomError):
    """A kernel's result differs from the reference by more than its bound."""

    exit_code = 3
