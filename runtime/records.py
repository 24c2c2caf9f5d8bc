"""The records and constants that this process decides by: what came with the package, and a user's.

They are read once for each GPU kind. A file that cannot be read is left out with a warning, and
`explain` says so; `warploom records show` has the error. WARPLOOM_RECORDS=ignore leaves all of them
out.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from warploom.errors import RecordsError, ToolchainError
from warploom.generator import records_file
from warploom.generator.families import family
from warploom.generator.gpus import file_name
from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import ForkLock
from warploom.generator.model import Constants
from warploom.generator.model.constants import load
from warploom.generator.records import Environment, Record, Records
from warploom.generator.toolchain import find
from warploom.variables import choice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a GPU kind: records, constants, and why some of it was not read."""

    records: Records
    constants: Constants | None
    unread: tuple[str, ...] = ()


_known: dict[str, Known] = {}
_learning = ForkLock()


def known(gpu: str) -> Known:
    """Return what is known of a GPU kind; of one without a name, and where told so, nothing."""
    found = _known.get(gpu)
    return _known.setdefault(gpu, _read(gpu)) if found is None else found


def learn(gpu: str, more: Iterable[Record]) -> None:
    """Decide by these records too, from the next choice on; plans keep their kernels."""
    with _learning:
        found = known(gpu)
        _known[gpu] = replace(found, records=found.records.merged(more))


def digest(gpu: str) -> str:
    """SHA-256, in hex, of the records of a GPU kind that this process decides by."""
    return hashlib.sha256(records_file.text(known(gpu).records).encode()).hexdigest()


def _read(gpu: str) -> Known:
    if choice("WARPLOOM_RECORDS") == "ignore" or not gpu:
        return Known(Records(gpu), None)
    records, unread = Records(gpu), []
    came = records_file.shipped(gpu)
    for path in (came, user_file(gpu)) if came else (user_file(gpu),):
        try:
            records = records.merged(records_file.known(path, gpu))
        except RecordsError as error:
            unread.append(str(error))
    constants = None
    try:
        constants = load(gpu)
    except RecordsError as error:
        unread.append(str(error))
    for reason in unread:
        logger.warning("not read: %s", reason)
    return Known(records, constants, tuple(unread))


def user_file(gpu: str) -> Path:
    """The file of this user's records of a GPU kind."""
    return records_file.folder() / file_name(gpu)


def forget() -> None:
    """Read the files again when they are next asked for; plans that exist keep their kernels."""
    _known.clear()


def environment(device: DeviceLimits, family_name: str) -> Environment:
    """What a measurement on `device` depends on, beside the problem."""
    revision = family(family_name).revision
    return Environment(device.gpu, device.multiprocessors, device.nvrtc, revision)


@cache
def nvrtc() -> str | None:
    """NVRTC's major.minor; None where there is no compiler."""
    try:
        return ".".join(find().versions["NVRTC"].split(".")[:2])
    except ToolchainError:
        return None
