"""`warploom.recording`: writes down which calls a program makes, to compile them elsewhere."""

from __future__ import annotations

import errno
import logging
import os
from contextlib import AbstractContextManager, ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from warploom.arguments import shown
from warploom.errors import ConfigurationError, ProblemError
from warploom.generator import json_file
from warploom.runtime.families import every
from warploom.runtime.plan import Plan, heard
from warploom.tuning.autotune.engine import ENGINE
from warploom.tuning.calls import NONE, SUFFIX, RecordedCall, write

logger = logging.getLogger(__name__)


def recording(path: str | os.PathLike[str]) -> Recording:
    """Write every distinct call that is made meanwhile to a file: a context, or a decorator.

    `warploom compile calls.json --gpu NAME` then compiles the kernels that these calls run on that
    GPU, on a machine that has neither it nor the model. Calls of all threads are recorded: those
    that are new, those whose plan was kept before (by a layer, a compiled function, a backward pass
    or the user), and those that a CUDA graph captures; not replays of a graph that was captured
    before. Calls on CPU tensors, which a reference computes, are recorded as well; what torch
    computes is none of them, as on the CPU layers of warploom.nn, warploom.sdpa and models that
    were patched: run these on a GPU. The file is replaced as a whole when the block ends, also by
    an exception, and has what was seen until then. Contexts may be nested: each writes what was
    called while it was open.

    Args:
        path: the file, such as "calls.json", in a directory that exists.

    Returns:
        The context. Its `calls` are those that were seen so far.

    Raises:
        ProblemError: `path` is no path of a .json file.
        ConfigurationError: when the block begins, the file could not be written; the error names
            why. When it ends, it cannot be written any more.

    Example:
        >>> import tempfile
        >>> file = tempfile.mkdtemp() + "/calls.json"  # for `warploom compile FILE --gpu H200`
        >>> with warploom.recording(file) as recorded:
        ...     y = warploom.gemm(torch.ones(4, 64).bfloat16(), torch.ones(64, 32).bfloat16())
        >>> len(recorded.calls)
        1
    """
    if not isinstance(path, str | os.PathLike) or os.fspath(path) in ("", b"") or "\0" in str(path):
        raise ProblemError(
            f"path {shown(path)} of type {type(path).__name__}",
            rule="must be the path of a file",
            fix='for example "calls.json"',
        )
    found = Path(os.fsdecode(path)).absolute()  # the block may change the working directory
    if found.suffix != SUFFIX:
        raise ProblemError(
            f"path {shown(path)}",
            rule=f"must end with {SUFFIX}, by which `warploom compile` knows a file of calls",
            fix=f"for example {found.stem + SUFFIX!r}",
        )
    return Recording(found)


class Recording(ContextDecorator):
    """Records calls from `with` to its end, or while a decorated function runs."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[RecordedCall, None] = {}
        self._plans: set[int] = set()  # numbers of plans, whose calls are known already
        self._open: list[AbstractContextManager[None]] = []
        self._process = os.getpid()

    @property
    def calls(self) -> list[RecordedCall]:
        """The distinct calls so far, in the order in which each came first."""
        return list(self._seen)

    def __enter__(self) -> Self:
        """Begin; ConfigurationError where the file could not be written at the end."""
        _require_writable(self.path)
        every()  # all kinds of plans there are, so that none is missed
        self._process = os.getpid()
        hearing = heard(self._hear)
        hearing.__enter__()
        self._open.append(hearing)  # only now: another thread may end what it finds here
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Write the file, whatever ended the block; a forked child leaves it to its parent."""
        self._open.pop().__exit__(None, None, None)
        if self._open or os.getpid() != self._process:  # entered more than once, as by recursion
            return
        if not self._seen:
            logger.warning("recording: %s has no calls: %s", self.path, NONE)
        try:
            write(self.path, self.calls)
        except OSError as failure:
            if error is not None:  # which the program should see, not this
                logger.warning("recording: %s: %s", self.path, json_file.reason(failure))
                return
            raise _unwritable(self.path, failure) from failure

    def _hear(self, plan: Plan[Any, Any]) -> None:
        """Note a call of a plan. Those with which `warploom.autotune` measures are no program's."""
        if plan.number in self._plans or ENGINE.busy:
            return
        if plan.draft.problem is not None:  # or there is nothing to launch
            self._seen[RecordedCall.of(plan.choice)] = None
        self._plans.add(plan.number)  # last: another thread whose call this is, too, may end first


def _require_writable(path: Path) -> None:
    """Raise ConfigurationError where a file cannot be put at `path`, before anything runs."""
    try:
        if path.exists() and not path.is_file():
            raise OSError("must be a regular file, or no file yet")
        if not os.access(path.parent, os.F_OK):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        if not path.parent.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"{path}: {json_file.reason(error)}",
        rule="must be a file in a directory that exists and can be written",
        fix="make the directory first, or give another path",
    )
