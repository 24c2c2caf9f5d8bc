"""A toolchain's identity is of what is in its files, whatever their wheels claim, and is kept."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from warploom.errors import ToolchainError
from warploom.generator import nvrtc, toolchain, toolchain_files
from warploom.generator.toolchain import Component, Toolchain


def test_identity_is_of_contents_not_of_where_they_lie(
    install: Callable[..., Component],
) -> None:
    here, there = install("here").recorded(), install("there").recorded()
    assert here == there == install("unrecorded", record=False).hashed()
    assert sorted(here) == ["deep/two.h", "one.h"]


def test_files_without_a_recorded_hash_are_not_taken_for_hashed(
    install: Callable[..., Component],
) -> None:
    part = install("site")
    record = part.folder.parents[1] / "headers-1.0.dist-info" / "RECORD"
    record.write_text("headers/include/one.h,,\nheaders/include/deep/two.h,sha256=abc,9\n")
    assert part.recorded() == {}
    assert install("other", record=False).recorded() == {}


def test_a_changed_byte_changes_the_content_hash_and_fails_verification(
    install: Callable[..., Component],
) -> None:
    part = install("site")
    chain = Toolchain.of((part,))
    assert chain.verify() == ()
    before = part.hashed()
    (part.folder / "one.h").write_text("#pragma twice\n")
    assert chain.verify() == (part.folder / "one.h",)
    assert {name for name in before if before[name] != part.hashed()[name]} == {"one.h"}


@pytest.fixture
def settled(
    install: Callable[..., Component], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Component:
    """Return a component whose files changed long ago, as far as the clock is asked."""
    part = install("site")
    changed, probe = max(one.stat().st_ctime_ns for one in part.folder.rglob("*")), tmp_path / "now"
    probe.touch()
    while probe.stat().st_ctime_ns <= changed:  # until the file system's clock has ticked
        time.sleep(0.001)
        probe.touch()
    now = time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now + 10**13)  # hours: tests may be slow
    return part


@pytest.fixture
def hashings(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list to which every file that is hashed is added."""
    done: list[Path] = []
    digest = toolchain_files._file_digest

    def count(path: Path) -> str:
        done.append(path)
        return digest(path)

    monkeypatch.setattr(toolchain_files, "_file_digest", count)
    return done


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "store"))
    return tmp_path / "store"


def edit(path: Path) -> None:
    """Change a byte, and take back the file's size and time of modification."""
    before = path.stat()
    path.write_text(path.read_text().replace("o", "0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def rename(path: Path) -> None:
    path.rename(path.with_name("three.h"))


def add(path: Path) -> None:
    path.with_name("more.h").write_text("int more;\n")


@pytest.mark.parametrize("change", [edit, Path.unlink, rename, add])
def test_a_toolchain_changed_in_place_is_another_one(
    change: Callable[[Path], None], settled: Component, cache: Path
) -> None:
    found = Toolchain.of((settled,))
    assert Toolchain.of((settled,)).identity == found.identity
    found.require_unchanged()
    change(settled.folder / "one.h")
    assert Toolchain.of((settled,)).identity != found.identity
    with pytest.raises(
        ToolchainError, match=r"files of headers in .* were changed after this process read them"
    ):
        found.require_unchanged()


def test_a_header_changed_and_changed_back_has_its_old_identity(
    settled: Component, cache: Path
) -> None:
    found = Toolchain.of((settled,))
    (settled.folder / "one.h").write_text("#pragma twice\n")
    assert Toolchain.of((settled,)).identity != found.identity
    (settled.folder / "one.h").write_text("#pragma once\n")
    assert Toolchain.of((settled,)).identity == found.identity


def test_files_are_hashed_once_as_long_as_their_stamps_stand(
    settled: Component, cache: Path, hashings: list[Path]
) -> None:
    first = Toolchain.of((settled,)).identity
    assert len(hashings) == 2
    assert Toolchain.of((settled,)).identity == first
    assert len(hashings) == 2
    (settled.folder / "one.h").touch()
    assert Toolchain.of((settled,)).identity == first
    assert len(hashings) == 4


def test_what_was_changed_a_moment_ago_is_hashed_again(
    install: Callable[..., Component],
    cache: Path,
    hashings: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    part, now = install("site"), time.time_ns()
    monkeypatch.setattr(time, "time_ns", lambda: now)  # however long this takes
    hashings.clear()
    assert Toolchain.of((part,)).identity == Toolchain.of((part,)).identity
    assert len(hashings) == 4


@pytest.mark.parametrize(
    "data", [b"", b"0" * 64, b"0" * 64 + b" " + b"0" * 64 + b"\n", b"\xff" * 99]
)
def test_a_damaged_note_of_an_identity_is_not_believed(
    data: bytes, settled: Component, cache: Path
) -> None:
    found = Toolchain.of((settled,)).identity
    (note,) = (cache / "toolchains").iterdir()
    note.write_bytes(data)
    assert Toolchain.of((settled,)).identity == found


def test_without_a_store_the_identity_is_the_same(
    settled: Component, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    found = Toolchain.of((settled,)).identity
    (tmp_path / "file").touch()
    monkeypatch.setenv("WARPLOOM_CACHE_DIR", str(tmp_path / "file" / "store"))
    assert Toolchain.of((settled,)).identity == found


def test_a_header_that_cannot_be_read_is_named(
    settled: Component, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(toolchain_files, "_file_digest", refuse)
    with pytest.raises(ToolchainError, match=r"\.h: Permission denied: .* must be readable"):
        Toolchain.of((settled,))


def test_a_header_changed_while_a_kernel_compiles_leaves_no_kernel(
    settled: Component, cache: Path
) -> None:
    found = toolchain.find()
    beside = Toolchain.of((*found.components, settled))
    (settled.folder / "one.h").write_text("#pragma twice\n")
    with pytest.raises(ToolchainError, match="start the process again"):
        nvrtc.compile(
            'extern "C" __global__ void f() {}', name="f", arch="sm_90a", toolchain=beside
        )
