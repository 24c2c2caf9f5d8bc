"""Kernels compiled as the generator compiles them, but that a process reads their headers once.

Most of what a kernel takes NVRTC are CuTe's headers, with which all kernels begin. What a text has
from the first of them to the last is a header here that NVRTC precompiles; the rest is as it was.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from warploom.generator import nvrtc, toolchain
from warploom.generator.artifact import Artifact
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec


@dataclass(frozen=True)
class _Precompiling(toolchain.Toolchain):
    folder: TemporaryDirectory[str]

    @property
    def include_options(self) -> tuple[str, ...]:
        name = self.folder.name
        return (*super().include_options, f"-I{name}", "--pch", f"--pch-dir={name}")


def compiled(spec: KernelSpec) -> Artifact:
    """Compile a kernel in this process, and store it nowhere."""
    return compiled_text(None, render(spec), name=spec.name, arch=spec.arch)


def compiled_text(_worker: object, source: str, *, name: str, arch: str) -> Artifact:
    """In place of the method `compile` of a generator's worker: no process."""
    lines = source.splitlines(keepends=True)
    begin = next(i for i, line in enumerate(lines) if line.startswith("#"))
    end = 1 + max(i for i, line in enumerate(lines) if line.startswith("#include"))
    include = f'#include "{_header("".join(lines[begin:end]))}"\n'
    text = "".join((*lines[:begin], include, *lines[end:]))
    artifact = nvrtc.compile(text, name=name, arch=arch, toolchain=_compiler())
    return replace(artifact, source_digest=hashlib.sha256(source.encode()).hexdigest())


def build_many(specs: Sequence[KernelSpec], *_others: object, **_named: object) -> list[Artifact]:
    """In place of the generator's: no process and no store."""
    return [compiled(spec) for spec in specs]


@functools.cache
def _header(text: str) -> str:
    name = f"{hashlib.sha256(text.encode()).hexdigest()}.h"
    Path(_compiler().folder.name, name).write_text(text)
    return name


@functools.cache
def _compiler() -> _Precompiling:
    found = toolchain.find()
    same = {field.name: getattr(found, field.name) for field in fields(found)}
    return _Precompiling(**same, folder=TemporaryDirectory())
