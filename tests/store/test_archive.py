"""Archives: what comes out goes in again, and nothing else does."""

from __future__ import annotations

import errno
import json
import os
import signal
import tarfile
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warploom.errors import StoreError
from warploom.generator import store_archive
from warploom.generator.artifact import Artifact
from warploom.generator.store import Store
from warploom.generator.store_archive import export, import_
from warploom.generator.store_directory import Directory
from warploom.generator.store_record import Record, pack

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]
Members = list[tuple[tarfile.TarInfo, bytes]]


@pytest.fixture
def artifacts(make_artifact: MakeArtifact) -> list[Artifact]:
    first, second, third = (make_artifact(seed) for seed in range(3))
    return [first, second, replace(third, cubin=first.cubin)]


@pytest.fixture
def archive(tmp_path: Path, store: Store, artifacts: list[Artifact], key_of: KeyOf) -> Path:
    for artifact in artifacts:
        store.put(key_of(artifact), artifact)
    assert export(store, tmp_path / "kernels.tar") == 3
    return tmp_path / "kernels.tar"


def read(path: Path) -> Members:
    with tarfile.open(path) as archive:
        return [(member, archive.extractfile(member).read()) for member in archive]  # type: ignore[union-attr]


def write(path: Path, members: Members, *, manifest: bool = True) -> None:
    """Write a tar of `members`, its manifest, if it has one, brought up to date."""
    hashes = {
        member.name: sha256(data).hexdigest()
        for member, data in members
        if member.name != "manifest.json"
    }
    with tarfile.open(path, "w") as archive:
        for member, data in members:
            fresh = member.name == "manifest.json" and manifest
            content = json.dumps({"version": 1, "files": hashes}).encode() if fresh else data
            member.size = len(content)
            archive.addfile(member, BytesIO(content))


def plain(name: str, data: bytes = b"") -> tuple[tarfile.TarInfo, bytes]:
    return tarfile.TarInfo(name), data


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type = kind
    member.linkname = target
    return member, b""


def kernels(store: Store) -> int:
    return store.stats().directories[0].kernels


def test_an_export_goes_into_an_empty_store_whole(
    tmp_path: Path, archive: Path, artifacts: list[Artifact], key_of: KeyOf
) -> None:
    other = Store(tmp_path / "other")
    assert import_(other, archive) == 3
    assert import_(other, archive) == 0
    for artifact in artifacts:
        assert other.get(key_of(artifact)) == artifact
        assert other.find(artifact.source_digest, "sm_90a") == artifact
    assert other.stats().directories[0].objects == 2


def test_the_same_kernels_give_the_same_bytes(
    tmp_path: Path, archive: Path, artifacts: list[Artifact], key_of: KeyOf
) -> None:
    other = Store(tmp_path / "other")
    for artifact in reversed(artifacts):
        other.put(key_of(artifact), artifact)
    export(other, tmp_path / "again.tar")
    assert (tmp_path / "again.tar").read_bytes() == archive.read_bytes()
    assert list(tmp_path.glob(".*")) == []


def test_an_export_leaves_damaged_kernels_out(
    tmp_path: Path, store: Store, archive: Path, artifacts: list[Artifact]
) -> None:
    assert store.directory is not None
    store.directory.object_path(Record.of(artifacts[1])).write_bytes(b"damaged")
    assert export(store, archive) == 2
    assert import_(Store(tmp_path / "other"), archive) == 2


def test_an_import_repairs_a_damaged_kernel(
    store: Store, archive: Path, artifacts: list[Artifact], key_of: KeyOf
) -> None:
    assert store.directory is not None
    store.directory.object_path(Record.of(artifacts[1])).write_bytes(b"damaged")
    assert import_(store, archive) == 1
    assert store.get(key_of(artifacts[1])) == artifacts[1]


