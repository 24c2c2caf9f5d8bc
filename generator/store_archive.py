"""Kernels on the move: a store as one tar, and a tar back into a store.

An archive holds a record per kernel, each followed by its packed cubin unless an earlier kernel
brought it, and ends with a manifest of every member's hash. The same kernels give the same bytes.
An archive is verified to its end before anything of it is stored.
"""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from warploom.errors import StoreError
from warploom.generator.store import Store
from warploom.generator.store_directory import Directory
from warploom.generator.store_record import MAX_CUBIN_BYTES, SCHEMA, Record, pack

_MANIFEST = "manifest.json"
_RECORD = re.compile(r"keys/[0-9a-f]{2}/([0-9a-f]{64})\.json")
_PLAIN = (tarfile.REGTYPE, tarfile.AREGTYPE)


class Manifest(BaseModel):
    """What an archive claims to hold: the SHA-256 of every other member, by name."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: Literal[1]
    files: dict[str, str]


def export(store: Store, path: Path) -> int:
    """Write every kernel that `store` can read to a tar at `path`; return how many.

    The file appears whole or not at all. StoreError if it cannot be written.
    """
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with (
                os.fdopen(descriptor, "wb") as stream,
                tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as archive,
            ):
                kernels = _fill(archive, store)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink()
            raise
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}",
            rule="an export needs a directory that can be written to, and room",
            fix="name another path",
        ) from error
    return kernels


def import_(store: Store, path: Path) -> int:
    """Store the kernels of the archive at `path`; return how many were new.

    Raises StoreError, with nothing stored, for anything but an archive as `export` writes it:
    links, unexpected or repeated names, sizes past the limit, hashes that differ, missing members.
    """
    if store.directory is None:
        raise StoreError(
            "a store in memory only",
            rule="an import needs a directory to last in",
            fix="set WARPLOOM_CACHE_DIR to a directory that you can write to",
        )
    try:
        with path.open("rb") as stream, tarfile.open(fileobj=stream, mode="r:") as archive:
            return _install(archive, _verified(archive), store.directory)
    except OSError as error:
        raise StoreError(
            f"{path}: {error.strerror or error}",
            rule="an import reads the archive and writes the store",
            fix="check the path, and the room in the store",
        ) from error
    except (tarfile.TarError, ValueError, EOFError, OverflowError) as error:
        raise StoreError(
            f"{path}: {error}",
            rule="an archive is what `warploom cache export` wrote, whole and unchanged",
            fix="export it again",
        ) from error


def _fill(archive: tarfile.TarFile, store: Store) -> int:
    hashes: dict[str, str] = {}

    def add(name: str, data: bytes) -> None:
        member = tarfile.TarInfo(name)  # no owner, no time: the same kernels, the same bytes
        member.size = len(data)
        member.mode = 0o600
        archive.addfile(member, BytesIO(data))
        hashes[name] = sha256(data).hexdigest()

    kernels = 0
    for artifact in store.artifacts():
        record = Record.of(artifact)
        add(_record_name(record.key), record.serialise())
        if _object_name(record) not in hashes:
            add(_object_name(record), pack(artifact.cubin))
        kernels += 1
    add(_MANIFEST, Manifest(version=SCHEMA, files=hashes.copy()).model_dump_json().encode())
    return kernels


def _verified(archive: tarfile.TarFile) -> list[Record]:
    """Return the archive's records; ValueError unless all of it is as `_fill` writes it."""
    hashes: dict[str, str] = {}
    records: list[Record] = []
    named: dict[str, Record] = {}  # objects by name: a record comes before its cubin
    manifest = None
    for member in archive:
        if manifest is not None or member.name in hashes:
            raise ValueError(f"{member.name!r} is repeated or follows the manifest")
        data = _read(archive, member)
        if member.name == _MANIFEST:
            manifest = Manifest.model_validate_json(data)
            continue
        hashes[member.name] = sha256(data).hexdigest()
        if match := _RECORD.fullmatch(member.name):
            record = Record.parse(match[1], data)
            first = named.setdefault(_object_name(record), record)
            if member.name != _record_name(record.key) or first.cubin_bytes != record.cubin_bytes:
                raise ValueError(f"{member.name!r} contradicts its name or another record")
            records.append(record)
        elif member.name in named:
            named[member.name].unpack(data)
        else:
            raise ValueError(f"unexpected member {member.name!r}")
    if manifest is None or manifest.files != hashes or not hashes.keys() >= named.keys():
        raise ValueError("members are missing, or differ from the manifest")
    return records


def _read(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    if member.type not in _PLAIN or member.size > MAX_CUBIN_BYTES:
        raise ValueError(f"{member.name!r} is no plain file or has too many bytes ({member.size})")
    stream = archive.extractfile(member)
    data = stream.read() if stream else b""
    if len(data) != member.size:
        raise ValueError(f"{member.name!r} is cut short")
    return data


def _install(archive: tarfile.TarFile, records: list[Record], directory: Directory) -> int:
    """Store verified `records`: all cubins, then the records that make them visible."""
    new = [record for record in records if directory.load(record.key) is None]
    for record in new:
        packed = _read(archive, archive.getmember(_object_name(record)))
        directory.write_cubin(record, record.unpack(packed))  # the file may have changed since
    for record in new:
        directory.write_record(record)
    return len(new)


def _record_name(key: str) -> str:
    return f"keys/{key[:2]}/{key}.json"


def _object_name(record: Record) -> str:
    return f"objects/{record.cubin_sha256[:2]}/{record.cubin_sha256}"
