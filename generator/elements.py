"""The one table of element types: how each is spelt in C++, PTX, TMA and torch."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Element:
    """One element type. Empty strings mean that the interface has no such type."""

    name: str
    bits: int
    cpp: str
    torch: str
    tensor_map: str  # suffix of CU_TENSOR_MAP_DATA_TYPE_*
    wgmma: str  # operand type in wgmma.mma_async
    wgmma_k: int  # the instruction's k: 32 bytes of operand (PTX ISA, wgmma shapes)
    convert: str  # PTX from fp32, of two values where it packs them; empty: none needed

    @property
    def bytes(self) -> int:
        """Bytes of one element."""
        return self.bits // 8

    @property
    def is_fp8(self) -> bool:
        """True for the 8-bit floats, which wgmma multiplies in any mixture."""
        return self.name in ("e4m3", "e5m2")

    @property
    def is_integer(self) -> bool:
        """True for int8 and int32."""
        return self.name.startswith("int")


ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        Element("fp16", 16, "cutlass::half_t", "float16", "FLOAT16", "f16", 16, "cvt.rn.f16x2.f32"),
        Element(
            "bf16",
            16,
            "cutlass::bfloat16_t",
            "bfloat16",
            "BFLOAT16",
            "bf16",
            16,
            "cvt.rn.bf16x2.f32",
        ),
        Element("fp32", 32, "float", "float32", "FLOAT32", "", 0, ""),
        Element(
            "e4m3",
            8,
            "cutlass::float_e4m3_t",
            "float8_e4m3fn",
            "UINT8",
            "e4m3",
            32,
            "cvt.rn.satfinite.e4m3x2.f32",
        ),
        Element(
            "e5m2",
            8,
            "cutlass::float_e5m2_t",
            "float8_e5m2",
            "UINT8",
            "e5m2",
            32,
            "cvt.rn.satfinite.e5m2x2.f32",
        ),
        Element("int8", 8, "int8_t", "int8", "UINT8", "s8", 32, "cvt.rni.sat.s8.f32"),
        Element("int32", 32, "int32_t", "int32", "INT32", "", 0, ""),
    )
}


def element(name: str) -> Element:
    """Return the element type called `name`, or raise UnknownNameError listing all."""
    try:
        return ELEMENTS[name]
    except KeyError:
        known = ", ".join(ELEMENTS)
        raise UnknownNameError(
            f"element type {name!r}", rule=f"known types: {known}", fix="use one of them"
        ) from None
