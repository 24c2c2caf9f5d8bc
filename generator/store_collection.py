"""Collecting a store's garbage: kernels by age or size, and what crashes left behind.

Other processes may use the store meanwhile. Whatever they lose to a collection is a miss to
them, never half a kernel: a record goes before the cubin it names, and loose files are left
alone until they are too old to belong to a write in progress.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from warploom.errors import StoreError
from warploom.generator.store import Store
from warploom.generator.store_directory import Directory, size
from warploom.generator.store_record import Record

GRACE_SECONDS = 3600.0  # no write takes this long


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collection removed: kernels, leftovers (files), and the bytes of both."""

    kernels: int
    leftovers: int
    bytes: int


def collect(
    store: Store, *, max_bytes: int | None = None, older_than: float | None = None
) -> Collected:
    """Remove kernels unused for `older_than` seconds, then the longest unused past `max_bytes`.

    Either way sweeps quarantined files, and temporary and unreferenced ones of over an hour ago.
    Bytes are those of records and compressed cubins. StoreError if the store has no directory or
    a file cannot be removed.
    """
    directory = store.directory
    if directory is None:
        raise StoreError(
            "a store in memory only",
            rule="there is a directory to collect only where the store has one",
            fix="set WARPLOOM_CACHE_DIR to the store's directory",
        )
    try:
        kernels, freed = _evict(directory, max_bytes, older_than)
        leftovers = [(path, size(path)) for path in _leftovers(directory)]
        for path, _ in leftovers:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{directory.path}: {error}",
            rule="a collection removes files",
            fix="check the permissions of the store",
        ) from error
    return Collected(kernels, len(leftovers), freed + sum(count for _, count in leftovers))


def _evict(
    directory: Directory, max_bytes: int | None, older_than: float | None
) -> tuple[int, int]:
    """Remove kernels, longest unused first; return their number and bytes."""
    records = _records(directory)
    users = Counter(record.cubin_sha256 for _, record in records)
    objects = {directory.object_path(record) for _, record in records}
    before = remaining = sum(
        size(path) for path in [*objects, *(directory.record_path(r.key) for _, r in records)]
    )
    horizon = -float("inf") if older_than is None else time.time() - older_than
    kernels = 0
    for used, record in records:
        if used >= horizon and (max_bytes is None or remaining <= max_bytes):
            break
        users[record.cubin_sha256] -= 1
        doomed = [directory.record_path(record.key), directory.source_path(record)]
        if not users[record.cubin_sha256]:
            doomed.append(directory.object_path(record))
        for path in doomed:
            remaining -= size(path)
            path.unlink(missing_ok=True)
        kernels += 1
    return kernels, before - remaining


def _records(directory: Directory) -> list[tuple[float, Record]]:
    """Return every record with the time of its last use (seconds since 1970), oldest first."""
    records = [
        (_modified(directory.record_path(record.key)), record) for record in directory.records()
    ]
    return sorted(records, key=lambda entry: (entry[0], entry[1].key))


def _leftovers(directory: Directory) -> list[Path]:
    """Return the files that nothing refers to and no write in progress can be about to."""
    referenced = {
        path
        for record in directory.records()
        for path in (
            directory.record_path(record.key),
            directory.source_path(record),
            directory.object_path(record),
        )
    }
    horizon = time.time() - GRACE_SECONDS
    loose = [
        path
        for room in ("objects", "keys", "sources", "locks")
        for path in directory.files(room)
        if path not in referenced and _modified(path) < horizon
    ]
    return loose + directory.files("quarantine")


def _modified(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except FileNotFoundError:
        return float("inf")
