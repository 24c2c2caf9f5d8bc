"""Collecting a store's garbage: kernels by age or size, and what crashes left behind.

Other processes may use the store meanwhile. Whatever they lose to a collection is a miss to
them, never half a kernel: a record goes before the cubin it names, and loose files are left
alone until they are too old to belong to a write in progress.
"""

from __future__ import annotations

import math
import shutil
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from warploom.errors import StoreError
from warploom.generator import json_file
from warploom.generator.store import Store
from warploom.generator.store_directory import ROOMS, Directory, size

GRACE_SECONDS = 3600.0  # no write takes this long


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection removed: kernels, leftovers (files), and the bytes of both."""

    kernels: int
    leftovers: int
    bytes: int


class _Kernel(NamedTuple):
    """Where one kernel lies, and the time of its last use (seconds since 1970)."""

    used: float
    key: str
    record: Path
    source: Path
    object: Path


def collect(
    store: Store, *, max_bytes: int | None = None, older_than: float | None = None
) -> Collected:
    """Remove kernels unused for `older_than` seconds, then the longest unused past `max_bytes`.

    Either way sweeps quarantined files, and temporary and unreferenced ones of over an hour ago.
    Bytes are those of records and compressed cubins. StoreError if the store has no directory, a
    limit is negative or not finite, or a file cannot be removed.
    """
    directory = store.require_directory("a collection")
    for name, limit in (("max_bytes", max_bytes), ("older_than", older_than)):
        if limit is not None and not 0 <= limit < math.inf:
            raise StoreError(
                f"{name} {limit}", rule="must be finite, and 0 or more", fix="give another limit"
            )
    try:
        kept, kernels, freed = _evict(_kernels(directory), max_bytes, older_than)
        leftovers = [(path, size(path)) for path in _leftovers(directory, kept)]
        for path, _ in leftovers:
            path.unlink(missing_ok=True)
        for path in (directory.path / "quarantine").glob("*/"):
            with suppress(FileNotFoundError):  # another collection was first
                shutil.rmtree(path)
    except OSError as error:
        raise StoreError(
            f"{error.filename or directory.path}: {json_file.reason(error)}",
            rule="a collection removes files",
            fix="check the permissions of the store",
        ) from error
    return Collected(kernels, len(leftovers), freed + sum(count for _, count in leftovers))


def _kernels(directory: Directory) -> list[_Kernel]:
    """Return every kernel that has a record, longest unused first."""
    return sorted(
        _Kernel(
            used=_modified(directory.record_path(record.key)),
            key=record.key,
            record=directory.record_path(record.key),
            source=directory.source_path(record),
            object=directory.object_path(record),
        )
        for record in directory.records()
    )


def _evict(
    kernels: list[_Kernel], max_bytes: int | None, older_than: float | None
) -> tuple[list[_Kernel], int, int]:
    """Remove kernels, longest unused first; return those left, how many went, and their bytes."""
    users = Counter(kernel.object for kernel in kernels)
    before = remaining = sum(map(size, [*users, *(kernel.record for kernel in kernels)]))
    horizon = -math.inf if older_than is None else time.time() - older_than
    gone = 0
    for kernel in kernels:
        if kernel.used >= horizon and (max_bytes is None or remaining <= max_bytes):
            break
        users[kernel.object] -= 1
        last = not users[kernel.object]
        for path in (kernel.record, kernel.source, *([kernel.object] if last else [])):
            remaining -= size(path)
            path.unlink(missing_ok=True)
        gone += 1
    return kernels[gone:], gone, before - remaining


def _leftovers(directory: Directory, kernels: list[_Kernel]) -> list[Path]:
    """Return the files that nothing refers to and no write in progress can be about to.

    A kernel that was stored since `kernels` were listed is too young to be among them.
    """
    referenced = {path for kernel in kernels for path in kernel[2:]}
    horizon = time.time() - GRACE_SECONDS
    loose = [
        path
        for room in ROOMS
        for path in directory.files(room)
        if path not in referenced and _modified(path) < horizon
    ]
    return loose + directory.files("quarantine")


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return math.inf
