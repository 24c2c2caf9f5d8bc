"""Kernels that are built ahead of their measurement, and which of them are no candidates."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

from warploom.errors import WarploomError
from warploom.generator.artifact import Artifact
from warploom.generator.specification import KernelSpec


class Compiler(Protocol):
    """What builds kernels ahead of their measurement."""

    def submit(self, spec: KernelSpec) -> Future[Any]:
        """Return an Artifact, a CompilationError, or None where there is nothing to build."""
        ...


def lasting(build: Future[Any]) -> bool:
    """Whether what became of a build is the kernel's own, and would be the same at another time.

    Where there is no compiler, or its node is lost, nothing is known of the kernel.
    """
    return build.exception() is None and not getattr(build.result(), "lost", False)


def unusable(build: Future[Any]) -> str:
    """Why what was built is no candidate; empty where it is one."""
    try:
        built = build.result()
    except WarploomError as error:
        return str(error)
    if isinstance(built, WarploomError):
        return str(built)
    if not isinstance(built, Artifact):
        return ""
    if built.serialised:
        return f"wgmma is serialised: {built.serialised[0]}"
    if not all(entry.clean for entry in built.resources.values()):
        spilled = max(entry.spill_bytes for entry in built.resources.values())
        local = max(entry.local_bytes for entry in built.resources.values())
        return f"{spilled} bytes of spills, {local} of local memory"
    return ""
