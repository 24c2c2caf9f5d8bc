"""Programs in processes of their own that find torch loaded: importing it takes 3 s of a core.

One process has loaded torch and nothing else, and forks for each program. What a program must not
have loaded besides, such as any of Warploom, it has not.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SERVER = """
import json, os, signal, sys, tempfile, traceback
import torch


def begin(program, out, err):
    signal.alarm(1200)  # seconds, after which it is ended: many times what any takes on idle cores
    signal.signal(signal.SIGINT, signal.default_int_handler)  # else nohup's is inherited
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    os.chdir(program["folder"])
    os.environ.clear()
    os.environ.update(program["environment"])
    sys.path[:], sys.argv[:] = program["path"], ["-c", *program["arguments"]]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        exec(compile(program["code"], "<program>", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)

answers = os.fdopen(os.dup(1), "w")
for line in sys.stdin:
    running = []
    for program in json.loads(line):
        out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
        process = os.fork()
        if not process:
            begin(program, out, err)
        running.append((process, out, err))
    print(json.dumps([process for process, *_ in running]), file=answers, flush=True)
    told = []
    for process, out, err in running:
        status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        out.seek(0), err.seek(0)
        told.append([status, out.read(), err.read()])
    print(json.dumps(told), file=answers, flush=True)
"""


@dataclass(frozen=True)
class Program:
    """Python code, what sys.argv has after its first, and settings in the environment."""

    code: str
    arguments: Sequence[str] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    folder: Path = field(default_factory=Path.cwd)


@dataclass(frozen=True)
class Ended:
    """How a program ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Running:
    """Programs that were begun beside each other; no others begin before these have ended."""

    processes: Sequence[int]  # their ids

    def wait(self) -> list[Ended]:
        """Wait until all have ended."""
        return [Ended(*one) for one in _answer()]


def run(*programs: Program) -> list[Ended]:
    """Run programs beside each other, and wait for all; they see no GPU's state of this process."""
    return begin(*programs).wait()


def begin(*programs: Program) -> Running:
    """Run programs beside each other, without waiting: they may be sent signals."""
    server = _server()
    assert server.stdin
    server.stdin.write(json.dumps([_asked(program) for program in programs]) + "\n")
    server.stdin.flush()
    return Running(_answer())


@contextmanager
def sleeping() -> Iterator[int]:
    """Inside, there is a child of this process, with all of its files, that does nothing."""
    (began, beginning), (ended, ending) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(ending)
        os.write(beginning, b".")
        os.read(ended, 1)  # returns once the parent has closed its end, or has ended
        os._exit(0)
    os.read(began, 1)  # by then all is done that is done at a fork
    try:
        yield child
    finally:
        for one in (began, beginning, ended, ending):
            os.close(one)
        os.waitpid(child, 0)


def _answer() -> Any:  # noqa: ANN401 (of JSON)
    server = _server()
    assert server.stdout
    return json.loads(server.stdout.readline())


def _asked(program: Program) -> dict[str, Any]:
    return {
        "code": program.code,
        "arguments": list(program.arguments),
        "environment": {**os.environ, **program.settings},
        "folder": str(program.folder),
        "path": [one for one in sys.path if one],
    }


@functools.cache
def _server() -> subprocess.Popen[str]:
    """The process that forks, until this one ends."""
    server = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(server.communicate)
    return server
