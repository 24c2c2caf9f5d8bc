"""Kernels on the move: a store as one tar, and a tar back into a store.

An archive holds a record per kernel, each followed by its packed cubin unless an earlier kernel
brought it, and ends with a manifest of every member's hash. The same kernels give the same bytes.
An archive is verified to its end before anything of it is stored. What is verified is that it is
whole: anyone can make one, so importing it is trusting whoever did.
"""

from __future__ import annotations

import os
import re
import stat
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from warploom.atomic_file import replacing
from warploom.errors import StoreError
from warploom.generator import json_file
from warploom.generator.store import Store
from warploom.generator.store_directory import Directory
from warploom.generator.store_record import MAX_CUBIN_BYTES, SCHEMA, Record, pack

_MANIFEST = "manifest.json"
_RECORD = re.compile(r"keys/[0-9a-f]{2}/([0-9a-f]{64})\.json")
_MANIFEST_BYTES = 300  # at most, for each member that it names


class _Member(NamedTuple):
    """A file in an archive: its name, where its bytes begin, and how many there are."""

    name: str
    start: int
    size: int


class Manifest(BaseModel):
    """What an archive claims to hold: the SHA-256 of every other member, by name."""

    model_config = ConfigDict(strict=True, extra="forbid")

    version: Literal[1]
    files: dict[str, str]


def export(store: Store, path: Path) -> int:
    """Write every kernel that `store` can read to a tar at `path`; return how many.

    The file appears whole or not at all. StoreError if it cannot be written, or if a directory of
    the store cannot be used: an archive without its kernels would look like that of an empty store.
    """
    store.refuse_unusable("an export")
    if path.exists() and not path.is_file():
        raise StoreError(
            f"{path} exists, and is not a file",
            rule="an export must create a file, or replace one",
            fix="name another path",
        )
    try:
        with (
            replacing(path) as written,
            tarfile.open(written, mode="w", format=tarfile.USTAR_FORMAT) as archive,
        ):
            kernels = _fill(archive, store)
    except OSError as error:
        raise StoreError(
            f"{path}: {json_file.reason(error)}",
            rule="an export needs a directory that can be written to, and free space",
            fix="name another path",
        ) from error
    return kernels


def import_(store: Store, path: Path) -> int:
    """Store the kernels of the archive at `path`; return how many were new.

    Raises StoreError, with nothing stored, for anything but an archive as `export` writes it:
    links, unexpected or repeated names, sizes past the limit, hashes that differ, missing members.
    Its kernels are run later, so it must come from someone whose programs one would run.
    """
    directory = store.require_directory("an import")
    try:
        with open(path, "rb", opener=_open_at_once) as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ValueError("is no regular file")
            return _install(stream, *_verified(stream), directory)
    except OSError as error:
        raise StoreError(
            f"{path}: {json_file.reason(error)}",
            rule="an import reads the archive and writes the store",
            fix="check the path, and the free space of the kernel cache",
        ) from error
    except (tarfile.TarError, ValueError, OverflowError) as error:
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


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting for the other end of a pipe."""
    return os.open(path, flags | os.O_NONBLOCK)


def _members(stream: BinaryIO) -> Iterator[_Member]:
    """Yield the members of a tar; ValueError for a header of anything but a plain file.

    tarfile's own iteration follows headers that extend others (pax, long names, sparse files)
    before it can be asked what they are, and some of those cost far more time than they have bytes.
    """
    while (block := stream.read(tarfile.BLOCKSIZE)) != bytes(tarfile.BLOCKSIZE):
        header = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        if header.type not in (tarfile.REGTYPE, tarfile.AREGTYPE) or header.size < 0:
            raise ValueError(f"{header.name!r} is no plain file")
        start = stream.tell()
        yield _Member(header.name, start, header.size)
        stream.seek(start + -(-header.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE)


def _verified(stream: BinaryIO) -> tuple[list[Record], dict[str, _Member]]:
    """Return an archive's records and objects; ValueError unless all is as `_fill` writes it."""
    hashes: dict[str, str] = {}
    records: list[Record] = []
    named: dict[str, Record] = {}  # objects by name: a record comes before its cubin
    objects: dict[str, _Member] = {}
    manifest = None
    for member in _members(stream):
        if manifest is not None or member.name in hashes:
            raise ValueError(f"{member.name!r} is repeated or follows the manifest")
        if member.name == _MANIFEST:
            data = _read(stream, member, _MANIFEST_BYTES * (1 + len(hashes)))
            manifest = Manifest.model_validate_json(data)
            continue
        data = _read(stream, member, MAX_CUBIN_BYTES)
        hashes[member.name] = sha256(data).hexdigest()
        if match := _RECORD.fullmatch(member.name):
            record = Record.parse(match[1], data)
            first = named.setdefault(_object_name(record), record)
            if member.name != _record_name(record.key) or first.cubin_bytes != record.cubin_bytes:
                raise ValueError(f"{member.name!r} contradicts its name or another record")
            records.append(record)
        elif member.name in named:
            named[member.name].unpack(data)
            objects[member.name] = member
        else:
            raise ValueError(f"unexpected member {member.name!r}")
    if manifest is None or manifest.files != hashes or not hashes.keys() >= named.keys():
        raise ValueError("members are missing, or differ from the manifest")
    return records, objects


def _read(stream: BinaryIO, member: _Member, most: int) -> bytes:
    if member.size > most:
        raise ValueError(f"{member.name!r} has too many bytes ({member.size})")
    stream.seek(member.start)
    data = stream.read(member.size)
    if len(data) != member.size:
        raise ValueError(f"{member.name!r} is cut short")
    return data


def _install(
    stream: BinaryIO, records: list[Record], objects: dict[str, _Member], directory: Directory
) -> int:
    """Store verified `records`: all cubins, then the records that make them visible."""
    new = [record for record in records if directory.load(record.key) is None]
    for record in new:
        packed = _read(stream, objects[_object_name(record)], MAX_CUBIN_BYTES)
        directory.write_cubin(record, record.unpack(packed))  # the file may have changed since
    for record in new:
        directory.write_record(record)
    return len(new)


def _record_name(key: str) -> str:
    return f"keys/{key[:2]}/{key}.json"


def _object_name(record: Record) -> str:
    return f"objects/{record.cubin_sha256[:2]}/{record.cubin_sha256}"
