"""Who else could put a kernel where this process would run it: nobody may, since kernels are run.

Directories are judged when a store is opened, every file when it is: by its descriptor, so that
a directory that was swapped meanwhile gives nothing of its new owner's.
"""

from __future__ import annotations

import grp
import os
import pwd
import re
import stat
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from warploom.errors import StoreError

NAMES = Path("/etc/nsswitch.conf")  # where this machine's users and groups come from
_LOCAL = {"files", "altfiles", "extrausers", "compat", "systemd"}  # these can be listed
_RULE = "kernels are run, so nobody else may write to their store"


def refuse_shared(path: Path, rooms: Iterable[Path], *, owned: bool) -> None:
    """Raise StoreError if other users could put a kernel into the store at `path`, or swap it.

    What is `owned` must belong to this user.
    """
    for parent in path.resolve().parents:
        mode = parent.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise StoreError(
                f"{parent} is writable for everyone, who could replace {path}",
                rule=_RULE,
                fix=f"chmod +t {parent}, or name another directory",
            )
    for place in (path, *rooms):
        try:
            status = place.stat()
        except FileNotFoundError:
            continue
        if owned and status.st_uid != os.geteuid():
            raise StoreError(
                f"{place} belongs to user {status.st_uid}",
                rule=f"kernels are run, so their store must belong to you (user {os.geteuid()})",
                fix="chown it, or set WARPLOOM_CACHE_DIR to a directory of your own; "
                "WARPLOOM_CACHE_PATH only reads what others own",
            )
        # A sticky directory keeps others from replacing the rooms, which are checked themselves.
        guarded = owned and place == path and status.st_mode & stat.S_ISVTX
        if not guarded and (others := writers(place, status)):
            letter = "o" if others == "everyone" else "g"
            raise StoreError(
                f"{place} is writable for {others}",
                rule=_RULE,
                fix=f"chmod {letter}-w {place}, or name another directory",
            )


def stranger(descriptor: int, owner: int) -> str | None:
    """Say why an open file of a store of `owner` may be another's work, or return None."""
    status = os.fstat(descriptor)
    if status.st_uid not in {0, os.geteuid(), owner}:
        return f"it belongs to user {status.st_uid}"
    if others := writers(descriptor, status):
        return f"it is writable for {others}"
    return None


def writers(place: Path | int, status: os.stat_result) -> str | None:
    """Say who besides its owner, this user and root can write to a file or directory, if any."""
    if status.st_mode & stat.S_IWOTH:
        return "everyone"
    if not status.st_mode & stat.S_IWGRP:  # with an access list, what its users have at most
        return None
    if "system.posix_acl_access" in _attributes(place):
        return "those that its access list names"
    if _is_of_one(status.st_gid, frozenset({0, os.geteuid(), status.st_uid})):
        return None
    return f"group {status.st_gid}"


def _attributes(place: Path | int) -> list[str]:
    try:
        return os.listxattr(place)
    except OSError:  # a file system that has none
        return []


@cache
def _is_of_one(group: int, users: frozenset[int]) -> bool:
    """Return True if a group is known to have no member but `users`."""
    if not _can_be_listed():
        return False
    try:
        members = {pwd.getpwnam(name).pw_uid for name in grp.getgrgid(group).gr_mem}
    except KeyError:  # a group or a member that has no name: nothing is known of it
        return False
    return members | {user.pw_uid for user in pwd.getpwall() if user.pw_gid == group} <= users


def _can_be_listed() -> bool:
    """Return True if all users and groups are this machine's own, and so can be listed."""
    try:
        text = NAMES.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:  # the C library then reads its files
        return True
    except OSError:
        return False
    lines = re.findall(r"^\s*(?:passwd|group|initgroups):([^#\n]*)", text, re.MULTILINE)
    services = re.sub(r"\[[^\]]*\]", " ", " ".join(lines)).split()
    return set(services) <= _LOCAL
