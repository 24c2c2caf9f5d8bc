"""Files that are replaced whole or not at all, whatever ends the process that writes them."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# What file systems say that cannot sync a directory, and directories that cannot be opened for it.
_NO_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EACCES}


def replace_file(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Put `content` in the place of the file at `path`; see `replacing`.

    Raises:
        OSError: the file cannot be written; what was there is unchanged.
    """
    with replacing(path, private=private) as written:
        _fill(written, content.encode() if isinstance(content, str) else content)


@contextmanager
def replacing(path: Path, *, private: bool = False) -> Iterator[Path]:
    """Yield an empty file; once the block has filled it, it takes the place of the one at `path`.

    A file that was there keeps its mode, and a symbolic link its place: the file that it points to
    is replaced. A new file has the mode that the umask allows. The file and its name are on disk
    when the block ends. An exception leaves what was there, and nothing else.

    Args:
        private: the file belongs to the kernel cache: only its owner may read or write it, and a
            link that lies there is replaced itself.

    Raises:
        OSError: the directory cannot be written, or something other than a regular file is there.
    """
    target = path if private else Path(os.path.realpath(path))
    mode = None
    with suppress(FileNotFoundError):
        # Of the path itself: what the link /dev/stdout leads to has no name where it is a pipe.
        found = path.lstat() if private else path.stat()
        if not private and not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "must be a regular file, or no file yet", str(path))
        mode = stat.S_IMODE(found.st_mode)
    with beside(target, private=private, called=path) as written:
        if mode is None or private:
            mode = stat.S_IMODE(written.stat().st_mode)  # as the umask has it
        yield written
        written.chmod(mode)  # some libraries put a file of their own in its place
        _sync(written)
        written.replace(target)
    sync_directory(target.parent)


@contextmanager
def beside(path: Path, *, private: bool = False, called: Path | None = None) -> Iterator[Path]:
    """Yield a new, empty file in the directory of `path`, which is gone when the block ends.

    Args:
        called: what an error names, where its user does not know `path`.

    Raises:
        OSError: the directory cannot be written.
    """
    written = path.with_name(f".{secrets.token_hex(8)}.tmp")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        try:
            os.close(os.open(written, flags, 0o600 if private else 0o666))
        except OSError as error:  # which names the temporary file
            raise OSError(error.errno, error.strerror, str(called or path)) from None
        yield written
    finally:
        with suppress(OSError):
            written.unlink()


def sync_directory(path: Path) -> None:
    """Make the names in `path` last, where its file system can.

    Raises:
        OSError: the disk fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def _fill(path: Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    finally:
        os.close(descriptor)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
