"""The records and constants that this process decides by: what came with the package, and a user's.

They are read once for each GPU kind. A file that cannot be read is left out with a warning, and
`explain` says so; `warploom records show` has the error. WARPLOOM_RECORDS=ignore leaves all of them
out.

What a kind has no record of, another kind's may tell: they are lent, kept apart from its own, and
never written to its file. WARPLOOM_RECORDS=borrow leaves a kind's own out, and so measures that.
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
from warploom.generator.gpus import distance, file_name, kind, lenders
from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import ForkLock
from warploom.generator.model import Constants, load, rescaled, shipped
from warploom.generator.records import Environment, Record, Records
from warploom.generator.toolchain import find
from warploom.variables import choice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lent:
    """What another GPU kind lends.

    octaves       how far that kind is from the borrower
    fitted, here  its constants, and what they should be on the borrower
    """

    records: Records
    octaves: float
    fitted: Constants | None
    here: Constants | None


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a GPU kind: its records, what others lend, and what was not read, and why.

    Constants are its own, and for families that it has none of another kind's.
    """

    records: Records
    constants: Constants | None
    unread: tuple[str, ...] = ()
    lent: tuple[Lent, ...] = ()


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
    """SHA-256, in hex, of the records that this process decides by on a GPU kind, lent ones too."""
    found, hashed = known(gpu), hashlib.sha256()
    for records in (found.records, *(one.records for one in found.lent)):
        hashed.update(records_file.text(records).encode())
    return hashed.hexdigest()


def _read(gpu: str) -> Known:
    use = choice("WARPLOOM_RECORDS")
    if use == "ignore" or not gpu:
        return Known(Records(gpu), None)
    unread: list[str] = []
    records = _records(gpu, unread) if use == "use" else Records(gpu)
    constants, lent = None, []
    try:
        constants = load(gpu, own=use == "use")
        for lender in lenders(gpu):
            if records_file.shipped(lender.name):
                fitted = shipped(lender.name)
                octaves = distance(lender, kind(gpu))
                here = fitted and rescaled(fitted, gpu)
                lent.append(Lent(_records(lender.name, unread), octaves, fitted, here))
    except RecordsError as error:
        unread.append(str(error))
    for reason in unread:
        logger.warning("not read: %s", reason)
    return Known(records, constants, tuple(unread), tuple(lent))


def _records(gpu: str, unread: list[str]) -> Records:
    """The records that came with the package and the user's; notes what is not read, and why."""
    records, came = Records(gpu), records_file.shipped(gpu)
    for path in (came, user_file(gpu)) if came else (user_file(gpu),):
        try:
            records = records.merged(records_file.known(path, gpu))
        except RecordsError as error:
            unread.append(str(error))
    return records


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
