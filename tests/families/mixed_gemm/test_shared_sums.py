"""Consumers that share k: each fragment is finished once, of parts that lie where it reads."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from host import build, needs_compiler

from warploom.generator.families import family
from warploom.generator.families.mixed_gemm import MixedGemmOperation
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec

FAMILY = family("mixed_gemm")
HARNESS = Path(__file__).with_name("shared_sums.cpp")
BF16 = MixedGemmOperation("bf16", "int4", "bf16", 128, "bf16")
STUBS = """
#include <cstdint>
#define __device__
#define __forceinline__ inline
inline int min(int a, int b) { return a < b ? a : b; }
struct { int x; } threadIdx;
using Accumulator = float;
"""
# tile, consumers, shares, split
CASES = (
    ((8, 64, 256), 2, 2, 1),
    ((16, 64, 512), 4, 4, 1),
    ((16, 128, 256), 4, 2, 1),
    ((8, 64, 128), 1, 1, 4),
    ((16, 64, 128), 1, 1, 4),
    ((8, 64, 256), 2, 2, 2),
    ((16, 64, 128), 1, 1, 8),
    ((8, 128, 128), 1, 1, 8),
    ((16, 64, 256), 2, 2, 4),
)


def text(spec: KernelSpec) -> str:
    source = render(spec)
    constants = [line for line in source.splitlines() if re.match(r"constexpr int k", line)]
    (struct,) = re.findall(
        r"^(struct SharedSums \{.*?)\n  // Adds the others'", source, re.M | re.S
    )
    before = next(i for i, line in enumerate(constants) if "kPanels" in line)
    constants = constants[:before] + [line for line in constants[before:] if "kAcross" in line]
    (room,) = re.findall(r"uint8_t shared_sums\[\d+\];", source)
    (fragment,) = re.findall(r"^struct alignas\(16\) Fragment .*$", source, re.M)
    parts = (STUBS, *constants, fragment, f"struct SharedStorage {{ {room} }};", struct, "};")
    return "\n".join((*parts, f'#line 1 "{HARNESS}"', HARNESS.read_text()))


@needs_compiler
@pytest.mark.parametrize(("tile", "consumers", "shares", "split"), CASES)
def test_each_fragment_is_finished_once_of_parts_that_lie_there(
    tmp_path: Path, tile: tuple[int, int, int], consumers: int, shares: int, split: int
) -> None:
    fields = {
        "tile": tile,
        "consumers": consumers,
        "warp_split_k": shares,
        "cluster_split_k": split,
    }
    schedule = FAMILY.complete("sm_90a", BF16, {**fields, "multiply": "mma", "scaled": "sums"})
    program = build(text(KernelSpec("sm_90a", BF16, schedule)), tmp_path)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
