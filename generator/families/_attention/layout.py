"""How tiles of both passes lie in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.tensor_maps import LAYOUT_TYPES


@dataclass(frozen=True, slots=True)
class Boxes:
    """A tile of 16-bit elements: boxes side by side, each as wide as a swizzle span."""

    span: int  # bytes of a box's row
    boxes: int  # side by side in a tile

    @property
    def box_columns(self) -> int:
        """Elements of a box's row."""
        return self.span // 2

    @property
    def layout_type(self) -> int:
        """The descriptor's swizzle mode."""
        return LAYOUT_TYPES[self.span]
