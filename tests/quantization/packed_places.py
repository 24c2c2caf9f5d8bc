"""Where each code, scale and zero point of a packed weight lies: slow, and from the layout's text.

Nothing here is the implementation's: places are computed one by one, from the tables of PTX's A
fragment (thread t of a warpgroup is lane t % 32 of warp t / 32).
"""

from __future__ import annotations

from dataclasses import dataclass

ROWS, DEPTH = 64, 128
SCALE_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4, "e8m0": 1, "e4m3": 1}
BITS = {
    "int4": 4,
    "uint4": 4,
    "int8": 8,
    "e4m3": 8,
    "mxfp4": 4,
    "int2": 2,
    "ternary": 2,
    "nvfp4": 4,
    "mxfp8": 8,
}
WITH_ZEROS = {"uint4"}


@dataclass(frozen=True)
class Places:
    """Places in a packed weight with k of `k`; bytes count from its beginning."""

    format: str
    group: int | None
    scale: str
    activations: str
    k: int

    @property
    def step(self) -> int:
        return 16 if self.activations == "16-bit" else 32

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

    def code(self, n: int, k: int) -> list[tuple[int, int]]:
        """The byte of each bit that is stored of code (n, k), the lowest first, and its place."""
        bits = BITS[self.format]
        row, deep = n % ROWS, k % DEPTH
        brick_k = 128 if bits == 2 else 64
        beside = 2 if bits == 2 and self.step == 16 else 1  # steps that share their words
        brick, deep = deep // brick_k, deep % brick_k
        step, deep = deep // self.step, deep % self.step
        half, deep = deep // (self.step // 2), deep % (self.step // 2)
        elements = self.step // 8
        quad, element = deep // elements, deep % elements
        lower = row % 16 // 8
        thread = 32 * (row // 16) + 4 * (row % 8) + quad
        found = []
        for bit in range(bits):
            # Of all that the thread has of the brick.
            within = step // beside * beside * 4 * elements * bits
            within += self.in_step(2 * half + lower, element, bit, step % beside)
            piece, within = within // 128, within % 128
            start = self.slab(n, k) + brick * 64 * brick_k * bits // 8
            found.append((start + piece * 2048 + thread * 16 + within // 8, within % 8))
        return found

    def in_step(self, i: int, e: int, bit: int, second: int = 0) -> int:
        """Which bit of a thread's words of a step is a bit of register i's element e.

        `second`: the step is the second of two that share these words.
        """
        match self.format, self.activations:
            case (("int4" | "uint4"), "16-bit"):
                return 4 * (i + 4 * e) + bit
            case (("mxfp4" | "nvfp4"), "16-bit"):
                first = [[6, 7, 8, 15], [12, 13, 14, 21], [2, 3, 4, 11], [0, 1, 10, 9]][i][bit]
                return (first + 16 * e) % 32
            case "int8", "16-bit":
                return 32 * (i // 2) + 8 * (i % 2 + 2 * e) + bit
            case (("e4m3" | "mxfp8"), "16-bit"):
                return 32 * (i // 2) + 8 * (2 * (i % 2) + e) + bit
            case (("int4" | "uint4"), _):
                return 32 * (i // 2) + 4 * (2 * e + i % 2) + bit
            case "mxfp4", "e4m3":
                sign = 8 * e + (3 if i % 2 else 7)
                return 32 * (i // 2) + (sign if bit == 3 else 16 * (i % 2) + 4 * e + bit)
            case (("int2" | "ternary"), "16-bit"):
                return 2 * i + 8 * second + 16 * e + bit
            case (("int2" | "ternary"), "int8"):
                return 2 * i + 8 * e + bit
            case ("int8", "int8") | (("e4m3" | "mxfp8"), "e4m3"):
                return 32 * i + 8 * e + bit
        raise AssertionError(self)

    def stored(self, code: int) -> int:
        """The bits that are stored of a code, which is signed where its format is."""
        match self.format, self.activations:
            case "int4", "16-bit":
                return code + 8
            case "int8", "16-bit":
                return code + 128
            case (("int2" | "ternary"), "16-bit"):
                return code + 2
            case "int4", "e4m3":
                return 2 * code if code >= 0 else 2 * (-1 - code) + 1
        return code & 2 ** BITS[self.format] - 1

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
