"""What every step of an epilogue declares."""

from __future__ import annotations

from typing import ClassVar, Literal, Protocol

from warploom.generator import names
from warploom.generator.elements import Element
from warploom.generator.parameters import Field, int64

Reads = Literal["nothing", "row", "column", "fragment"]
"""By which dimensions of D a step's tensor lies: its rows, its columns or both; else by none."""


class Pitches(Protocol):
    """What a launch knows of steps, by their index: how what they read lies, in elements."""

    def pitch(self, step: int) -> int:
        """From row to row."""
        ...

    def batch_pitch(self, step: int) -> int:
        """From batch to batch."""
        ...


class Step:
    """What every step declares.

    step        its tag in YAML, and what its C++ part is called where there is one for all of it
    arguments   the words by which a call's items ask for it, see runtime/families/_product/steps
    auxiliary   its tensor is an output of its own: its C++ part is told the place in D of what it
                is given, and finishes after the last tile
    loads       it is auxiliary and has another tensor of the same shape and strides, which it reads
    partial     its C++ part stores sums over a few rows, which a launch of its own adds up
    prepared    its C++ part computes a factor for each row of a tile, in shared memory, before the
                tile's products
    results     the element types that D may have where it is among the steps; none: any
    """

    step: str
    arguments: ClassVar[tuple[str, ...]]
    auxiliary: ClassVar[bool] = False
    loads: ClassVar[bool] = False
    partial: ClassVar[bool] = False
    prepared: ClassVar[bool] = False
    results: ClassVar[tuple[str, ...]] = ()

    @property
    def reads(self) -> Reads:
        """What the C++ part loads, or stores where it is `auxiliary`: by row of D, by column, by
        both (`fragment`), or nothing that lies beside D.
        """
        return "nothing"

    @property
    def pitched(self) -> bool:
        """True where a launch tells the distance from row to row of what it reads or stores."""
        return self.reads == "fragment"

    @property
    def paired(self) -> bool:
        """True where two neighbours of a row are one access, in kernels that read in pairs."""
        return self.reads in ("column", "fragment")

    @property
    def token(self) -> str:
        """The step in a kernel's name."""
        return names.short(self) or self.step

    def columns(self, n: int) -> int:
        """Columns that are left of the n that it is given: a gate halves them."""
        return n

    def moved(self, rows: int, columns: int, d: Element) -> int:
        """Bytes of a tile of D that it moves, as the cost model counts them beside those of D."""
        return 0

    def registers(self, *, paired: bool) -> int:
        """32-bit registers that what is loaded for one fragment takes, read in pairs or not."""
        return 0

    @property
    def parts(self) -> tuple[str, ...]:
        """The files that define the step's C++ class: under templates/, where a folder is named,
        else under templates/_product/epilogue/.
        """
        return (f"{self.step}.cuh",)

    @property
    def cpp(self) -> str:
        """The C++ class, with its element type where it has one."""
        return self.step.title()

    def fields(self, index: int) -> tuple[Field[Pitches], ...]:
        """The step's entries in the parameter block, in the order of the C++ constructor."""
        return ()

    def batch_field(self, index: int, each: str = "batches") -> Field[Pitches] | None:
        """Where D has batches, or groups: the distance between those of what the step reads."""
        if self.reads == "nothing":
            return None
        name = self.fields(index)[0].name
        meaning = f"elements between {each} of {name}"
        return int64(f"{name}_batch", meaning, lambda at: at.batch_pitch(index))
