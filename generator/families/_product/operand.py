"""An operand of a GEMM as its C++ struct has it: how a tile of it is loaded, and for which CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families._product.schedule import ProductOperation, ProductSchedule
from warploom.generator.tensor_maps import OperandTile
from warploom.generator.wgmma import TemplateText


@dataclass(frozen=True)
class Operand:
    """A or B of an operation, in a schedule's kernel.

    side    the dimension of D that it has: m or n
    groups  whether `rows` of A or parts of `k` are in groups; else `none`
    trims   whether tiles load no row of it past the last
    paired  whether the CTAs of a cluster share it by what the tiles at hand are
    """

    operation: ProductOperation
    schedule: ProductSchedule
    tile: OperandTile
    side: str
    groups: str
    trims: bool = False
    paired: bool = False

    @property
    def name(self) -> str:
        """Its letter."""
        return "A" if self.side == "m" else "B"

    @property
    def multicast(self) -> bool:
        """Whether CTAs of a cluster share it."""
        return self.tile.blocks > 1

    @property
    def sliced(self) -> bool:
        """Whether each of these loads a slice of its rows."""
        return self.tile.slices > 1

    @property
    def apart(self) -> bool:
        """Whether its tensor map has a dimension of batches, or of groups."""
        rows, k = self.groups == "rows" and self.side == "m", self.groups == "k"
        return self.operation.batched and not rows and not (k and self.tile.k_major)

    @property
    def bounded(self) -> bool:
        """Whether boxes stop where a group of k ends: rows of k count by two coordinates."""
        return self.groups == "k" and not self.tile.k_major

    @property
    def row_constants(self) -> str:
        """Constants of a sliced tile: its rows, where the caller asks for them, and their bytes."""
        rows = f"kRows = {self.tile.rows}, " * (not self.trims)
        return f"{rows}kRowBytes = {self.tile.span}"

    # ---- What `load` is declared with, and what it copies ----------------------------------------

    @property
    def note(self) -> TemplateText:
        """What `load` does."""
        side = self.side
        everyone = "all that share it" if self.schedule.along_both else "the whole cluster"
        if self.sliced:
            receivers = "these CTAs" if self.paired else everyone
            words = "Multicasts the tile's rows from `first` on, as many as the map's box has, to "
            return TemplateText(f"{words}{receivers}.")
        if self.multicast:
            return TemplateText(f"Multicasts the tile at ({side}, k) to {everyone}.")
        if self.bounded:
            rows = "that has the kTileK - k rows of k before `end`, and zeros behind them"
            return TemplateText(f"Starts the load of the tile at {side} {rows}.")
        return TemplateText(f"Starts the load of the tile at ({side}, k).")

    @property
    def parameters(self) -> str:
        """The parameters of `load` behind the place of the tile."""
        first = ", int first" * self.sliced
        place = f", int {self.side}_place" * self.schedule.along_both
        if self.paired:
            return f"{first}{place}, uint16_t receivers"
        batch = ", int end" if self.bounded else ", int batch" * self.apart
        return first + place + batch

    @property
    def copy(self) -> str:
        """The copy of a box, whose map has a dimension more for batches and two for a gate."""
        dimensions = 2 + self.apart + 2 * self.tile.gated + self.bounded
        return f"cute::SM90_TMA_LOAD_{'MULTICAST_' * self.multicast}{dimensions}D::copy"

    @property
    def receivers(self) -> str:
        """The mask of the CTAs that a multicast is for."""
        if self.paired:
            return "receivers"
        across = " * kClusterM" * (self.side == "n")
        return "kReceivers" + f" << {self.side}_place{across}" * self.schedule.along_both

    @property
    def destination(self) -> str:
        """Where a box is copied to."""
        box = " + box * kBoxBytes" * (not self.tile.k_major)
        return f"tile{box}{' + first * kRowBytes' * self.sliced}"

    @property
    def coordinates(self) -> str:
        """Where a box is in the tensor map, the innermost dimension first."""
        if self.tile.k_major:
            inner, outer = "k", self.side
        else:
            inner = f"{self.side} + box * kBoxColumns"
            outer = "kRowsEnd - kTileK + k" if self.bounded else "k"
        outer += " + first" * self.sliced
        if self.tile.gated:  # 8 rows of the gate, then 8 of up
            outer = f"0, 0, {f'({outer})' if self.sliced else outer} / 16"
        return f"{inner}, {outer}{self._last}"

    @property
    def _last(self) -> str:
        if self.bounded:
            return ", end, int(kRowsEnd)"
        return ", batch" * (self.apart and not self.paired)

    @property
    def brief(self) -> bool:
        """Whether the copy fits a line."""
        return self.tile.k_major and not self.tile.gated and not self._last

    # ---- How GEMM's producer calls `load` --------------------------------------------------------

    @property
    def _conditions(self) -> str:
        """C++ that tells whether this CTA loads: rows that exist, and in its turn."""
        cluster = self.schedule.cluster
        trimmed = self.trims and cluster[0] > 1
        across = "n" if self.side == "m" else "m"
        rank = f"{across}_place" if self.schedule.along_both else "rank"
        turn = f"k_tile % kCluster{across.upper()} == {rank}"
        return " && ".join(["a_rows > 0"] * trimmed + [turn] * self.tile.in_turn)

    @property
    def guard(self) -> str:
        """The condition of a load, in its line."""
        return f"if ({self._conditions}) " if self._conditions else ""

    @property
    def guard_above(self) -> TemplateText:
        """The condition of a load, in a line above where it is long."""
        short = self.side == "m" and not (self.schedule.along_both or self.tile.in_turn)
        above = self._conditions and not short
        return TemplateText(f"if ({self._conditions})\n        " if above else self.guard)

    @property
    def arguments(self) -> str:
        """The arguments of `load` behind the place of the tile."""
        name = self.name.lower()
        first = f", {name}_first" * self.sliced
        place = f", {self.side}_place" * self.schedule.along_both
        batch = {"none": f", batch_{name}", "rows": ", at.batch", "k": ", end"}[self.groups]
        return first + place + batch * (self.apart or self.bounded)
