"""Headers that a process reads once: most of what a kernel takes NVRTC are CuTe's.

What a text has from its first directive to its last `#include` is a header here, and NVRTC
precompiles it: it writes down its memory, which it takes back for each kernel that follows. That
is the same code; what goes wrong on the way (a full disk, memory that cannot be mapped) costs
time alone, and the text is compiled as it stands.

Each process has its own file: NVRTC takes it back at the addresses that it had, which another
process does not have. It maps the file, and would die of one that another had shortened, so the
file has no name once it is written. It goes with the process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from warploom.errors import CompilationError, ToolchainError
from warploom.generator import nvrtc_program
from warploom.generator.locks import fork_lock

_NAME = "headers.h"
_USED = "using precompiled header file"

_lock = fork_lock()  # held for entries of these two, never while something compiles
_seen: set[tuple[str, ...]] = set()  # headers and options that a text was compiled with
_files: dict[tuple[str, ...], int | None] = {}  # descriptors; None where there is none


def compiled(source: str, name: str, options: Sequence[str], *, more: bool) -> tuple[str, bytes]:
    """Return the log and the cubin of `source`, as nvrtc_program does, and raise what it raises.

    Headers are precompiled with the second text that has them, which then takes longer; with the
    first where the caller knows of `more`.
    """
    headers, rest = _parted(source)
    key = (headers, *options)
    with _lock:
        begins = headers != "" and key not in _files and (more or key in _seen)
        if begins:
            _files[key] = None  # for all others, until it is there
        _seen.add(key)
        file = _files.get(key)
    done = None
    if begins:
        done = _precompiling(key, rest, name)
    elif file is not None:
        done = _reusing(key, rest, name, file)
    if done is not None:
        return done
    try:
        return nvrtc_program.compiled(source, name, options, {})
    except CompilationError:
        if begins:  # it is not the headers' fault: the next text precompiles them
            _files.pop(key, None)
        raise


def _precompiling(key: tuple[str, ...], rest: str, name: str) -> tuple[str, bytes] | None:
    """Compile a text and keep what NVRTC writes of its headers; None where that does not work."""
    headers, *options = key
    try:
        with TemporaryDirectory(prefix="warploom-") as folder:
            path = Path(folder, "headers")
            create = f"--create-pch={path}"
            log, cubin = nvrtc_program.compiled(rest, name, (*options, create), {_NAME: headers})
            # What is said of headers is said now, and not of the texts that follow.
            if not all(w.startswith((f"{name}.cu(", "ptxas")) for w in nvrtc_program.warnings(log)):
                return None
            _files[key] = os.open(path, os.O_RDONLY)
            return log, cubin
    except (CompilationError, ToolchainError, OSError):
        return None


def _reusing(key: tuple[str, ...], rest: str, name: str, file: int) -> tuple[str, bytes] | None:
    """Compile a text after headers that were read before; None where that does not work."""
    headers, *options = key
    use = f"--use-pch=/proc/self/fd/{file}"
    try:
        log, cubin = nvrtc_program.compiled(rest, name, (*options, use), {_NAME: headers})
    except (CompilationError, ToolchainError):  # told of the text as it stands
        return None
    if _USED in log:
        return log, cubin
    _files[key] = None  # another user of NVRTC gave its memory another size, and another place
    return None


def _parted(source: str) -> tuple[str, str]:
    """Return the headers of a text ('' if it has none), and the text that includes them.

    Each line of it keeps its number.
    """
    lines = source.splitlines(keepends=True)
    marked = [index for index, line in enumerate(lines) if line.startswith("#")]
    included = [index for index in marked if lines[index].startswith("#include")]
    if not included:
        return "", source
    begin, end = marked[0], included[-1] + 1
    include = [f'#include "{_NAME}"\n', *["\n"] * (end - begin - 1)]
    return "".join(lines[begin:end]), "".join((*lines[:begin], *include, *lines[end:]))
