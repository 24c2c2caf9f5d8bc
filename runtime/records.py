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
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from warploom.errors import RecordsError, ToolchainError
from warploom.generator import records_file
from warploom.generator.families import family
from warploom.generator.gpus import distance, file_name, kind, lenders
from warploom.generator.launches import DeviceLimits
from warploom.generator.locks import fork_lock
from warploom.generator.model import Constants, load, rescaled, shipped
from warploom.generator.records import Environment, Record, Records
from warploom.generator.toolchain import find
from warploom.variables import choice

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of a GPU kind: records, constants, and why some of it was not read.

    Constants are its own, and for families that it has none of another kind's.
    came   families that the package has records of this very kind of: others lend none of these
    """

    records: Records
    constants: Constants | None
    unread: tuple[str, ...] = ()
    came: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Lender:
    """What another GPU kind lends.

    octaves       how far that kind is from the borrower
    fitted, here  its constants, and what they should be on the borrower
    """

    records: Records
    octaves: float
    fitted: Constants | None
    here: Constants | None
    unread: tuple[str, ...] = ()


_known: dict[str, Known] = {}
_lent: dict[str, tuple[Lender, ...]] = {}
_learning = fork_lock()


def known(gpu: str) -> Known:
    """Return what is known of a GPU kind; of one without a name, and where told so, nothing."""
    found = _known.get(gpu)
    return _known.setdefault(gpu, _read(gpu)) if found is None else found


def lent(gpu: str, family_name: str | None = None) -> tuple[Lender, ...]:
    """Return what other kinds lend to one: those that the package has records of.

    Their files are read when they are first asked for, which a kind with records need not do.

    Args:
        gpu: The GPU kind that borrows.
        family_name: Only what decides calls of this family: nothing, where the package has records
            of it for `gpu`.
    """
    if family_name in known(gpu).came:
        return ()
    found = _lent.get(gpu)
    return _lent.setdefault(gpu, _lend(gpu)) if found is None else found


def learn(gpu: str, more: Iterable[Record]) -> None:
    """Decide by these records too, from the next choice on; plans keep their kernels."""
    with _learning:
        found = known(gpu)
        _known[gpu] = replace(found, records=found.records.merged(more))


def digest(gpu: str) -> str:
    """SHA-256, in hex, of the records that this process decides by on a GPU kind, lent ones too."""
    hashed = hashlib.sha256()
    for records in (known(gpu).records, *(one.records for one in lent(gpu))):
        hashed.update(records_file.text(records).encode())
    return hashed.hexdigest()


def _read(gpu: str) -> Known:
    use = choice("WARPLOOM_RECORDS")
    if use == "ignore" or not gpu:
        return Known(Records(gpu), None)
    own, unread = use == "use", list[str]()
    came = _file(records_file.shipped(gpu) if own else None, gpu, unread)
    records = came.merged(_file(user_file(gpu) if own else None, gpu, unread))
    constants = None
    try:
        constants = load(gpu, own=own)
    except RecordsError as error:
        unread.append(str(error))
        logger.warning("not read: %s", error)
    families = frozenset(one.operation.family for one in came)
    return Known(records, constants, tuple(unread), families)


def _lend(gpu: str) -> tuple[Lender, ...]:
    if choice("WARPLOOM_RECORDS") == "ignore" or not gpu:
        return ()
    found = []
    for other in lenders(gpu):
        if path := records_file.shipped(other.name):
            unread: list[str] = []
            came = _file(path, other.name, unread)
            records = came.merged(_file(user_file(other.name), other.name, unread))
            fitted = None
            with suppress(RecordsError):  # which `known` tells
                fitted = shipped(other.name)
            here = fitted and rescaled(fitted, gpu)
            octaves = distance(other, kind(gpu))
            found.append(Lender(records, octaves, fitted, here, tuple(unread)))
    return tuple(found)


def _file(path: Path | None, gpu: str, unread: list[str]) -> Records:
    """The records of a file; none where there is none, and of one that cannot be read."""
    try:
        return records_file.known(path, gpu) if path else Records(gpu)
    except RecordsError as error:
        unread.append(str(error))
        logger.warning("not read: %s", error)
        return Records(gpu)


def user_file(gpu: str) -> Path:
    """The file of this user's records of a GPU kind."""
    return records_file.folder() / file_name(gpu)


def forget() -> None:
    """Read the files again when they are next asked for; plans that exist keep their kernels."""
    _known.clear()
    _lent.clear()


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
