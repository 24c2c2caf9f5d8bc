"""The one table of element types: how each is spelt in C++, PTX, TMA and torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from warploom.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class Element:
    """One element type. A row leaves out what there is not: wgmma's operands, a conversion.

    bytes        of one element
    is_fp8       true for the 8-bit floats, which wgmma multiplies in any mixture
    is_integer   true for int8 and int32
    """

    name: str
    bits: int
    cpp: str
    torch: str
    tensor_map: str  # suffix of CU_TENSOR_MAP_DATA_TYPE_*
    wgmma: str = ""  # operand type in wgmma.mma_async
    wgmma_k: int = 0  # the instruction's k: 32 bytes of operand (PTX ISA, wgmma shapes)
    convert: str = ""  # PTX from fp32, of two values where it packs them
    bytes: int = field(init=False, repr=False, compare=False)
    is_fp8: bool = field(init=False, repr=False, compare=False)
    is_integer: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", self.bits // 8)
        object.__setattr__(self, "is_fp8", self.name in ("e4m3", "e5m2"))
        object.__setattr__(self, "is_integer", self.name.startswith("int"))


# fmt: off
_TABLE = (
    Element("fp16",  16, cpp="cutlass::half_t",       torch="float16",       tensor_map="FLOAT16",
            wgmma="f16",  wgmma_k=16, convert="cvt.rn.f16x2.f32"),
    Element("bf16",  16, cpp="cutlass::bfloat16_t",   torch="bfloat16",      tensor_map="BFLOAT16",
            wgmma="bf16", wgmma_k=16, convert="cvt.rn.bf16x2.f32"),
    # fp32 in memory, which TMA rounds. torch.float32 stands for the row of fp32, which comes later.
    Element("tf32",  32, cpp="float",                 torch="float32",       tensor_map="TFLOAT32",
            wgmma="tf32", wgmma_k=8),
    Element("fp32",  32, cpp="float",                 torch="float32",       tensor_map="FLOAT32"),
    Element("e4m3",   8, cpp="cutlass::float_e4m3_t", torch="float8_e4m3fn", tensor_map="UINT8",
            wgmma="e4m3", wgmma_k=32, convert="cvt.rn.satfinite.e4m3x2.f32"),
    Element("e5m2",   8, cpp="cutlass::float_e5m2_t", torch="float8_e5m2",   tensor_map="UINT8",
            wgmma="e5m2", wgmma_k=32, convert="cvt.rn.satfinite.e5m2x2.f32"),
    Element("int8",   8, cpp="int8_t",                torch="int8",          tensor_map="UINT8",
            wgmma="s8",   wgmma_k=32, convert="cvt.rni.sat.s8.f32"),
    Element("int32", 32, cpp="int32_t",               torch="int32",         tensor_map="INT32"),
)
# fmt: on
ELEMENTS: dict[str, Element] = {element.name: element for element in _TABLE}


def element(name: str) -> Element:
    """Return the element type called `name`, or raise UnknownNameError listing all."""
    try:
        return ELEMENTS[name]
    except KeyError:
        known = ", ".join(ELEMENTS)
        raise UnknownNameError(
            f"element type {name!r}", rule=f"known types: {known}", fix="use one of them"
        ) from None
