"""The kernel store: what was compiled once is found again, whole and right, or not at all.

A store is memory, a directory of this user's, and directories that are only read. Reading
verifies; whatever does not check out is a miss. Writing never fails a caller: a kernel that the
disk does not take stays in memory. Locks only save work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from warploom.errors import StoreError
from warploom.generator import json_file
from warploom.generator.artifact import Artifact
from warploom.generator.store_directory import (
    Counters,
    Directory,
    DirectoryStats,
    default_root,
    make_directory,
    warn_once,
)
from warploom.generator.store_record import Record, key, source_digest

__all__ = ["Explanation", "Neighbour", "Stats", "Store", "key", "source_digest"]

_COMPARED = ("name", "source_digest", "arch", "toolchain", "options")
_NEAREST = 5


@dataclass(frozen=True, slots=True)
class Stats:
    """What a store holds; the first directory is the writable one, where there is one."""

    memory_kernels: int
    directories: tuple[DirectoryStats, ...]


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A stored kernel close to one that was looked for."""

    key: str
    place: str
    differences: dict[str, tuple[object, object]]  # field: (wanted, stored)


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether a kernel is stored and, if not, how the nearest ones differ, nearest first."""

    present: bool
    nearest: tuple[Neighbour, ...]


class _Memory:
    """The kernels that no disk took, behind the reading half of Directory's interface."""

    path = "memory"

    def __init__(self) -> None:
        self.artifacts: dict[str, Artifact] = {}

    def record(self, key: str) -> Record | None:
        artifact = self.artifacts.get(key)
        return Record.of(artifact) if artifact else None

    def load(self, key: str) -> Artifact | None:
        return self.artifacts.get(key)

    def records(self) -> Iterator[Record]:
        return (Record.of(artifact) for _, artifact in sorted(self.artifacts.items()))

    def records_of(self, source_digest: str) -> Iterator[Record]:
        return (record for record in self.records() if record.source_digest == source_digest)

    def touch(self, key: str) -> None:
        pass


