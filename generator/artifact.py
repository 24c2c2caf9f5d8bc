"""What one compilation yields: the cubin and everything worth knowing about it.

Neither the compiler (`nvrtc.py`) nor the store (`store.py`) knows the other; both know this.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Resources:
    """What ptxas reports for one kernel entry (registers per thread, bytes per thread)."""

    registers: int
    spill_bytes: int
    local_bytes: int

    @property
    def clean(self) -> bool:
        """True when nothing was spilled and nothing lives in local memory."""
        return self.spill_bytes == 0 and self.local_bytes == 0


@dataclass(frozen=True, slots=True)
class Artifact:
    """One compiled kernel: cubin, provenance, and the compiler's resource report."""

    name: str
    arch: str
    cubin: bytes
    source_digest: str
    toolchain: str
    options: tuple[str, ...]
    resources: dict[str, Resources]
    warnings: tuple[str, ...]
    compile_seconds: float

    @property
    def serialised(self) -> tuple[str, ...]:
        """The ptxas lines (C7506 to C7519) that say wgmma was serialised: never a candidate."""
        return tuple(line for line in self.warnings if "C75" in line)