def test_an_export_that_cannot_be_written_leaves_the_old_archive(
    archive: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = archive.read_bytes()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(StoreError, match="No space left"):
        export(store, archive)
    assert archive.read_bytes() == before
    assert list(archive.parent.glob(".*")) == []
    with pytest.raises(StoreError, match="No such file"):
        export(store, archive.parent / "missing" / "kernels.tar")


def record_first(members: Members) -> Members:
    """Put each cubin before the record that names it."""
    return [members[1], members[0], *members[2:]]


def bomb(members: Members) -> Members:
    (record, fields), (cubin, _) = members[:2]
    return [(record, fields), (cubin, pack(bytes(64 << 20))), *members[2:]]


HOSTILE: dict[str, Callable[[Members], Members]] = {
    "absolute name": lambda members: [plain("/tmp/escaped"), *members],
    "parent in name": lambda members: [plain("keys/../../escaped"), *members],
    "dotted name": lambda members: [plain("./" + members[0][0].name, members[0][1]), *members[1:]],
    "unexpected name": lambda members: [plain("README"), *members],
    "unnamed object": lambda members: [plain(f"objects/00/{'0' * 64}", pack(b"")), *members],
    "empty name": lambda members: [plain(""), *members],
    "repeated name": lambda members: [members[0], *members],
    "symbolic link": lambda members: [
        special(members[0][0].name, tarfile.SYMTYPE, "/etc/passwd"),
        *members[1:],
    ],
    "hard link": lambda members: [
        members[0],
        special(members[1][0].name, tarfile.LNKTYPE, members[0][0].name),
        *members[2:],
    ],
    "directory": lambda members: [special("keys", tarfile.DIRTYPE), *members],
    "device": lambda members: [special("keys/00", tarfile.CHRTYPE), *members],
    "pipe": lambda members: [special("keys/00", tarfile.FIFOTYPE), *members],
    "cubin before its record": record_first,
    "cubin missing": lambda members: [members[0], *members[2:]],
    "cubin of another": lambda members: [
        members[0],
        (members[1][0], members[3][1]),
        *members[2:],
    ],
    "cubin inflating too far": bomb,
    "record of another": lambda members: [(members[0][0], members[2][1]), *members[1:]],
    "record in another shard": lambda members: [
        plain("keys/zz/" + members[0][0].name[8:], members[0][1]),
        *members[1:],
    ],
    "no manifest": lambda members: members[:-1],
    "manifest first": lambda members: [members[-1], *members[:-1]],
    "two manifests": lambda members: [*members, members[-1]],
    "member after the manifest": lambda members: [*members[:-3], members[-1], *members[-3:-1]],
    "nothing": lambda members: [],
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(
    attack: str, tmp_path: Path, archive: Path
) -> None:
    write(archive, HOSTILE[attack](read(archive)))
    other = Store(tmp_path / "other")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StoreError, match=r"kernels\.tar"):
        import_(other, archive)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "manifest",
    [b"", b"{}", b'{"version":2,"files":{}}', b'{"version":1,"files":{}}', b'{"version":1}', b"["],
)
def test_a_manifest_that_does_not_fit_is_refused(
    manifest: bytes, tmp_path: Path, archive: Path
) -> None:
    write(archive, [*read(archive)[:-1], plain("manifest.json", manifest)], manifest=False)
    other = Store(tmp_path / "other")
    with pytest.raises(StoreError):
        import_(other, archive)
    assert kernels(other) == 0


def test_a_member_past_the_size_limit_is_refused_unread(
    tmp_path: Path, archive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_archive, "MAX_CUBIN_BYTES", 300)
    with pytest.raises(StoreError, match="too many bytes"):
        import_(Store(tmp_path / "other"), archive)
    header = tarfile.TarInfo(read(archive)[0][0].name)
    header.size = 1 << 40
    archive.write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    with pytest.raises(StoreError, match="too many bytes"):
        import_(Store(tmp_path / "other"), archive)


def test_a_manifest_of_more_bytes_than_it_can_name_members_in_is_refused_unread(
    tmp_path: Path, archive: Path
) -> None:
    manifest = plain("manifest.json", b" " * 10_000)
    write(archive, [*read(archive)[:-1], manifest], manifest=False)
    with pytest.raises(StoreError, match="too many bytes"):
        import_(Store(tmp_path / "other"), archive)


