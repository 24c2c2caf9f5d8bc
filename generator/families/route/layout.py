"""The shared memory of a CTA: each warp's counts, those of the CTA, and where experts begin."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families.route.schedule import EXPERTS, RouteSchedule

_INT = 4  # bytes


@dataclass(frozen=True, slots=True)
class RouteLayout:
    """What a CTA has."""

    schedule: RouteSchedule

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a launch with as many experts as there may be."""
        return self.bytes_for(EXPERTS)

    def bytes_for(self, experts: int) -> int:
        """Dynamic shared memory of a launch: pairs that are skipped count as one expert more."""
        bins = experts + 1
        warps = self.schedule.warps
        return _INT * (bins * (warps + 2) + warps)