class Store:
    """Compiled kernels by key, and by source for machines that cannot compile.

    `root` is made if missing (None: memory only); `extra` directories are only read. A root that
    cannot be made degrades to memory with one warning. StoreError for a directory that others
    can write to, or a root that belongs to someone else.
    """

    def __init__(self, root: Path | None, extra: Sequence[Path] = ()) -> None:
        self.counters = Counters()
        self.kept_in_memory: dict[str, str] = {}  # kernels that no disk took, by name, and why
        self._memory = _Memory()
        self._no_directory = "it has no directory"
        self._root = root
        # Directories that were named, and why they are not used.
        self.unusable: dict[Path, str] = {}
        self.directory = self._open(root, writable=True) if root else None
        self._extra = [self._open(path, writable=False) for path in extra]

    @classmethod
    def default(cls) -> Store:
        """Open the store that the environment names.

        WARPLOOM_CACHE_DIR is the root (default: the user's cache directory), WARPLOOM_CACHE_PATH
        a list of directories to read, separated like PATH.
        """
        extra = os.environ.get("WARPLOOM_CACHE_PATH", "").split(os.pathsep)
        return cls(default_root(), [Path(path) for path in extra if path])

    def refuse_unusable(self, what: str) -> None:
        """Raise StoreError, with the reason, where a directory that was named cannot be used.

        Calls go on without it and compile; `what` says what else needs every directory.
        """
        for path, reason in self.unusable.items():
            raise StoreError(
                f"kernel cache {path}: {reason}",
                rule=f"{what} needs every directory of the kernel cache",
                fix="make it a directory that you can use, or name another one in "
                f"{'WARPLOOM_CACHE_DIR' if path == self._root else 'WARPLOOM_CACHE_PATH'}",
            )

    def require_directory(self, what: str) -> Directory:
        """Return the directory that kernels are written to; StoreError if there is none.

        `what` says what needs one.
        """
        if self.directory is None:
            reason = self.unusable.get(self._root) if self._root else None
            raise StoreError(
                f"kernel cache {self._root}: {reason}"
                if reason
                else "a kernel cache in memory only",
                rule=f"{what} needs a directory that kernels last in",
                fix="set WARPLOOM_CACHE_DIR to a directory that you can write to",
            )
        return self.directory

    def get(self, key: str) -> Artifact | None:
        """Return the verified artifact of `key`, or None."""
        return self._first((place, key) for place in self._places())

    def find(self, source_digest: str, arch: str, toolchain: str | None = None) -> Artifact | None:
        """Return a kernel compiled from a source for `arch`, or None.

        The one of `toolchain` is preferred; else any, in the order of toolchains and keys.
        """
        places = self._places()
        found = sorted(
            (record.toolchain != toolchain, record.toolchain, record.key, rank)
            for rank, place in enumerate(places)
            for record in place.records_of(source_digest)
            if record.arch == arch
        )
        return self._first((places[rank], stored) for *_, stored, rank in found)

    def put(self, key: str, artifact: Artifact) -> None:
        """Store `artifact`: on disk, or in memory where that fails (logged once, never raised).

        StoreError if `key` is not that of the artifact's own fields.
        """
        record = Record.of(artifact)
        if record.key != key:
            raise StoreError(
                f"{artifact.name} under key {key}",
                rule=f"its source digest, options, arch and toolchain give {record.key}",
                fix="make the key of the fields that the artifact carries",
            )
        self.counters.count("puts")
        reason = self._no_directory
        if self.directory is not None:
            try:
                _write(self.directory, record, artifact.cubin)
            except OSError as error:
                reason = _unwritable(self.directory.path, error)
                warn_once(_degraded(reason))
            else:
                return
        self._memory.artifacts[key] = artifact
        self.kept_in_memory[artifact.name] = reason

    @contextmanager
    def lock(self, key: str, timeout: float = 60.0) -> Iterator[None]:
        """Keep other processes from compiling `key` meanwhile; look again once inside.

        After `timeout` seconds, or where locks do not work, goes on without.
        """
        with ExitStack() as stack:
            if self.directory is not None:
                path = self.directory.path / "locks" / f"{key}.lock"
                with suppress(OSError, NotImplementedError):  # filelock's Timeout is the former
                    make_directory(path.parent)
                    stack.enter_context(FileLock(path, timeout=timeout, mode=0o600))
            yield

    def artifacts(self) -> Iterator[Artifact]:
        """Yield every kernel that can be read, once, in the order of keys."""
        for stored in sorted(
            {record.key for place in self._places() for record in place.records()}
        ):
            loaded = (place.load(stored) for place in self._places())
            artifact = next((found for found in loaded if found is not None), None)
            if artifact is not None:
                yield artifact

    def listed(self) -> list[tuple[str, str]]:
        """Return the names and keys of all kernels that are stored, sorted."""
        records = (record for place in self._places() for record in place.records())
        return sorted({(record.name, record.key) for record in records})

    def stats(self) -> Stats:
        """Return what the store holds, without verifying it."""
        directories = [self.directory, *self._extra]
        return Stats(
            memory_kernels=len(self._memory.artifacts),
            directories=tuple(place.stats() for place in directories if place is not None),
        )

    def explain(
        self,
        key: str | None = None,
        *,
        name: str | None = None,
        source_digest: str | None = None,
        arch: str | None = None,
        toolchain: str | None = None,
        options: Sequence[str] | None = None,
    ) -> Explanation:
        """Say whether a kernel is stored: that of `key`, or any with the fields given.

        If not, the nearest of the same name or source are listed with the fields that differ.
        """
        values = (name, source_digest, arch, toolchain, None if options is None else tuple(options))
        wanted = {
            field: value
            for field, value in zip(_COMPARED, values, strict=True)
            if value is not None
        }
        neighbours: list[Neighbour] = []
        for place in self._places():
            for record in place.records():
                neighbour = Neighbour(record.key, str(place.path), _differences(record, wanted))
                exact = record.key == key if key else not neighbour.differences
                if exact and place.load(record.key) is not None:
                    return Explanation(present=True, nearest=(neighbour,))
                if record.name == name or record.source_digest == source_digest:
                    neighbours.append(neighbour)
        neighbours.sort(key=lambda neighbour: (len(neighbour.differences), neighbour.key))
        return Explanation(present=False, nearest=tuple(neighbours[:_NEAREST]))

    def _places(self) -> list[_Memory | Directory]:
        directories = [self.directory, *self._extra]
        return [self._memory, *(place for place in directories if place is not None)]

    def _first(self, candidates: Iterator[tuple[_Memory | Directory, str]]) -> Artifact | None:
        for place, stored in candidates:
            if (artifact := place.load(stored)) is not None:
                place.touch(stored)
                self.counters.count("hits")
                return artifact
        self.counters.count("misses")
        return None

    def _open(self, path: Path, *, writable: bool) -> Directory | None:
        try:
            return Directory(path, self.counters, writable=writable)
        except OSError as error:
            self.unusable[path] = json_file.reason(error)
            if writable:
                self._no_directory = _unwritable(path, error)
            warn_once(
                _degraded(self._no_directory) if writable else f"kernel store {path}: {error}"
            )
            return None


def _write(directory: Directory, record: Record, cubin: bytes) -> None:
    """Write a kernel; once more, where a collection took what was there of it between two steps."""
    for again in (True, False):
        try:
            directory.write_cubin(record, cubin)
            directory.write_record(record)
        except FileNotFoundError:
            if not again:
                raise
        else:
            return


def _unwritable(path: Path, error: OSError) -> str:
    return f"kernel store {path} cannot be written ({json_file.reason(error)})"


def _degraded(reason: str) -> str:
    return (
        f"{reason}: kernels are kept in memory and compiled anew by the next process; "
        "WARPLOOM_CACHE_DIR names another directory"
    )


def _differences(
    record: Record, wanted: dict[str, str | tuple[str, ...]]
) -> dict[str, tuple[object, object]]:
    return {
        field: (value, getattr(record, field))
        for field, value in wanted.items()
        if getattr(record, field) != value
    }
