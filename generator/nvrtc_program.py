"""One program of NVRTC's: text and options in, log and cubin out.

cuda.bindings.nvrtc is imported with the first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from warploom.errors import CompilationError, ToolchainError

# ptxas files its advice on wgmma and setmaxnreg, C75xx, under `info`.
_WARNING = re.compile(r"\bwarning\s*(?:#\S+\s*)?:|\(C75\d\d\)")


def compiled(
    source: str, name: str, options: Sequence[str], headers: Mapping[str, str]
) -> tuple[str, bytes]:
    """Return the log and the cubin of `source`, which includes `headers` (name: text) by name.

    `name` is for messages. Raises CompilationError, and ToolchainError where NVRTC itself fails.
    """
    with _program(source, name, headers) as program:
        log = _compile(program, options, name, source)
        return log, _bytes(program, "CUBIN")


def warnings(log: str) -> tuple[str, ...]:
    """Return the lines of a log that warn, with ptxas's C75xx lines."""
    return tuple(line.strip() for line in log.splitlines() if _WARNING.search(line))


@contextmanager
def _program(source: str, name: str, headers: Mapping[str, str]) -> Iterator[Any]:
    from cuda.bindings import nvrtc

    texts = [text.encode() for text in headers.values()]
    names = [header.encode() for header in headers]
    file = f"{name}.cu".encode()
    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), file, len(texts), texts, names))
    try:
        yield program
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _compile(program: Any, options: Sequence[str], name: str, source: str) -> str:  # noqa: ANN401
    from cuda.bindings import nvrtc

    encoded = [option.encode() for option in options]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
    log = _bytes(program, "ProgramLog").decode(errors="replace").strip("\0 \n")
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompilationError(name, log=log or status.name, source=source)
    return log


def _bytes(program: Any, what: str) -> bytes:  # noqa: ANN401
    """Fetch a result of variable size: NVRTC writes into a buffer of the size it names."""
    from cuda.bindings import nvrtc

    size = _checked(getattr(nvrtc, f"nvrtcGet{what}Size")(program))
    buffer = bytes(size)
    fetch: Callable[[Any, bytes], Any] = getattr(nvrtc, f"nvrtcGet{what}")
    _checked(fetch(program, buffer))
    return buffer


def _checked(result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    status, *values = result
    if status.value:
        raise ToolchainError(
            f"NVRTC returned {status.name}",
            rule="only a source that does not compile is expected to fail",
            fix="`warploom doctor` checks the installation",
        )
    return values[0] if values else None
