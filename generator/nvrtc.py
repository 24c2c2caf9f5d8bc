"""Source -> cubin with NVRTC, on a machine that needs neither a GPU nor a driver.

`compile()` returns the Artifact with what ptxas reported for each entry, or raises
CompilationError with the first error, the whole log and the source. cuda.bindings.nvrtc is
imported on the first compilation.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from warploom.errors import CompilationError, ToolchainError
from warploom.generator.artifact import Artifact, Resources

if TYPE_CHECKING:
    from warploom.generator.toolchain import Toolchain

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_STACK = re.compile(r"(\d+) bytes (?:stack frame|cumulative stack size)")
_LOCAL = re.compile(r"(\d+) bytes lmem")
# ptxas files its advice on wgmma and setmaxnreg, C75xx, under `info`.
_WARNING = re.compile(r"\bwarning\s*(?:#\S+\s*)?:|\(C75\d\d\)")


def compile(source: str, *, name: str, arch: str, toolchain: Toolchain) -> Artifact:
    """Compile one translation unit to a cubin for `arch`.

    `name` is the kernel's, for messages and the artifact. Raises CompilationError, and
    ToolchainError if a header was changed since the toolchain was found.
    """
    options = toolchain.options(arch)
    started = time.perf_counter()
    with _program(source, name) as program:
        log = _compile(program, (*options, *toolchain.include_options), name, source)
        cubin = _bytes(program, "CUBIN")
    seconds = time.perf_counter() - started
    toolchain.require_unchanged()
    resources, warnings = report(log)
    if not resources:
        raise CompilationError(name, log=f"error: no kernel in this source\n{log}", source=source)
    return Artifact(
        name=name,
        arch=arch,
        cubin=cubin,
        source_digest=hashlib.sha256(source.encode()).hexdigest(),
        toolchain=toolchain.identity,
        options=options,
        resources=resources,
        warnings=warnings,
        compile_seconds=seconds,
    )


def report(log: str) -> tuple[dict[str, Resources], tuple[str, ...]]:
    """Read NVRTC's log: the resources of each entry, and the warnings with ptxas's C75xx lines.

    What ptxas reports on a function that was not inlined counts for the entry it follows.
    """
    _, *parts = _ENTRY.split(log)
    resources = {
        entry: Resources(
            registers=max(_numbers(_REGISTERS, text)),
            spill_bytes=sum(_numbers(_SPILLS, text)),
            local_bytes=max(_numbers(_STACK, text)) + sum(_numbers(_LOCAL, text)),
        )
        for entry, text in zip(parts[::2], parts[1::2], strict=True)
    }
    return resources, tuple(line.strip() for line in log.splitlines() if _WARNING.search(line))


def _numbers(pattern: re.Pattern[str], text: str) -> list[int]:
    return [int(number) for number in pattern.findall(text)]


@contextmanager
def _program(source: str, name: str) -> Iterator[Any]:
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(source.encode(), f"{name}.cu".encode(), 0, [], []))
    try:
        yield program
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))


def _compile(program: Any, options: tuple[str, ...], name: str, source: str) -> str:  # noqa: ANN401
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
