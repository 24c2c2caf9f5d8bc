"""Nobody else may put a kernel where this process would run it."""

from __future__ import annotations

import grp
import os
import pwd
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from warploom.errors import StoreError
from warploom.generator import store_trust
from warploom.generator.artifact import Artifact
from warploom.generator.store import Store
from warploom.generator.store_record import Record

MakeArtifact = Callable[..., Artifact]
KeyOf = Callable[[Artifact], str]
ROOMS = ("", "objects", "keys", "sources", "locks", "quarantine")
ME = os.geteuid()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    store_trust._is_of_one.cache_clear()
    yield
    store_trust._is_of_one.cache_clear()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Return a function that decides who is on this machine, and in every group."""

    def machine(
        *, named: tuple[str, ...] = (), primary: tuple[int, ...] = (ME,), services: str = "files"
    ) -> None:
        users = {"me": ME, "root": 0, "other": ME + 1}

        def group(gid: int) -> SimpleNamespace:
            return SimpleNamespace(gr_gid=gid, gr_mem=list(named))

        gid = tmp_path.stat().st_gid
        monkeypatch.setattr(grp, "getgrgid", group)
        monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=users[name]))
        listed = [SimpleNamespace(pw_uid=user, pw_gid=gid) for user in primary]
        monkeypatch.setattr(pwd, "getpwall", lambda: listed)
        (tmp_path / "nsswitch.conf").write_text(
            f"# users\npasswd: {services}\ngroup: files [NOTFOUND=return] systemd\nhosts: dns\n"
        )
        monkeypatch.setattr(store_trust, "NAMES", tmp_path / "nsswitch.conf")

    return machine


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str], Store]:
    """Return a function that makes a room of a store writable for its group, and opens it."""

    def opened(room: str = "") -> Store:
        place = tmp_path / "store" / room
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o770)
        return Store(tmp_path / "store")

    return opened


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    "others",
    [
        {"named": ("me", "other")},
        {"primary": (ME, ME + 1)},
        {"services": "files sss"},
        {"services": "files [UNAVAIL=return] ldap"},
        {"named": ("left",)},
    ],
)
def test_a_store_that_a_group_can_write_to_is_refused(
    others: dict[str, object],
    room: str,
    machine: Callable[..., None],
    opened: Callable[[str], Store],
) -> None:
    machine(**others)
    with pytest.raises(StoreError, match=r"is writable for group \d+.*chmod g-w"):
        opened(room)


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize(
    "alone", [{}, {"named": ("me", "root"), "primary": ()}, {"services": "files systemd"}]
)
def test_a_group_that_has_no_other_member_is_no_other(
    alone: dict[str, object],
    room: str,
    machine: Callable[..., None],
    opened: Callable[[str], Store],
) -> None:
    machine(**alone)
    assert opened(room).directory is not None


def test_a_group_that_nobody_knows_is_refused(
    machine: Callable[..., None], opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()

    def unknown(gid: int) -> None:
        raise KeyError(gid)

    monkeypatch.setattr(grp, "getgrgid", unknown)
    with pytest.raises(StoreError, match="is writable for group"):
        opened()


def test_an_access_list_is_not_taken_for_a_group(
    machine: Callable[..., None], opened: Callable[..., Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine()
    monkeypatch.setattr(os, "listxattr", lambda place: ["system.posix_acl_access"])
    with pytest.raises(StoreError, match="is writable for those that its access list names"):
        opened()


def test_an_extra_directory_that_a_group_can_write_to_is_refused(
    machine: Callable[..., None], tmp_path: Path
) -> None:
    machine(named=("other",))
    (tmp_path / "extra").mkdir()
    (tmp_path / "extra").chmod(0o775)
    with pytest.raises(StoreError, match="is writable for group"):
        Store(None, [tmp_path / "extra"])


@pytest.mark.parametrize("place", ["shared/store", "shared/deep/store"])
def test_a_store_that_anyone_could_replace_is_refused(place: str, tmp_path: Path) -> None:
    (tmp_path / place).mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    (tmp_path / "link").symlink_to(tmp_path / place)
    for path in (tmp_path / place, tmp_path / "link"):
        with pytest.raises(StoreError, match=r"shared is writable for everyone.*chmod \+t"):
            Store(path)
        with pytest.raises(StoreError, match="who could replace"):
            Store(None, [path])
    (tmp_path / "shared").chmod(0o1777)
    assert Store(tmp_path / place).directory is not None


@pytest.mark.parametrize("room", ["keys", "objects"])
@pytest.mark.parametrize("work", ["of another user", "open to all", "open to a group"])
def test_a_file_that_another_may_have_written_is_a_miss_to_a_store_that_is_open(
    room: str,
    work: str,
    tmp_path: Path,
    machine: Callable[..., None],
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine(named=("other",))
    artifact = make_artifact()
    key = key_of(artifact)
    store, reader = Store(tmp_path / "store"), Store(None, [tmp_path / "store"])
    store.put(key, artifact)
    directory = store.directory
    assert directory is not None
    path = (
        directory.record_path(key) if room == "keys" else directory.object_path(Record.of(artifact))
    )
    if work == "of another user":
        real, planted = os.fstat, path.stat().st_ino

        def fstat(descriptor: int) -> os.stat_result:
            status = list(real(descriptor))
            status[4] += status[1] == planted
            return os.stat_result(status)

        monkeypatch.setattr(os, "fstat", fstat)
    else:
        path.chmod(0o602 if work == "open to all" else 0o660)
    assert reader.get(key) is None
    assert store.get(key) is None
    assert not path.exists()
    store.put(key, artifact)
    assert Store(tmp_path / "store").get(key) == artifact


def test_a_store_of_another_user_can_still_be_read(
    tmp_path: Path,
    make_artifact: MakeArtifact,
    key_of: KeyOf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    artifact = make_artifact()
    Store(tmp_path / "store").put(key_of(artifact), artifact)
    monkeypatch.setattr(os, "geteuid", lambda: ME + 1)
    with pytest.raises(StoreError, match=r"belongs to user .*WARPLOOM_CACHE_PATH only"):
        Store(tmp_path / "store")
    assert Store(None, [tmp_path / "store"]).get(key_of(artifact)) == artifact
