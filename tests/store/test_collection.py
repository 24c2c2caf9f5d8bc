"""Garbage collection: what it removes, what it spares, and what is left still reads."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from warploom.errors import StoreError
from warploom.generator.artifact import Artifact
from warploom.generator.store import Store
from warploom.generator.store_collection import GRACE_SECONDS, collect
from warploom.generator.store_record import Record

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]


@pytest.fixture
def aged(store: Store, make_artifact: MakeArtifact, key_of: KeyOf) -> list[Artifact]:
    """Return three stored artifacts, last used 30, 20 and 10 days ago."""
    artifacts = [make_artifact(seed) for seed in range(3)]
    assert store.directory is not None
    for artifact, days in zip(artifacts, (30, 20, 10), strict=True):
        store.put(key_of(artifact), artifact)
        used = time.time() - days * 86_400
        os.utime(store.directory.record_path(key_of(artifact)), (used, used))
    return artifacts


def held(store: Store) -> int:
    return store.stats().directories[0].bytes


def test_older_than_removes_what_was_not_used_since(
    store: Store, aged: list[Artifact], key_of: KeyOf
) -> None:
    assert store.get(key_of(aged[0])) == aged[0]  # now the most recently used
    before = held(store)
    collected = collect(store, older_than=15 * 86_400)
    assert (collected.kernels, collected.leftovers) == (1, 0)
    assert collected.bytes == before - held(store)
    assert [store.get(key_of(artifact)) for artifact in aged] == [aged[0], None, aged[2]]
    assert store.find(aged[1].source_digest, "sm_90a") is None


def test_max_bytes_removes_the_longest_unused_until_it_fits(
    store: Store, aged: list[Artifact], key_of: KeyOf
) -> None:
    budget = held(store) - 1
    assert collect(store, max_bytes=budget).kernels == 1
    assert held(store) <= budget
    assert [store.get(key_of(artifact)) for artifact in aged] == [None, *aged[1:]]
    assert collect(store, max_bytes=0).kernels == 2
    (stats,) = store.stats().directories
    assert (stats.kernels, stats.objects, stats.bytes) == (0, 0, 0)
    assert store.directory is not None
    assert store.directory.files("sources") == []


def test_a_cubin_stays_as_long_as_one_record_names_it(
    store: Store, aged: list[Artifact], key_of: KeyOf, make_artifact: MakeArtifact
) -> None:
    sharing = replace(make_artifact(9), cubin=aged[0].cubin)
    store.put(key_of(sharing), sharing)
    assert collect(store, older_than=15 * 86_400).kernels == 2
    assert store.get(key_of(aged[0])) is None
    assert store.get(key_of(sharing)) == sharing


def test_without_a_limit_only_old_leftovers_go(
    store: Store, aged: list[Artifact], key_of: KeyOf
) -> None:
    assert store.directory is not None
    root = store.directory.path
    names = (".write.tmp", "ab" * 32)
    young = [root / "objects" / "00" / name for name in names]
    old = [root / room / "01" / name for room in ("objects", "keys", "sources") for name in names]
    for path in [*young, *old]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"left over")
    for path in old:
        os.utime(path, times=(0, time.time() - GRACE_SECONDS - 10))
    (root / "quarantine").mkdir()
    (root / "quarantine" / "damaged").write_bytes(b"damaged")
    collected = collect(store)
    assert (collected.kernels, collected.leftovers) == (0, len(old) + 1)
    assert collected.bytes == len(old) * len(b"left over") + len(b"damaged")
    assert all(path.exists() for path in young)
    assert not any(path.exists() for path in old)
    assert [store.get(key_of(artifact)) for artifact in aged] == aged


def test_an_old_cubin_that_a_new_record_is_about_to_name_is_spared(
    store: Store, aged: list[Artifact], key_of: KeyOf, make_artifact: MakeArtifact
) -> None:
    assert store.directory is not None
    record = Record.of(make_artifact(9))
    store.directory.write_cubin(record, make_artifact(9).cubin)
    path = store.directory.object_path(record)
    os.utime(path, times=(0, 0))
    store.directory.write_cubin(record, make_artifact(9).cubin)
    assert collect(store).leftovers == 0
    assert path.exists()


def test_directories_and_links_in_quarantine_go_too(store: Store, aged: list[Artifact]) -> None:
    assert store.directory is not None
    quarantine = store.directory.path / "quarantine"
    (quarantine / "directory" / "inside").mkdir(parents=True)
    (quarantine / "directory" / "file").write_bytes(b"left over")
    (quarantine / "directory" / "away").symlink_to(store.directory.path / "keys")
    (quarantine / "link").symlink_to(store.directory.path / "keys")
    assert collect(store).leftovers == 3
    assert list(quarantine.iterdir()) == []
    assert len(list(store.directory.records())) == 3


def test_a_collection_reads_each_record_once(
    store: Store, aged: list[Artifact], monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    parse = Record.parse

    def count(key: str, data: bytes) -> Record:
        parsed.append(key)
        return parse(key, data)

    monkeypatch.setattr(Record, "parse", count)
    collect(store, older_than=15 * 86_400)
    assert len(parsed) == 3


@pytest.mark.parametrize("limit", [math.nan, math.inf, -1])
def test_a_limit_that_is_none_is_refused(limit: float, store: Store, aged: list[Artifact]) -> None:
    with pytest.raises(StoreError, match="must be finite"):
        collect(store, older_than=limit)
    with pytest.raises(StoreError, match="must be finite"):
        collect(store, max_bytes=limit)  # type: ignore[arg-type]
    assert store.stats().directories[0].kernels == 3


def test_a_store_in_memory_has_nothing_to_collect() -> None:
    with pytest.raises(StoreError, match="memory"):
        collect(Store(None))
