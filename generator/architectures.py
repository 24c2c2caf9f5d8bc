"""The one table of GPU architectures that templates exist for, with their limits."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of one architecture (CUDA C++ Programming Guide, compute capability table)."""

    name: str  # as NVRTC takes it
    capability: tuple[int, int]
    shared_bytes: int  # dynamic shared memory one block may opt in to
    registers: int  # 32-bit registers of one multiprocessor
    registers_per_thread: int

    @property
    def token(self) -> str:
        """The name without its underscore, for kernel names."""
        return self.name.replace("_", "")


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (Architecture("sm_90a", (9, 0), 232_448, 65_536, 255),)
}


def architecture(name: str) -> Architecture:
    """Return the architecture called `name`, or raise UnknownNameError listing all."""
    try:
        return ARCHITECTURES[name]
    except KeyError:
        known = ", ".join(ARCHITECTURES)
        raise UnknownNameError(
            f"architecture {name!r}", rule=f"templates exist for: {known}", fix="use one of them"
        ) from None
