"""Calls as a file has them: what was computed, on which shape, and what its tensors required.

That is all that chooses a kernel, so that a GPU which is not here can be asked for its choice
without the tensors and without the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from warploom.atomic_file import replace_file
from warploom.errors import ConfigurationError, WarploomError
from warploom.generator import json_file, rules
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.records import problem_text, restore_operation, restore_shape
from warploom.generator.shapes import Shape
from warploom.generator.specification import KernelSpec, Operation, counted, parse_name
from warploom.runtime import dispatch
from warploom.runtime.dispatch import Asked, Choice

SCHEMA = 1
SUFFIX = ".json"  # by which commands know a file of calls from a configuration
NONE = "none was made, or torch computed them, as it does for layers and sdpa on the CPU"
_FIX = "record the calls again with warploom.recording"


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A distinct call: an operation at a shape, or the kernel that the call named itself.

    requires   what the tensors of the call ask of a schedule (runtime/dispatch.py), a plain value
    """

    operation: Operation
    shape: Shape | None
    requires: object = None
    kernel: KernelSpec | None = None

    @classmethod
    def of(cls, choice: Choice) -> RecordedCall:
        """The call that a kernel was chosen for."""
        asked: Asked | None = choice.asked
        if asked is None:
            return cls(choice.spec.operation, None, None, choice.spec)
        return cls(asked.operation, asked.shape, asked.requires)

    def __str__(self) -> str:
        """The operation and the shape, for people."""
        return told(self.operation, self.shape)

    def choice(self, target: DeviceLimits) -> Choice:
        """The kernel that the call runs on a GPU, which need not be here."""
        if self.kernel is not None:
            return Choice(self.kernel, "the spec that was given")
        shape: Any = self.shape
        return dispatch.choose(self.operation, shape, device=target, requires=self.requires)

    def plain(self) -> dict[str, Any]:
        """The call as JSON values."""
        if self.kernel is not None:
            return {"kernel": self.kernel.name}
        shape: Any = self.shape
        found = {"operation": counted(self.operation), "shape": asdict(shape)}
        return found if self.requires is None else {**found, "requires": self.requires}


def told(operation: Operation, shape: Shape | None) -> str:
    """An operation at a shape, for people; without a shape, of a call that named its kernel."""
    if shape is None:
        return f"{operation.family}, by a kernel that the call named"
    return problem_text(operation, shape)


def write(path: Path, calls: Iterable[RecordedCall]) -> None:
    """Replace the file at `path` by one of these calls. OSError where it cannot be written."""
    listed = [json.dumps(one.plain()) for one in calls]
    lines = ",\n  ".join(listed)
    room = f"\n  {lines}\n " if listed else ""
    replace_file(path, f'{{"schema": {SCHEMA},\n "calls": [{room}]}}\n')


def holds_calls(path: Path) -> bool:
    """Whether a file is of recorded calls: a JSON object that has them, or none that can be read.

    False of all others: a configuration may be JSON as well, and says what is wrong with it.
    """
    if path.suffix != SUFFIX:
        return False
    try:
        found = json_file.parse(json_file.content(path))
    except (OSError, ValueError):
        return True
    return isinstance(found, dict) and ("calls" in found or "schema" in found)


def read(path: Path) -> list[RecordedCall]:
    """Return the calls of a file, each once; ConfigurationError for what is wrong in it."""
    try:
        document = json_file.parse(json_file.content(path))
    except OSError as error:
        raise ConfigurationError(
            f"{path}: {json_file.reason(error)}",
            rule="must be a file that warploom.recording wrote",
            fix="run the model inside of `with warploom.recording(...)` first",
        ) from error
    except ValueError as error:
        raise ConfigurationError(f"{path}: {error}", rule="must be JSON", fix=_FIX) from error
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA or not isinstance(document.get("calls"), list):
        told = "no calls" if schema == SCHEMA else f"schema {schema!r}"
        raise ConfigurationError(
            f"{path}: {told}",
            rule=f"must be a list of calls of schema {SCHEMA}",
            fix=f"{_FIX} of this version",
        )
    found: dict[RecordedCall, None] = {}
    for number, fields in enumerate(document["calls"], 1):
        try:
            found[_restored(fields)] = None
        except (WarploomError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path}: call {number}: {json_file.reason(error)}",
                rule="must be a call of this version's kernels",
                fix=_FIX,
            ) from error
    return list(found)


def _restored(fields: object) -> RecordedCall:
    """A call from its fields; an error of the package, KeyError or TypeError for what is none."""
    if not isinstance(fields, dict):
        raise TypeError(f"{fields!r} must be a JSON object")
    if "kernel" in fields:
        spec = parse_name(_word("kernel", fields["kernel"]))
        return RecordedCall(spec.operation, None, None, spec)
    plain = fields["operation"]
    if not isinstance(plain, dict):
        raise TypeError(f"operation {plain!r} must be a JSON object")
    known = family(_word("family", plain["family"]))
    operation = restore_operation(plain)
    if reasons := rules.fields(operation) or known.operation_reasons(operation):
        raise TypeError("; ".join(reasons))
    shape = restore_shape(operation.family, fields["shape"])
    requires = fields.get("requires")
    if requires is not None:
        _word("requires", requires)
    return RecordedCall(operation, shape, requires)


def _word(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} {value!r} must be a word")
    return value
