"""Damaged files: whatever a bit flip, a truncation or a mix-up does, never a wrong kernel."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path

import pytest

from warploom.generator.artifact import Artifact
from warploom.generator.store import Store
from warploom.generator.store_collection import collect
from warploom.generator.store_record import Record, pack

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]
Place = Callable[[Store, Artifact], Path]


def record_path(store: Store, artifact: Artifact) -> Path:
    assert store.directory is not None
    return store.directory.record_path(Record.of(artifact).key)


def object_path(store: Store, artifact: Artifact) -> Path:
    assert store.directory is not None
    return store.directory.object_path(Record.of(artifact))


PLACES = pytest.mark.parametrize("place", [record_path, object_path])


def flips(whole: bytes) -> Iterator[bytes]:
    for position in range(len(whole)):
        for bit in (position % 8, 7 - position % 8):
            damaged = bytearray(whole)
            damaged[position] ^= 1 << bit
            yield bytes(damaged)


def truncations(whole: bytes) -> Iterator[bytes]:
    return (whole[:length] for length in range(len(whole)))


def extensions(whole: bytes) -> Iterator[bytes]:
    yield from (whole + tail for tail in (b"\0", b"\n", b"}", whole))
    yield b"\n" + whole


@PLACES
@pytest.mark.parametrize("damage", [flips, truncations, extensions])
def test_no_damage_to_any_byte_yields_another_kernel(
    place: Place,
    damage: Callable[[bytes], Iterator[bytes]],
    store: Store,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
) -> None:
    artifact = make_artifact(size=200)
    key = key_of(artifact)
    store.put(key, artifact)
    record, cubin = record_path(store, artifact), object_path(store, artifact)
    whole = {path: path.read_bytes() for path in (record, cubin)}
    damaged = place(store, artifact)
    survived = 0
    for data in damage(whole[damaged]):
        for path, content in whole.items():
            path.write_bytes(data if path == damaged else content)
        found = store.get(key)
        assert found in (None, artifact)
        if found is None:
            assert not record.exists()  # set aside: nobody stumbles over it again
        survived += found is not None
    # Only padding bits at the end of a compressed stream say nothing about its contents.
    assert survived <= (2 if (place, damage) == (object_path, flips) else 0)
    store.put(key, artifact)
    assert store.get(key) == artifact


@PLACES
def test_damage_is_logged_and_counted_once_and_the_file_set_aside(
    place: Place,
    store: Store,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    artifact = make_artifact()
    store.put(key_of(artifact), artifact)
    damaged = place(store, artifact)
    damaged.write_bytes(b"damaged")
    assert [store.get(key_of(artifact)) for _ in range(3)] == [None] * 3
    assert not damaged.exists()
    aside = {path.name for path in (damaged.parents[2] / "quarantine").iterdir()}
    assert damaged.name in aside
    assert sum(str(damaged) in record.getMessage() for record in caplog.records) == 1
    assert store.counters.quarantined == len(aside)
    assert store.counters.misses == 3


@PLACES
@pytest.mark.parametrize("kind", ["missing", "link", "directory", "pipe"])
def test_something_other_than_a_file_is_a_miss(
    kind: str,
    place: Place,
    tmp_path: Path,
    store: Store,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
) -> None:
    artifact = make_artifact()
    store.put(key_of(artifact), artifact)
    path = place(store, artifact)
    outside = path.rename(tmp_path / "outside")
    if kind == "link":
        path.symlink_to(outside)
    elif kind == "directory":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    assert store.get(key_of(artifact)) is None
    assert store.find(artifact.source_digest, artifact.arch) is None
    store.put(key_of(artifact), artifact)
    assert store.get(key_of(artifact)) == artifact
    assert Store(tmp_path / "store").get(key_of(artifact)) == artifact  # on disk, not in memory


@pytest.mark.parametrize("kind", ["link", "directory"])
def test_a_name_planted_in_the_index_is_neither_followed_nor_in_the_way(
    kind: str, tmp_path: Path, store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact()
    assert store.directory is not None
    entry = store.directory.source_path(Record.of(artifact))
    entry.parent.mkdir(parents=True)
    if kind == "link":
        entry.symlink_to(tmp_path / "outside")
    else:
        (entry / "inside").mkdir(parents=True)
    store.put(key_of(artifact), artifact)
    assert not (tmp_path / "outside").exists()
    assert store.stats().memory_kernels == 0
    assert Store(tmp_path / "store").find(artifact.source_digest, "sm_90a") == artifact
    assert collect(store, max_bytes=0).kernels == 1


def test_the_cubin_of_another_writer_under_an_objects_name_is_a_miss(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    one, two = make_artifact(1), make_artifact(2)
    for artifact in (one, two):
        store.put(key_of(artifact), artifact)
    object_path(store, one).write_bytes(object_path(store, two).read_bytes())
    assert store.get(key_of(one)) is None
    assert store.get(key_of(two)) == two


def test_the_record_of_another_key_is_a_miss_even_though_it_is_whole(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    one, two = make_artifact(1), make_artifact(2)
    for artifact in (one, two):
        store.put(key_of(artifact), artifact)
    record_path(store, one).write_bytes(record_path(store, two).read_bytes())
    assert store.get(key_of(one)) is None
    assert store.find(one.source_digest, "sm_90a") is None
    assert store.get(key_of(two)) == two


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"arch": "sm_100a"},
        {"toolchain": "other"},
        {"source_digest": "0" * 64},
        {"source_digest": "../../escape"},
        {"options": ["-O0"]},
        {"options": "-O0"},
        {"cubin_bytes": 403},
        {"cubin_bytes": "404"},
        {"cubin_bytes": -1},
        {"cubin_sha256": "0" * 64},
        {"cubin_sha256": "../../../outside"},
        {"key": "0" * 64},
        {"resources": {"entry": [1, 2]}},
        {"resources": {}},
        {"resources": {"\x1b[2Jmain": {"registers": 1, "spill_bytes": 0, "local_bytes": 0}}},
        {"name": "\x1b]0;title\x07gemm"},
        {"name": "gemm\n"},
        {"name": ""},
        {"name": "g" * 301},
        {"cubin_bytes": 17 << 20},
        {"compile_seconds": None},
        {"unknown": 1},
    ],
)
def test_a_sealed_record_with_fields_that_do_not_fit_is_a_miss(
    change: dict[str, object], store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact()
    store.put(key_of(artifact), artifact)
    path = record_path(store, artifact)
    fields = json.loads(path.read_bytes())["record"] | change
    text = json.dumps(fields, separators=(",", ":")).encode()
    path.write_bytes(seal(text))
    assert store.get(key_of(artifact)) is None


@pytest.mark.parametrize("text", [b"", b"{}", b"[]", b"null", b"[" * 100_000, b'"\xff"'])
def test_sealed_nonsense_is_a_miss(
    text: bytes, store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact()
    store.put(key_of(artifact), artifact)
    record_path(store, artifact).write_bytes(seal(text))
    assert store.get(key_of(artifact)) is None


def test_an_object_that_inflates_past_its_length_is_not_inflated_whole(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact()
    store.put(key_of(artifact), artifact)
    object_path(store, artifact).write_bytes(pack(bytes(64 << 20)))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert store.get(key_of(artifact)) is None
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10  # KiB


def seal(text: bytes) -> bytes:
    return b'{"record":%b,"checksum":"%b"}\n' % (text, sha256(text).hexdigest().encode())
