"""Where each code, scale and zero point of a packed weight lies: slow, and from the layout's text.

Nothing here is the implementation's: places are computed one by one, from the tables of PTX's A
fragment (thread t of a warpgroup is lane t % 32 of warp t / 32).
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, DEPTH = 64, 128
SCALE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e8m0": 1}
BITS = {"int4": 4, "uint4": 4, "int8": 8, "e4m3": 8, "mxfp4": 4}
WITH_ZEROS = {"uint4"}


@dataclass(frozen=True)
class Places:
    """Places in a packed weight with k of `k`; bytes count from its beginning."""

    format: str
    group: int | None
    scale: str
    step: int
    k: int

    @property
    def groups(self) -> int:
        return DEPTH // self.group if self.group else 0

    @property
    def slab_bytes(self) -> int:
        each = SCALE_BYTES[self.scale] + (self.format in WITH_ZEROS)
        return ROWS * DEPTH * BITS[self.format] // 8 + self.groups * ROWS * each

    def slab(self, n: int, k: int) -> int:
        """The first byte of the slab that W[n, k] is in."""
        slabs_of_k = (self.k + DEPTH - 1) // DEPTH
        return (n // ROWS * slabs_of_k + k // DEPTH) * self.slab_bytes

    def code(self, n: int, k: int) -> tuple[int, int]:
        """The byte of code (n, k), and its lowest bit in there."""
        bits = BITS[self.format]
        row, deep = n % ROWS, k % DEPTH
        brick, deep = deep // 64, deep % 64
        step, deep = deep // self.step, deep % self.step
        half, deep = deep // (self.step // 2), deep % (self.step // 2)
        elements = self.step // 8
        quad, element = deep // elements, deep % elements
        lower = row % 16 // 8
        thread = 32 * (row // 16) + 4 * (row % 8) + quad
        register = 2 * half + lower
        if self.format in ("int4", "uint4") and self.step == 16:
            field = register + 4 * element
        else:
            field = elements * register + element
        step_bits = 4 * elements * bits
        within = step * step_bits + field * bits  # of all that the thread has of the brick
        piece, within = within // 128, within % 128
        start = self.slab(n, k) + brick * 64 * 64 * bits // 8
        return start + piece * 2048 + thread * 16 + within // 8, within % 8

    def scale_byte(self, n: int, k: int) -> int:
        """The first byte of the scale of W[n, k]."""
        assert self.group
        codes = ROWS * DEPTH * BITS[self.format] // 8
        place = k % DEPTH // self.group * ROWS + self.position(n)
        return self.slab(n, k) + codes + place * SCALE_BYTES[self.scale]

    def zero_byte(self, n: int, k: int) -> int:
        """The byte of the zero point of W[n, k]."""
        assert self.group
        scales = self.groups * ROWS * SCALE_BYTES[self.scale]
        place = k % DEPTH // self.group * ROWS + self.position(n)
        return self.slab(n, k) + ROWS * DEPTH * BITS[self.format] // 8 + scales + place

    @staticmethod
    def position(n: int) -> int:
        row = n % ROWS
        return 16 * (row // 16) + 2 * (row % 8) + row % 16 // 8
