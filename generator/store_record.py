"""What the store keeps of one kernel: its key, its record and its packed cubin, each self-checking.

A key digests what went into a compilation, so a record proves that it lies under the right key.
The record seals itself with a checksum and names its cubin by hash and length. Nothing here
touches a disk; whatever does not check out is a ValueError.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from dataclasses import fields
from hashlib import sha256
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from warploom.generator.artifact import Artifact, Resources

SCHEMA: Literal[1] = 1
MAX_CUBIN_BYTES = 16 << 20  # a hundred real ones: bounds what a hostile record has inflated

Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
# Records come from archives too: a name or a field goes to terminals, and so is plain text.
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,299}$")]
Text = Annotated[str, StringConstraints(pattern=r"^[ -~]{0,300}$")]

_METADATA = tuple(field.name for field in fields(Artifact) if field.name != "cubin")
_SEALED = re.compile(rb'\{"record":(.*),"checksum":"([0-9a-f]{64})"\}\n', re.DOTALL)


def source_digest(source: str) -> str:
    """Return the SHA-256 of `source`, as `Artifact.source_digest` holds it."""
    return sha256(source.encode()).hexdigest()


def key(source: str, options: Sequence[str], arch: str, toolchain: str) -> str:
    """Return the key of one compilation: 64 hex digits over everything that decides its cubin.

    `options` are the compiler's, in order and without include paths (where the headers lie says
    nothing about what they hold; `toolchain` identifies those).
    """
    return key_of_digest(source_digest(source), options, arch, toolchain)


def key_of_digest(source_digest: str, options: Sequence[str], arch: str, toolchain: str) -> str:
    """Return `key` of a source known by its digest only."""
    state = sha256()
    labelled = (
        ("schema", str(SCHEMA)),
        ("source", source_digest),
        *(("option", option) for option in options),
        ("arch", arch),
        ("toolchain", toolchain),
    )
    for field in labelled:
        for text in field:
            data = text.encode()
            state.update(len(data).to_bytes(8, "little"))  # so that no two lists run together
            state.update(data)
    return state.hexdigest()


class Record(BaseModel):
    """The metadata of one stored kernel: an Artifact with its cubin named instead of held."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    version: Literal[1]
    key: Digest
    cubin_sha256: Digest
    cubin_bytes: int = Field(ge=0, le=MAX_CUBIN_BYTES)
    name: Name
    arch: Name
    source_digest: Digest
    toolchain: Text
    options: tuple[Text, ...]
    resources: dict[Name, Resources] = Field(min_length=1)
    warnings: tuple[str, ...]
    compile_seconds: float

    @classmethod
    def of(cls, artifact: Artifact) -> Record:
        """Return the record of `artifact`, under the key that its fields give."""
        return cls(
            version=SCHEMA,
            key=key_of_digest(
                artifact.source_digest, artifact.options, artifact.arch, artifact.toolchain
            ),
            cubin_sha256=sha256(artifact.cubin).hexdigest(),
            cubin_bytes=len(artifact.cubin),
            **{field: getattr(artifact, field) for field in _METADATA},
        )

    @classmethod
    def parse(cls, key: str, data: bytes) -> Record:
        """Return the record in `data`; ValueError unless it is whole and belongs to `key`."""
        sealed = _SEALED.fullmatch(data)
        if sealed is None or sha256(sealed[1]).hexdigest().encode() != sealed[2]:
            raise ValueError("record is not whole")
        record = cls.model_validate_json(sealed[1])
        own = key_of_digest(record.source_digest, record.options, record.arch, record.toolchain)
        if not key == record.key == own:
            raise ValueError("record of another key")
        return record

    def serialise(self) -> bytes:
        """Return the record as JSON, sealed with the checksum of its text."""
        text = self.model_dump_json().encode()
        return b'{"record":%b,"checksum":"%b"}\n' % (text, sha256(text).hexdigest().encode())

    def artifact(self, cubin: bytes) -> Artifact:
        """Return the artifact that this record and its `cubin` make."""
        return Artifact(cubin=cubin, **{field: getattr(self, field) for field in _METADATA})

    def unpack(self, packed: bytes) -> bytes:
        """Return the cubin in `packed`; ValueError unless it is the very one this record names."""
        inflater = zlib.decompressobj()
        try:
            cubin = inflater.decompress(packed, self.cubin_bytes + 1)
        except zlib.error as error:
            raise ValueError(f"cubin does not inflate ({error})") from None
        if not inflater.eof or inflater.unused_data or len(cubin) != self.cubin_bytes:
            raise ValueError("cubin is not whole")
        if sha256(cubin).hexdigest() != self.cubin_sha256:
            raise ValueError("cubin differs from its hash")
        return cubin


def pack(cubin: bytes) -> bytes:
    """Return `cubin` compressed, as objects hold it."""
    return zlib.compress(cubin)
