"""GPUs that kernels are chosen for on machines that have none: by name, from what is kept of them.

A name is enough where the GPU has a row in the table of kinds, or a user tuned on it. Of any other,
and of a MIG slice, the number of SMs must be given with it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from warploom.errors import RecordsError, UnknownNameError
from warploom.generator import records_file
from warploom.generator.gpus import DEFAULT, KINDS, known_names, of_product, resolve
from warploom.generator.launches import DeviceLimits
from warploom.generator.model import constants


def target(name: str) -> DeviceLimits:
    """Return the GPU that is called `name`, in any case and with or without its maker's.

    `NAME:MULTIPROCESSORS` is a part of one, or any variant of a product, which may have no row and
    nothing that is kept of it.
    Raises UnknownNameError for what kernels are not known to be for, and for more multiprocessors
    than it has; it lists the names that there are.
    """
    called, count = name, None
    if isinstance(name, str) and (given := re.fullmatch(r"([^:]+):\s*([1-9]\d{0,3})\s*", name)):
        called, count = given[1], int(given[2])
    elif isinstance(name, str) and (given := re.fullmatch(r"([^:]*\w[^:]*):([^:]*)", name)):
        raise UnknownNameError(
            f"GPU {name!r}",
            rule=f"must have its number of SMs after the colon, which {given[2]!r} is not",
            fix="write it as in 'H100 PCIe:114', or leave out the colon and what follows",
        )
    part = count is None and isinstance(name, str) and " mig " in name.casefold()
    gpu = resolve(called, (one.gpu for one in _tuned()), counted=count is not None or part)
    row = KINDS.get(gpu)
    if count is None:
        if row:
            return DeviceLimits(row.multiprocessors, gpu)
        for one in _tuned():
            if one.gpu == gpu:
                return one
        raise UnknownNameError(
            f"GPU {name!r}",
            rule="must be followed by its number of SMs: warploom has no data of this GPU",
            fix=f"write '{gpu}:SMS', with the number in its data sheet",
        )
    most = row.multiprocessors if row else DEFAULT.multiprocessors
    if count > most:
        raise UnknownNameError(
            f"GPU {name!r}",
            rule=f"{gpu} has at most {most} SMs",
            fix="give as many SMs as it has, or as a part of it has",
        )
    return DeviceLimits(count, gpu)


def names() -> list[str]:
    """The GPUs that have a row in the table, and those that constants or records are of."""
    return sorted({*known_names(), *(one.gpu for one in _tuned() if one.gpu not in KINDS)})


def _tuned() -> Iterator[DeviceLimits]:
    """The GPUs that there are files of: by their constants first, and then by their records."""
    for path in (*constants.files(), *records_file.every()):
        if (one := _read(path)) and of_product(one.gpu):
            yield one


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
