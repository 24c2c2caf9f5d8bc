"""What decoding parts make of every code, by their own text, which runs here.

A wrong mask or constant of one would give weights that are wrong for some codes only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from host import needs_compiler, run

from warploom import templates
from warploom.generator.formats import weight_format

PROGRAM = Path(__file__).with_name("decoding.cpp")
PARTS = Path(next(iter(templates.__path__)), "mixed_gemm", "decode")
EXACT = sorted(
    path.stem
    for path in PARTS.glob("*_*.cuh")
    if not path.stem.endswith("_scaled")  # those round
)
# The bit of a thread's words that has bit `b` of what is stored of a code, element `e` of register
# `r`; other formats have each register's elements in order.
_NIBBLES = "return 16 * e + 4 * r + b;"
_IN_TURN = "return r / 2 * 32 + 8 * e + 4 * (r % 2) + b;"
PLACES = {
    ("int4", 16): _NIBBLES,
    ("uint4", 16): _NIBBLES,
    ("int4", 32): _IN_TURN,
    ("int8", 16): "return r / 2 * 32 + 16 * e + 8 * (r % 2) + b;",
    ("mxfp4", 16): """
  const int places[4][4] = {{6, 7, 8, 15}, {12, 13, 14, 21}, {2, 3, 4, 11}, {0, 1, 10, 9}};
  return (places[r][b] + 16 * e) % 32;""",
    ("mxfp4", 32): """
  return r / 2 * 32 + (b == 3 ? 8 * e + (r % 2 ? 3 : 7) : 16 * (r % 2) + 4 * e + b);""",
}
IN_ORDER = "return (r * (kStep / 8) + e) * kBits + b;"


@needs_compiler
@pytest.mark.parametrize("part", EXACT)
def test_every_code_is_decoded_exactly(part: str, tmp_path: Path) -> None:
    b, a = part.split("_")
    bits, step = weight_format(b).bits, 16 if a in ("bf16", "fp16") else 32
    exponent, mantissa = (5, 10) if a == "fp16" else (8, 7)
    constants = f"""
#include <string>
static const std::string kFormat = "{b}", kA = "{a}";
constexpr int kStep = {step}, kBits = {bits}, kCodes = 1 << kBits;
constexpr int kExponent = {exponent}, kMantissa = {mantissa};
static int place(int r, int e, int b) {{ {PLACES.get((b, step), IN_ORDER)} }}
"""
    program = PROGRAM.read_text().replace("PART", (PARTS / f"{part}.cuh").read_text())
    run(constants + program, tmp_path)


def test_parts_that_are_exact_are_of_every_format() -> None:
    assert {part.split("_")[0] for part in EXACT} == {"int4", "uint4", "int8", "e4m3", "mxfp4"}
