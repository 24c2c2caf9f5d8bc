"""One directory of kernels on disk: every read is verified, every write is whole or absent.

    objects/<aa>/<sha256>                  a compressed cubin, named by the hash of the raw one
    sources/<aa>/<source digest>.<key>     an empty file: this key compiled that source
    keys/<aa>/<key>.json                   the record, written last: the only commit point
    toolchains/<stamps>                    what a toolchain with these stamps was hashed to

A file that fails verification goes to quarantine/, is logged once, and counts as missing.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Literal

import platformdirs

from warploom.atomic_file import replace_file, sync_directory
from warploom.generator.artifact import Artifact
from warploom.generator.locks import fork_lock
from warploom.generator.store_record import Record, pack
from warploom.generator.store_trust import refuse_shared, stranger

ROOMS = ("objects", "keys", "sources", "locks", "toolchains")  # quarantine apart
_DIGEST = re.compile(r"[0-9a-f]{64}")

logger = logging.getLogger(__name__)


_warned: dict[str, object] = {}  # by message: of whom it was the first
_counting = fork_lock()


def warn_once(message: str) -> None:
    """Log `message` as a warning the first time this process meets it, in whichever thread."""
    own = object()
    if _warned.setdefault(message, own) is own:
        logger.warning(message)


@dataclass(slots=True)
class Counters:
    """What a store did since it was opened, in all threads."""

    hits: int = 0
    misses: int = 0
    puts: int = 0
    quarantined: int = 0

    def count(self, what: Literal["hits", "misses", "puts", "quarantined"]) -> None:
        """Add 1 to one of them."""
        with _counting:
            setattr(self, what, getattr(self, what) + 1)


@dataclass(frozen=True, slots=True)
class DirectoryStats:
    """What lies in one directory; bytes are those of records and compressed cubins."""

    path: str
    kernels: int
    objects: int
    bytes: int
    quarantined: int


class Directory:
    """One directory of kernels, owned by this user (`writable`) or only read."""

    def __init__(self, path: Path, counters: Counters, *, writable: bool) -> None:
        """Open `path`, making it if it is `writable`.

        Raises StoreError where others could plant kernels, OSError where there is no directory.
        """
        self.path = path
        self.counters = counters
        self.writable = writable
        if writable:
            make_directory(path)
        if not path.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path))
        refuse_shared(path, [path / room for room in (*ROOMS, "quarantine")], owned=writable)
        self._owner = path.stat().st_uid

    def record(self, key: str) -> Record | None:
        """Return the verified record of `key`, or None."""
        path = self.record_path(key)
        data = self._read(path)
        if data is None:
            return None
        try:
            return Record.parse(key, data)
        except ValueError as error:
            self._quarantine(path, error)
            return None

    def load(self, key: str) -> Artifact | None:
        """Return the verified artifact of `key`, or None."""
        record = self.record(key)
        if record is None:
            return None
        cubin = self.cubin(record)
        if cubin is None:
            self._quarantine(self.record_path(key), "its cubin is missing or damaged")
            return None
        return record.artifact(cubin)

    def cubin(self, record: Record) -> bytes | None:
        """Return the verified cubin that `record` names, or None."""
        path = self.object_path(record)
        packed = self._read(path)
        if packed is None:
            return None
        try:
            return record.unpack(packed)
        except ValueError as error:
            self._quarantine(path, error)
            return None

    def records(self) -> Iterator[Record]:
        """Yield every verified record, in the order of keys."""
        for path in self._record_paths():
            if (record := self.record(path.stem)) is not None:
                yield record

    def records_of(self, source_digest: str) -> Iterator[Record]:
        """Yield the verified records of one source, in the order of keys."""
        room = self.path / "sources" / source_digest[:2]
        for path in sorted(room.glob(f"{source_digest}.*")):
            record = self.record(path.suffix[1:])
            if record is not None and record.source_digest == source_digest:
                yield record

    def write_cubin(self, record: Record, cubin: bytes) -> None:
        """Store `cubin` unless it is there already; OSError if it cannot be written."""
        path = self.object_path(record)
        if self.cubin(record) is None:
            self._put(path, pack(cubin))
        else:
            os.utime(path)  # a collection spares the young: the record is about to follow

    def write_record(self, record: Record) -> None:
        """Commit `record`, whose cubin is stored; OSError if it cannot be written."""
        source = self.source_path(record)
        make_directory(source.parent)
        self._clear(source)
        with suppress(FileExistsError):  # its name is all that is ever read of it
            os.close(os.open(source, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        os.utime(source, follow_symlinks=False)
        sync_directory(source.parent)
        self._put(self.record_path(record.key), record.serialise())

    def touch(self, key: str) -> None:
        """Note that `key` was used now, for collections that go by age."""
        if self.writable:
            with suppress(OSError):
                os.utime(self.record_path(key))

    def identity(self, stamp: str) -> str | None:
        """Return the toolchain's identity that was kept under `stamp`, or None."""
        data = self._read(self._toolchain_path(stamp)) or b""
        identity = data[:64].decode("ascii", "replace")
        return identity if data == _sealed(stamp, identity) else None

    def keep_identity(self, stamp: str, identity: str) -> None:
        """Keep a toolchain's identity under `stamp`, if it can be written."""
        with suppress(OSError):
            self._put(self._toolchain_path(stamp), _sealed(stamp, identity))

    def stats(self) -> DirectoryStats:
        """Return counts and bytes, without verifying."""
        records = self._record_paths()
        objects = [path for path in self.files("objects") if _DIGEST.fullmatch(path.name)]
        return DirectoryStats(
            path=str(self.path),
            kernels=len(records),
            objects=len(objects),
            bytes=sum(size(path) for path in [*records, *objects]),
            quarantined=len(self.files("quarantine")),
        )

    def files(self, room: str) -> list[Path]:
        """Return every file of one room, temporary ones included, in order."""
        found = (self.path / room).rglob("*")
        return sorted(path for path in found if path.is_symlink() or not path.is_dir())

    def record_path(self, key: str) -> Path:
        """Return where the record of `key` lies."""
        return self.path / "keys" / key[:2] / f"{key}.json"

    def object_path(self, record: Record) -> Path:
        """Return where the cubin that `record` names lies."""
        return self.path / "objects" / record.cubin_sha256[:2] / record.cubin_sha256

    def source_path(self, record: Record) -> Path:
        """Return where the by-source entry of `record` lies."""
        digest = record.source_digest
        return self.path / "sources" / digest[:2] / f"{digest}.{record.key}"

    def _toolchain_path(self, stamp: str) -> Path:
        return self.path / "toolchains" / stamp

    def _record_paths(self) -> list[Path]:
        paths = sorted((self.path / "keys").glob("??/*.json"))
        return [path for path in paths if _DIGEST.fullmatch(path.stem)]

    def _read(self, path: Path) -> bytes | None:
        try:
            with open(path, "rb", opener=_open_plain) as stream:
                reason = stranger(stream.fileno(), self._owner)
                if reason is None:
                    return stream.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            warn_once(f"{path} cannot be read and counts as missing: {error}")
            return None
        self._quarantine(path, reason)
        return None

    def _put(self, path: Path, data: bytes) -> None:
        self._clear(path)
        make_directory(path.parent)
        replace_file(path, data, private=True)

    def _clear(self, path: Path) -> None:
        """Set aside a directory that lies where a file belongs: no file could replace it."""
        if path.is_dir() and not path.is_symlink():
            self._quarantine(path, "it is a directory")

    def _quarantine(self, path: Path, reason: object) -> None:
        if self.writable:
            target = self.path / "quarantine" / path.name
            try:
                make_directory(target.parent)
                if path.is_dir() and not path.is_symlink():  # may go by an empty one's name only
                    target = Path(tempfile.mkdtemp(dir=target.parent, prefix=f"{path.name}."))
                path.replace(target)
            except FileNotFoundError:  # another process was first
                return
            except OSError as error:
                reason = f"{reason}; left in place: {error}"
        self.counters.count("quarantined")
        warn_once(f"{path} is damaged and counts as missing: {reason}")


def default_root() -> Path:
    """Return where this user's store is: WARPLOOM_CACHE_DIR, or in the user's cache folder."""
    root = os.environ.get("WARPLOOM_CACHE_DIR")
    return Path(root) if root else platformdirs.user_cache_path("warploom")


def _sealed(stamp: str, identity: str) -> bytes:
    seal = sha256(f"{stamp} {identity}".encode()).hexdigest()
    return f"{identity} {seal}\n".encode()


def size(path: Path) -> int:
    """Return the bytes of the file at `path`, 0 if it is gone."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def make_directory(path: Path) -> None:
    """Make `path` and its parents, each open to this user only whatever the umask."""
    if not path.is_dir():
        make_directory(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
        sync_directory(path.parent)


def _open_plain(path: str, flags: int) -> int:
    """Open without following a link out of the store or waiting on a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
