"""Crashes, full disks and races: after each, a kernel is there whole or not there at all."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import signal
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dying import code_of_process, intercept, put_killed_at, write_half

from warploom.generator.artifact import Artifact
from warploom.generator.store import Store
from warploom.generator.store_collection import GRACE_SECONDS, collect

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]
RunChild = Callable[[Callable[[], object]], int]


def age(root: Path) -> None:
    """Make every file in `root` older than any write in progress."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, times=(0, time.time() - 2 * GRACE_SECONDS))


@pytest.mark.parametrize("torn", [False, True])
@pytest.mark.parametrize("before", ["nothing", "another build", "a damaged cubin"])
def test_kill_at_each_step_of_a_put_leaves_the_kernel_whole_or_absent(
    torn: bool,
    before: str,
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
) -> None:
    artifact, earlier = make_artifact(build=1), make_artifact(build=0)
    key = key_of(artifact)
    accepted = [None, artifact, *([earlier] if before == "another build" else [])]
    outcomes = []
    for step in itertools.count():
        root = tmp_path / str(step)
        if before != "nothing":
            Store(root).put(key, artifact if before == "a damaged cubin" else earlier)
        if before == "a damaged cubin":
            next(iter((root / "objects").rglob("??/*"))).write_bytes(b"damaged")
        code = code_of_process(put_killed_at, step, root, artifact, key, torn)
        assert code in (0, -signal.SIGKILL)
        survivor = Store(root)
        found = survivor.get(key)
        assert found in accepted
        assert survivor.find(artifact.source_digest, "sm_90a") == found
        assert survivor.counters.quarantined <= (before == "a damaged cubin") * 2
        outcomes.append(found)
        survivor.put(key, artifact)
        assert Store(root).get(key) == artifact
        age(root)
        collect(survivor, max_bytes=10**9)
        assert [path.name for path in root.rglob("*.tmp")] == []
        assert Store(root).find(artifact.source_digest, "sm_90a") == artifact
        if code == 0:
            break
    assert len(outcomes) >= 10
    assert outcomes[-1] == artifact
    committed = outcomes.index(artifact)
    assert outcomes[committed:] == [artifact] * (len(outcomes) - committed)


@pytest.mark.parametrize("call", ["mkdir", "open", "write", "fsync", "close", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_at_any_step_costs_only_the_next_process_a_compilation(
    call: str,
    number: int,
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    artifact = make_artifact()
    key = key_of(artifact)
    for healthy in itertools.count():
        root = tmp_path / str(healthy)
        failures: list[str] = []
        calls = itertools.count()

        def fault(
            name: str,
            _: int,
            proceed: Callable[[], object],
            arguments: tuple[Any, ...],
            calls: Iterator[int] = calls,
            healthy: int = healthy,
            failures: list[str] = failures,
        ) -> object:
            if name != call or next(calls) < healthy:
                return proceed()
            if name == "write":
                write_half(arguments)
            if name == "close":
                proceed()
            failures.append(name)
            raise OSError(number, os.strerror(number))

        caplog.clear()
        with pytest.MonkeyPatch.context() as patch:
            intercept(patch, fault)
            store = Store(root)
            store.put(key, artifact)
            store.put(key, artifact)
        assert store.get(key) == artifact
        assert store.find(artifact.source_digest, "sm_90a") == artifact
        assert Store(root).get(key) in (None, artifact)
        assert list(root.rglob("*.tmp")) == []
        if not failures:
            break
        assert 1 <= len(caplog.records) <= 2
    assert healthy >= 3


@pytest.mark.parametrize("call", ["open", "fsync"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES])
def test_a_file_system_that_cannot_sync_directories_keeps_kernels(
    call: str,
    number: int,
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fault(
        name: str, _: int, proceed: Callable[[], object], arguments: tuple[Any, ...]
    ) -> object:
        opens = name == "open" and call == "open" and arguments[1] & os.O_DIRECTORY
        syncs = name == "fsync" and call == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
        if opens or syncs:
            raise OSError(number, os.strerror(number))
        return proceed()

    artifact = make_artifact()
    with pytest.MonkeyPatch.context() as patch:
        intercept(patch, fault)
        Store(tmp_path / "store").put(key_of(artifact), artifact)
    assert Store(tmp_path / "store").get(key_of(artifact)) == artifact
    assert caplog.records == []


def test_a_file_size_limit_leaves_no_partial_file(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf, in_child: RunChild
) -> None:
    artifact = make_artifact(size=100_000)
    key = key_of(artifact)

    def put_within_limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        store = Store(tmp_path / "store")
        store.put(key, artifact)
        assert store.get(key) == artifact
        assert store.stats().memory_kernels == 1

    assert in_child(put_within_limit) == 0
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []
    assert Store(tmp_path / "store").get(key) is None


def in_children(count: int, function: Callable[[int], None]) -> list[int]:
    """Run `function(index)` in that many children that start together; return their codes."""
    ready, go = os.pipe()
    children = []
    for index in range(count):
        child = os.fork()
        if not child:
            code = 70
            try:
                os.close(go)
                os.read(ready, 1)  # returns when the parent closes its end
                function(index)
                code = 0
            finally:
                os._exit(code)
        children.append(child)
    os.close(go)
    os.close(ready)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def test_sixteen_processes_that_lock_one_key_compile_it_once(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifact = make_artifact(size=50_000)
    key = key_of(artifact)

    def compile_once(index: int) -> None:
        store = Store(tmp_path / "store")
        with store.lock(key):
            if store.get(key) is None:
                (tmp_path / f"compiled_{index}").touch()
                store.put(key, artifact)
        assert store.get(key) == artifact

    assert in_children(16, compile_once) == [0] * 16
    assert len(list(tmp_path.glob("compiled_*"))) == 1


def test_sixteen_processes_without_a_lock_never_mix_two_builds_of_one_key(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    key = key_of(make_artifact())

    def write_and_read(index: int) -> None:
        store = Store(tmp_path / "store")
        mine = make_artifact(build=index, size=20_000)
        for _ in range(5):
            store.put(key, mine)
            found = store.get(key)
            assert found is not None
            assert found == make_artifact(build=int(found.compile_seconds), size=20_000)
        assert store.counters.quarantined == 0

    assert in_children(16, write_and_read) == [0] * 16
    (held,) = Store(tmp_path / "store").stats().directories
    assert (held.kernels, held.objects, held.quarantined) == (1, 16, 0)


def test_a_collection_beside_writers_costs_misses_only(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf
) -> None:
    artifacts = [make_artifact(seed, size=2000) for seed in range(4)]
    shared = [replace(artifact, cubin=artifacts[0].cubin) for artifact in artifacts]

    def work(index: int) -> None:
        store = Store(tmp_path / "store")
        for _ in range(20):
            if index == 0:
                collect(store, max_bytes=0)
            for artifact in shared:
                if index:
                    store.put(key_of(artifact), artifact)
                assert store.get(key_of(artifact)) in (None, artifact)

    assert in_children(4, work) == [0] * 4


def test_a_process_killed_inside_a_lock_holds_nobody_up(
    tmp_path: Path, make_artifact: MakeArtifact, key_of: KeyOf, in_child: RunChild
) -> None:
    key = key_of(make_artifact())

    def die_inside() -> None:
        with Store(tmp_path / "store").lock(key):
            os.kill(os.getpid(), signal.SIGKILL)

    assert in_child(die_inside) == -signal.SIGKILL
    signal.alarm(600)
    try:
        with Store(tmp_path / "store").lock(key):
            pass
    finally:
        signal.alarm(0)
