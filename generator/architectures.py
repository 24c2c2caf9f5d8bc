"""The one table of GPU architectures that templates exist for, with their limits."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Limits of one architecture (CUDA C++ Programming Guide, compute capability table)."""

    name: str  # as NVRTC takes it
    title: str  # as people call it
    products: str  # GPUs of it, for whoever has none
    capability: tuple[int, int]
    shared_bytes: int  # dynamic shared memory one block may opt in to

    @property
    def token(self) -> str:
        """The name without its underscore, for kernel names."""
        return self.name.replace("_", "")


ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in (Architecture("sm_90a", "Hopper", "H100, H200 or GH200", (9, 0), 232_448),)
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


def serving(capability: tuple[int, int]) -> Architecture | None:
    """Return the architecture whose kernels a GPU of this compute capability runs, or None."""
    rows = ARCHITECTURES.values()
    return next((row for row in rows if row.capability == tuple(capability)), None)


def titles() -> str:
    """What the architectures are called: `Hopper`."""
    return " or ".join(row.title for row in ARCHITECTURES.values())


def served() -> str:
    """What kernels exist for: `sm_90a (Hopper: compute capability 9.0)`."""
    return ", ".join(
        f"{row.name} ({row.title}: compute capability {row.capability[0]}.{row.capability[1]})"
        for row in ARCHITECTURES.values()
    )


def products() -> str:
    """GPUs that kernels run on, for advice: `H100, H200 or GH200`."""
    return "; ".join(row.products for row in ARCHITECTURES.values())