EXTENSIONS = (b"x", b"g", b"X", b"L", b"K", b"S")  # pax and GNU headers that speak of the next one


def header(kind: bytes, size: int = 0, name: str = "keys/00") -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_a_header_of_headers_is_refused_before_it_is_read(
    kind: bytes, tmp_path: Path, archive: Path
) -> None:
    content = b"11 path=abc" + b"1" * 501
    archive.write_bytes(header(kind, len(content)) + content + archive.read_bytes())
    with pytest.raises(StoreError, match="no plain file"):
        import_(Store(tmp_path / "other"), archive)


@pytest.mark.parametrize("kind", EXTENSIONS)
def test_a_chain_of_headers_is_refused(kind: bytes, tmp_path: Path, archive: Path) -> None:
    archive.write_bytes(header(kind) * 5000 + archive.read_bytes())
    with pytest.raises(StoreError, match="no plain file"):
        import_(Store(tmp_path / "other"), archive)


@pytest.mark.parametrize("size", [-1, -512, -(1 << 40)])
def test_a_member_of_negative_size_is_refused(size: int, tmp_path: Path, archive: Path) -> None:
    archive.write_bytes(header(tarfile.REGTYPE, size) + archive.read_bytes())
    with pytest.raises(StoreError, match="no plain file"):
        import_(Store(tmp_path / "other"), archive)


def test_a_pipe_is_neither_waited_for_nor_replaced(
    tmp_path: Path, store: Store, archive: Path
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    signal.alarm(600)
    try:
        with pytest.raises(StoreError, match="no regular file"):
            import_(store, pipe)
    finally:
        signal.alarm(0)
    with pytest.raises(StoreError, match="must create a file"):
        export(store, pipe)
    assert pipe.is_fifo()


def test_every_truncation_is_refused(tmp_path: Path, archive: Path) -> None:
    whole = archive.read_bytes()
    members = read(archive)
    end = members[-1][0].offset_data + len(members[-1][1])
    other = Store(tmp_path / "other")
    for length in [*range(0, end, 173), end - 1]:
        archive.write_bytes(whole[:length])
        with pytest.raises(StoreError):
            import_(other, archive)
    assert kernels(other) == 0


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused_or_says_nothing(
    position: int, bit: int, tmp_path_factory: pytest.TempPathFactory, archive: Path
) -> None:
    root = tmp_path_factory.mktemp("flip")
    damaged = bytearray(archive.read_bytes())
    damaged[position % len(damaged)] ^= 1 << bit
    (root / "damaged.tar").write_bytes(damaged)
    other = Store(root / "store")
    try:
        import_(other, root / "damaged.tar")
    except StoreError:
        assert list((root / "store").iterdir()) == []
    else:
        export(other, root / "again.tar")
        assert (root / "again.tar").read_bytes() == archive.read_bytes()


@settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.binary(max_size=2000))
def test_bytes_that_are_no_archive_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "noise.tar").write_bytes(data)
    with pytest.raises(StoreError):
        import_(Store(tmp_path / "other"), tmp_path / "noise.tar")


@pytest.mark.parametrize("step", ["write_cubin", "write_record"])
def test_an_import_that_runs_out_of_room_shows_no_kernel_by_halves(
    step: str,
    tmp_path: Path,
    archive: Path,
    artifacts: list[Artifact],
    key_of: KeyOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    original = getattr(Directory, step)

    def refuse_second(*arguments: object) -> None:
        calls.append(step)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(*arguments)

    other = Store(tmp_path / "other")
    with monkeypatch.context() as patch:
        patch.setattr(Directory, step, refuse_second)
        with pytest.raises(StoreError, match="No space left"):
            import_(other, archive)
    assert kernels(other) == (step == "write_record")
    assert sum(other.get(key_of(artifact)) == artifact for artifact in artifacts) == kernels(other)
    assert other.counters.quarantined == 0
    missing = 3 - kernels(other)
    assert import_(other, archive) == missing


def test_an_import_needs_a_directory(archive: Path) -> None:
    with pytest.raises(StoreError, match="WARPLOOM_CACHE_DIR"):
        import_(Store(None), archive)
