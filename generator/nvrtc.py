"""Source -> cubin with NVRTC, on a machine that needs neither a GPU nor a driver.

`compile()` returns the Artifact with what ptxas reported for each entry, or raises
CompilationError with the first error, the whole log and the source.
"""

from __future__ import annotations

import hashlib
import re
import time
from typing import TYPE_CHECKING

from warploom.errors import CompilationError
from warploom.generator import nvrtc_headers, nvrtc_program
from warploom.generator.artifact import Artifact, Resources

if TYPE_CHECKING:
    from warploom.generator.toolchain import Toolchain

_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_REGISTERS = re.compile(r"Used (\d+) registers")
_SPILLS = re.compile(r"(\d+) bytes spill (?:stores|loads)")
_STACK = re.compile(r"(\d+) bytes (?:stack frame|cumulative stack size)")
_LOCAL = re.compile(r"(\d+) bytes lmem")


def compile(
    source: str, *, name: str, arch: str, toolchain: Toolchain, more: bool = False
) -> Artifact:
    """Compile one translation unit to a cubin for `arch`.

    `name` is the kernel's, for messages and the artifact; `more` says that this process will
    compile others like it, and saves them time. Raises CompilationError, and ToolchainError if a
    header was changed since the toolchain was found.
    """
    options = toolchain.options(arch)
    started = time.perf_counter()
    everything = (*options, *toolchain.include_options)
    log, cubin = nvrtc_headers.compiled(source, name, everything, more=more)
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
    return resources, nvrtc_program.warnings(log)


def _numbers(pattern: re.Pattern[str], text: str) -> list[int]:
    return [int(number) for number in pattern.findall(text)]
