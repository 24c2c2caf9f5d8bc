"""What decoding parts make of every code, by their own text, which runs here.

A wrong mask or constant of one would give weights that are wrong for some codes only.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from host import needs_compiler, run_each

from warploom import templates
from warploom.generator.formats import REGISTERS, STEPS, activations_of, weight_format

PROGRAM = Path(__file__).with_name("decoding.cpp")
PARTS = Path(next(iter(templates.__path__)), "mixed_gemm", "decode")
ALL = sorted(path.stem for path in PARTS.glob("*_*.cuh"))
EXACT = [part for part in ALL if not part.endswith("_scaled")]
# Whose scales are those of the format: the part of mxfp4 by e4m3 is given their differences.
SCALED = [part for part in ALL if part.endswith("_scaled") and part != "mxfp4_e4m3_scaled"]


FORMATS = ("int4", "uint4", "int8", "e4m3", "mxfp4", "int2", "nvfp4", "mxfp8")


@needs_compiler
@pytest.mark.parametrize("b", FORMATS)
def test_every_code_is_decoded_and_scaled_exactly_or_rounded_once(b: str, tmp_path: Path) -> None:
    texts = {part: decoding_text(part) for part in (*EXACT, *SCALED) if part.startswith(f"{b}_")}
    run_each(texts, tmp_path, more=("cmath", "random", "string"))


def decoding_text(part: str) -> str:
    """A program that decodes every code by a part."""
    b, a = part.removesuffix("_scaled").split("_")
    row, activations = weight_format(b), activations_of(a)
    order, step = row.orders[activations], STEPS[activations]
    places = [
        order.place(r, e, bit, second)
        for second in range(order.steps)
        for r in range(REGISTERS)
        for e in range(step // 8)
        for bit in range(row.bits)
    ]
    exponent, mantissa = (5, 10) if a == "fp16" else (8, 7)
    constants = f"""
#include <string>
static const std::string kFormat = "{b}", kA = "{a}";
constexpr int kStep = {step}, kBits = {row.bits}, kCodes = 1 << kBits;
constexpr int kStepsOfWords = {order.steps};
constexpr bool kScaled = {"true" if part in SCALED else "false"};
constexpr double kLargestScale = {order.largest_scale or 1};
constexpr int kExponent = {exponent}, kMantissa = {mantissa};
static const int kPlaces[] = {{{", ".join(map(str, places))}}};
static int place(int i, int b) {{ return kPlaces[i * kBits + b]; }}  // of the i-th code of a step
#define STEP(decode, words, step, own) decode.step(words{", step" * (order.steps > 1)}, own)
"""
    program = PROGRAM.read_text().replace("PART", (PARTS / f"{part}.cuh").read_text())
    return constants + program


def test_parts_that_are_exact_are_of_every_format() -> None:
    assert {part.split("_")[0] for part in EXACT} == {*FORMATS} - {"nvfp4"}  # scaled always
    assert {part.split("_")[0] for part in SCALED} <= {*FORMATS}
