"""GPUs that kernels are chosen for on machines that have none: by name, from what is kept of them.

A name is enough where the GPU has a row in the table of kinds, or a user tuned on it. Of any other
its number of multiprocessors must be known: the table of schedules depends on nothing else.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from warploom.errors import RecordsError, UnknownNameError
from warploom.generator import records_file
from warploom.generator.gpus import KINDS, file_name
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import constants


def target(name: str) -> DeviceLimits:
    """Return the GPU that is called `name`, in any case and with or without its maker's.

    `NAME:MULTIPROCESSORS` is one that nothing is kept of, or a part of one. Raises UnknownNameError
    listing the names that there are.
    """
    pattern = r"\s*([^\s:][^:]*?)\s*(?::\s*([1-9]\d{0,3}))?\s*"
    given = re.fullmatch(pattern, name) if isinstance(name, str) else None
    if given:
        called, count = given.groups()
        found = _find(called)
        if count:
            return DeviceLimits(int(count), found.gpu if found else called)
        if found:
            return found
    raise UnknownNameError(
        f"GPU {name!r}",
        rule=f"must be one that is known or was tuned on: {', '.join(names())}",
        fix="name one of them, or any GPU with its multiprocessors, as 'NVIDIA H100 PCIe:114'",
    )


def names() -> list[str]:
    """The GPUs that have a row in the table, and those that constants or records are of."""
    found = (_read(path) for path in (*constants.files(), *records_file.every()))
    return sorted({*KINDS, *(one.gpu for one in found if one)})


def _find(name: str) -> DeviceLimits | None:
    """What its row says of a GPU, or else a file of it: its constants, or its records."""
    wanted = (file_name(name), file_name(f"nvidia {name}"))
    for row in KINDS.values():
        if file_name(row.name) in wanted:
            return DeviceLimits(row.multiprocessors, row.name)
    paths = [path for path in (*constants.files(), *records_file.every()) if path.name in wanted]
    return next((found for path in paths if (found := _read(path))), None)


def _read(path: Path) -> DeviceLimits | None:
    """The GPU of a file of constants or records; None of one that cannot be read, or has none."""
    with suppress(RecordsError):
        if path in constants.files():
            known = constants.read(path)
            return DeviceLimits(known.multiprocessors, known.gpu)
        kept = records_file.read(path)
        counts = [record.environment.multiprocessors for record in kept]
        return DeviceLimits(max(counts), kept.gpu) if counts else None
    return None
