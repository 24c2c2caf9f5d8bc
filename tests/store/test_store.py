"""The store in good weather, its places, and the directories it refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from warploom.errors import StoreError
from warploom.generator.artifact import Artifact
from warploom.generator.store import Store, key, source_digest

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]
RunChild = Callable[[Callable[[], object]], int]


def test_key_depends_on_every_field_and_on_where_fields_end() -> None:
    base = ("source", ["-a", "-b"], "sm_90a", "toolchain")
    others = [
        ("source ", ["-a", "-b"], "sm_90a", "toolchain"),
        ("source", ["-b", "-a"], "sm_90a", "toolchain"),
        ("source", ["-a-b"], "sm_90a", "toolchain"),
        ("source", ["-a", "-b", ""], "sm_90a", "toolchain"),
        ("source", ["-a", "-b"], "sm_100a", "toolchain"),
        ("source", ["-a", "-b"], "sm_90a", "toolchain2"),
        ("source", ["-a", "-b"], "sm_90", "atoolchain"),
        ("source", ["-a", "-b", "arch"], "sm_90a", "toolchain"),
    ]
    keys = {key(*fields) for fields in [base, *others]}
    assert len(keys) == 1 + len(others)
    assert key(*base) == key(*base)
    assert {len(digest) for digest in keys} == {64}


def test_a_second_store_reads_back_every_field(
    tmp_path: Path, store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact()
    assert store.get(key_of(artifact)) is None
    store.put(key_of(artifact), artifact)
    second = Store(tmp_path / "store")
    assert second.get(key_of(artifact)) == artifact
    assert (store.counters.misses, store.counters.puts, store.counters.hits) == (1, 1, 0)
    assert (second.counters.misses, second.counters.puts, second.counters.hits) == (0, 0, 1)


def test_an_artifact_under_a_key_that_is_not_its_own_is_refused(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    with pytest.raises(StoreError, match="give"):
        store.put(key_of(make_artifact(1)), make_artifact(2))
    assert store.stats().directories[0].kernels == 0


def test_equal_cubins_of_two_kernels_are_kept_once(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    one = make_artifact(1)
    two = replace(make_artifact(2), cubin=one.cubin)
    store.put(key_of(one), one)
    store.put(key_of(two), two)
    (held,) = store.stats().directories
    assert (held.kernels, held.objects) == (2, 1)
    assert store.get(key_of(two)) == two


def test_find_prefers_the_exact_toolchain_and_then_a_fixed_order(
    tmp_path: Path, store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifacts = {name: make_artifact(toolchain=name) for name in ("c", "a", "b")}
    for artifact in artifacts.values():
        store.put(key_of(artifact), artifact)
    fresh = Store(tmp_path / "store")
    digest = artifacts["a"].source_digest
    assert fresh.find(digest, "sm_90a", "b") == artifacts["b"]
    assert fresh.find(digest, "sm_90a", "c") == artifacts["c"]
    assert fresh.find(digest, "sm_90a", "unknown") == artifacts["a"]
    assert fresh.find(digest, "sm_90a") == artifacts["a"]
    assert fresh.find(digest, "sm_100a") is None
    assert fresh.find(source_digest("another"), "sm_90a") is None
    assert (fresh.counters.hits, fresh.counters.misses) == (4, 2)


def test_find_goes_on_to_the_next_toolchain_when_the_exact_one_is_damaged(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    one, two = make_artifact(toolchain="one"), make_artifact(toolchain="two")
    for artifact in (one, two):
        store.put(key_of(artifact), artifact)
    assert store.directory is not None
    record = store.directory.record(key_of(two))
    assert record is not None
    store.directory.object_path(record).write_bytes(b"damaged")
    assert store.find(one.source_digest, "sm_90a", "two") == one


def test_extra_directories_are_read_and_never_written(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    shared, local = make_artifact(1), make_artifact(2)
    Store(tmp_path / "shared").put(key_of(shared), shared)
    before = sorted((tmp_path / "shared").rglob("*"))
    store = Store(tmp_path / "own", [tmp_path / "shared"])
    store.put(key_of(local), local)
    assert store.get(key_of(shared)) == shared
    assert store.find(shared.source_digest, "sm_90a") == shared
    assert store.get(key_of(local)) == local
    assert sorted((tmp_path / "shared").rglob("*")) == before
    assert [held.kernels for held in store.stats().directories] == [1, 1]


def test_damage_in_an_extra_directory_is_a_miss_and_stays_where_it_is(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf, caplog: pytest.LogCaptureFixture
) -> None:
    artifact = make_artifact()
    Store(tmp_path / "shared").put(key_of(artifact), artifact)
    (record,) = (tmp_path / "shared" / "keys").rglob("*.json")
    record.write_bytes(b"{}")
    store = Store(None, [tmp_path / "shared"])
    assert store.get(key_of(artifact)) is None
    assert store.get(key_of(artifact)) is None
    assert record.read_bytes() == b"{}"
    assert len(caplog.records) == 1


def test_default_reads_the_environment(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
) -> None:
    artifacts = [make_artifact(seed) for seed in range(3)]
    for artifact in artifacts:
        Store(tmp_path / artifact.name).put(key_of(artifact), artifact)
    places = [str(tmp_path / artifact.name) for artifact in artifacts]
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", places[0])
    monkeypatch.setenv("WARPLOOM_CACHE_PATH", os.pathsep.join(["", *places[1:]]))
    store = Store.default()
    assert [store.get(key_of(artifact)) for artifact in artifacts] == artifacts
    monkeypatch.delenv("WARPLOOM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    own = Store.default().directory
    assert own is not None
    assert own.path == tmp_path / "home" / "warploom"


@pytest.mark.parametrize("place", ["file/warploom", "file", "/proc/warploom"])
def test_a_home_that_cannot_be_made_degrades_to_memory_with_one_warning(
    place: str,
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    store = Store(tmp_path / place)
    for seed in range(3):
        store.put(key_of(make_artifact(seed)), make_artifact(seed))
    assert store.get(key_of(make_artifact(1))) == make_artifact(1)
    assert store.find(make_artifact(2).source_digest, "sm_90a") == make_artifact(2)
    with store.lock(key_of(make_artifact(1))):
        pass
    assert store.stats().memory_kernels == 3
    assert len(caplog.records) == 1
    assert "WARPLOOM_CACHE_DIR" in caplog.text


def test_a_read_only_home_is_still_read_and_new_kernels_stay_in_memory(
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    old, new = make_artifact(1), make_artifact(2)
    Store(tmp_path / "store").put(key_of(old), old)
    real_open = os.open

    def open_read_only(path: str, flags: int, mode: int = 0o777) -> int:
        if flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "Read-only file system")
        return real_open(path, flags, mode)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", open_read_only)
    for name in ("mkdir", "utime", "replace", "unlink"):
        monkeypatch.setattr(os, name, refuse)
    store = Store(tmp_path / "store")
    store.put(key_of(new), new)
    store.put(key_of(make_artifact(3)), make_artifact(3))
    assert store.get(key_of(old)) == old
    assert store.get(key_of(new)) == new
    with store.lock(key_of(new), timeout=1):
        pass
    assert len(caplog.records) == 1


def test_a_world_writable_root_is_refused_with_advice(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(StoreError, match="chmod o-w"):
        Store(tmp_path)
    tmp_path.chmod(0o1777)
    assert Store(tmp_path).directory is not None
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys").chmod(0o1777)
    with pytest.raises(StoreError, match="keys is writable for everyone"):
        Store(tmp_path)


def test_a_world_writable_extra_directory_is_refused_even_when_sticky(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    with pytest.raises(StoreError, match="writable for everyone"):
        Store(None, [tmp_path])


def test_a_foreign_root_or_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(StoreError, match=f"belongs to user {me}.*WARPLOOM_CACHE_DIR"):
        Store(tmp_path)
    assert Store(None, [tmp_path]).stats().directories[0].kernels == 0


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_directories_and_files_are_private_whatever_the_umask(
    umask: int,
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    in_child: RunChild,
) -> None:
    root = tmp_path / "new" / "store"

    def write(mask: int, seed: int) -> None:
        os.umask(mask)
        store = Store(root)
        with store.lock(key_of(make_artifact(seed))):
            store.put(key_of(make_artifact(seed)), make_artifact(seed))

    assert in_child(lambda: write(umask, 1)) == 0
    assert in_child(lambda: write(0o077, 2)) == 0
    assert in_child(lambda: write(umask, 3)) == 0
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path
    store = Store(root)
    for seed in (1, 2, 3):
        assert store.get(key_of(make_artifact(seed))) == make_artifact(seed)


def test_a_lock_that_is_held_delays_but_never_stops(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf, in_child: RunChild
) -> None:
    wanted = key_of(make_artifact())
    entered = []

    def wait_briefly() -> None:
        with store.lock(wanted, timeout=0.2):
            entered.append(time.monotonic())

    with store.lock(wanted):
        began = time.monotonic()
        assert in_child(wait_briefly) == 0
        assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("error", [OSError(errno.ENOLCK, "No locks"), NotImplementedError("flock")])
def test_a_file_system_without_locks_stops_nobody(
    error: Exception, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(fcntl, "flock", refuse)
    entered = []
    with store.lock("0" * 64, timeout=0.1):
        entered.append(True)
    assert entered


def test_an_error_inside_a_lock_comes_out(store: Store) -> None:
    with pytest.raises(OSError, match="of the caller"), store.lock("0" * 64):
        raise OSError("of the caller")


def test_explain_names_the_fields_that_differ_nearest_first(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    near = make_artifact(toolchain="new")
    far = make_artifact(toolchain="newer", options=("-std=c++20",))
    for artifact in (far, near, make_artifact(9)):
        store.put(key_of(artifact), artifact)
    wanted = make_artifact(toolchain="old")
    explanation = store.explain(
        key_of(wanted),
        name=wanted.name,
        source_digest=wanted.source_digest,
        arch=wanted.arch,
        toolchain=wanted.toolchain,
        options=list(wanted.options),
    )
    assert not explanation.present
    assert [neighbour.key for neighbour in explanation.nearest] == [key_of(near), key_of(far)]
    assert explanation.nearest[0].differences == {"toolchain": ("old", "new")}
    assert explanation.nearest[1].differences == {
        "toolchain": ("old", "newer"),
        "options": (("-std=c++17", "-DNDEBUG"), ("-std=c++20",)),
    }


def test_explain_calls_present_only_what_can_be_read(
    store: Store, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact()
    store.put(key_of(artifact), artifact)
    assert store.explain(key_of(artifact)).present
    assert store.explain(name=artifact.name, toolchain=artifact.toolchain).present
    assert not store.explain(name=artifact.name, toolchain="other").present
    assert store.directory is not None
    for path in store.directory.files("objects"):
        path.write_bytes(b"damaged")
    assert not store.explain(key_of(artifact)).present
