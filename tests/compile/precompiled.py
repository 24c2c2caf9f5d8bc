"""Kernels compiled as the generator compiles them, in this process, which reads headers once, and
compiles no text twice.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from warploom.generator import nvrtc
from warploom.generator.artifact import Artifact
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.toolchain import Toolchain, find


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
