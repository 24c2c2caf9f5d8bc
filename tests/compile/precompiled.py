"""Kernels compiled as the generator compiles them, in this process, which reads headers once, and
compiles no text twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from warploom.generator import nvrtc, nvrtc_headers
from warploom.generator.artifact import Artifact
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import Toolchain, find

TOGETHER = 8  # kernels of a program: of more, each takes longer again


def headers(spec: KernelSpec) -> str:
    """What a kernel's text has up to its last `#include`."""
    return nvrtc_headers._parted(render(spec))[0]


def together(*specs: KernelSpec) -> str:
    """One text of several kernels, each in a namespace, after the headers that all have."""
    first = headers(specs[0])
    kernels = [render(spec).partition(first)[2] for spec in specs]
    return first + "".join(
        f"namespace kernel{i} {{\n{kernel}}}\n" for i, kernel in enumerate(kernels)
    )


def compiled_together(specs: Sequence[KernelSpec]) -> dict[str, Artifact]:
    """Compile kernels, some to a program: NVRTC takes 0.15 s for any.

    Each has its own entries; the machine code and the warnings are those of its program.
    """
    found: dict[str, Artifact] = {}
    for at in range(0, len(specs), TOGETHER):
        some = specs[at : at + TOGETHER]
        program = compiled_text(None, together(*some), name=some[0].name, arch=some[0].arch)
        entries = dict(program.resources)
        for spec in some:
            own = {entry: entries.pop(entry) for entry in [*entries] if entry.startswith(spec.name)}
            found[spec.name] = replace(program, name=spec.name, resources=own)
        assert not entries, "of no kernel's name"
    return found


def compiled(spec: KernelSpec) -> Artifact:
    """Compile a kernel in this process, and store it nowhere."""
    return compiled_text(None, render(spec), name=spec.name, arch=spec.arch)


def compiled_text(_worker: object, source: str, *, name: str, arch: str) -> Artifact:
    """In place of the method `compile` of a generator's worker: no process."""
    return _compiled(source, name, arch)


@functools.cache
def _compiled(source: str, name: str, arch: str) -> Artifact:
    return nvrtc.compile(source, name=name, arch=arch, toolchain=_toolchain(), more=True)


class _Unwatched(Toolchain):
    """Whose files nobody changes meanwhile: to look at all of them takes 0.05 s each time."""

    def require_unchanged(self) -> None:
        """Tests of the toolchain say what happens where they are changed."""


@functools.cache
def _toolchain() -> Toolchain:
    found = find()
    return _Unwatched(found.components, found.identity, found.stamps)


def build_many(specs: Sequence[KernelSpec], *_others: object, **_named: object) -> list[Artifact]:
    """In place of the generator's: no process and no store."""
    return [compiled(spec) for spec in specs]
