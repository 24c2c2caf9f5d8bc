"""The files that a toolchain is made of, and its identity: the SHA-256 of what is in them.

Hashing them takes up to a second, so the store keeps the identity under the stamps that the file
system gave them (size, inode, times of change): while these stand, so does what is in the files.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from warploom.generator.store_directory import Directory

# Within a tick of a file system's clock, or of NFS's, a second change leaves no other stamp.
_SETTLED_NANOSECONDS = 2_000_000_000


class Stamp(NamedTuple):
    """A digest of what the file system says of some files, and when the last changed (ns)."""

    digest: str
    changed: int


@dataclass(frozen=True, slots=True)
class Component:
    """One part of a toolchain: the files below `folder` whose relative path matches `files`.

    Of a `shared` folder, where others have files too, only those that wheels recorded count,
    where it is wheels that brought it.
    """

    name: str
    version: str
    folder: Path
    files: str
    wheels: tuple[str, ...]  # that bring these files, where wheels do
    deep: bool = True  # False: only files right in `folder`, which may be a system's lib
    shared: bool = False

    def recorded(self) -> dict[str, str]:
        """Relative path -> `sha256=...` as the wheels' RECORD has it; empty where none has."""
        entries: dict[str, str] = {}
        for wheel in self.wheels:
            found = {
                path: digest
                for path, digest in _record(wheel, self.folder)
                if re.fullmatch(self.files, path)
            }
            if not found or not all(found.values()):
                return {}
            entries |= found
        return entries

    def hashed(self) -> dict[str, str]:
        """Relative path -> `sha256=...` of the bytes on disk."""
        return {path: _file_digest(self.folder / path) for path, _ in self._present()}

    def stamped(self) -> Stamp:
        """Return what is another once a file is changed."""
        digest = hashlib.sha256(str(self.folder).encode())
        last = 0
        for path, at in sorted(self._present()):
            line = (path, at.st_size, at.st_ino, at.st_mtime_ns, at.st_ctime_ns)
            digest.update(f"{line}\n".encode())
            last = max(last, at.st_mtime_ns, at.st_ctime_ns)
        return Stamp(digest.hexdigest(), last)

    def _present(self) -> Iterator[tuple[str, os.stat_result]]:
        if self.shared and (recorded := self.recorded()):
            places = ((path, self.folder / path) for path in recorded)
            return ((path, place.stat()) for path, place in places if place.is_file())
        wanted = re.compile(self.files)
        found = _walk(str(self.folder), "", deep=self.deep)
        return ((path, status) for path, status in found if wanted.fullmatch(path))


def identity(components: Sequence[Component], stamps: Sequence[Stamp]) -> str:
    """Return the SHA-256 of all files of `components`, in hex: what is kept of `stamps`, if any."""
    store = _store()
    stamp = hashlib.sha256("".join(each.digest for each in stamps).encode()).hexdigest()
    if store and (kept := store.identity(stamp)):
        return kept
    state = hashlib.sha256()
    for part in components:
        entries = sorted(part.hashed().items())
        state.update("".join(f"{part.name}/{path},{digest}\n" for path, digest in entries).encode())
    settled = time.time_ns() - max(each.changed for each in stamps) > _SETTLED_NANOSECONDS
    if store and settled and [part.stamped() for part in components] == list(stamps):
        store.keep_identity(stamp, state.hexdigest())
    return state.hexdigest()


def _store() -> Directory | None:
    """The user's store, if it has a directory that is safe to trust."""
    from warploom.errors import StoreError
    from warploom.generator.store_directory import Counters, Directory, default_root

    try:
        return Directory(default_root(), Counters(), writable=True)
    except (StoreError, OSError):  # told where kernels are looked for
        return None


def _walk(folder: str, prefix: str, *, deep: bool) -> Iterator[tuple[str, os.stat_result]]:
    """Every file below `folder`: its path from there, and what the file system says of it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = prefix + entry.name
            if entry.is_file():
                yield path, entry.stat()
            elif deep and entry.is_dir(follow_symlinks=False):
                yield from _walk(entry.path, f"{path}/", deep=deep)


def _record(wheel: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Each file that an installed wheel put below `folder`: relative path and `sha256=...`."""
    try:
        distribution = importlib.metadata.distribution(wheel)
    except importlib.metadata.PackageNotFoundError:
        return
    root = Path(str(distribution.locate_file(""))).resolve()
    if folder.is_relative_to(root):
        prefix = folder.relative_to(root).as_posix() + "/"
        for line in (distribution.read_text("RECORD") or "").splitlines():
            if line.startswith(prefix):
                path, digest, _ = line.removeprefix(prefix).rsplit(",", 2)
                yield path, digest


def _file_digest(path: Path) -> str:
    """SHA-256 of a file, spelt as in a RECORD."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").digest()
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
