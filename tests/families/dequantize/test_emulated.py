"""The emitted kernels run on the CPU with made-up CUDA: every bit of W is that of torch's, and
nothing beside it is written.
"""

from __future__ import annotations

import ctypes
import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from dequantize_weights import EVERY, experts, spec
from host import library, needs_compiler

from warploom.generator.families import family
from warploom.generator.families.dequantize import DequantizeProblem
from warploom.generator.launches import NO_GPU, Address
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts

FAMILY = family("dequantize")
HERE = Path(__file__)
_CUDA = "constexpr int kType = 0;\n" + "".join(
    path.read_text()
    for path in (HERE.parents[1] / "cast" / "emulated.h", HERE.with_name("emulated_bf16.h"))
)
_MADE_UP = "wait_for_previous_grid|fma_bf16|multiply_bf16|permute|both|masked_with|rounded"
_LAUNCH = """
extern "C" void launch{number}(const void* block, int grid) {{
  Parameters p;
  std::memcpy(&p, block, sizeof(p));
  for (auto& warp : warps) pthread_barrier_init(&warp, nullptr, 32);
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {{
    std::vector<std::thread> threads;
    for (int i = 0; i < kThreads; ++i) threads.emplace_back([=] {{ threadIdx.x = i; {name}(p); }});
    for (auto& thread : threads) thread.join();
  }}
}}
"""
BEHIND = 4096  # elements past W that nothing may write, of which mutants write some
Edit = tuple[str, str]
KERNELS = [
    spec(kind, w="fp16" if number % 3 == 1 else "bf16", slabs=2 if number % 2 else 1)
    for number, kind in enumerate(EVERY)
]


def _part(number: int, kernel: KernelSpec, wrong: Edit | None) -> str:
    """The text of a kernel, in a namespace of its own."""
    text = render(kernel)
    if wrong is not None:
        assert text.count(wrong[0]) == 1
        text = text.replace(*wrong)
    text = re.sub(r"^#.*\n", "", text[text.index("constexpr int kThreads") :], flags=re.M)
    text = re.sub(
        rf"^__device__ __forceinline__ \w+ (?:{_MADE_UP})\([^{{]*\{{\n.*?^\}}\n", "", text,
        flags=re.M | re.S,
    )  # fmt: skip
    assert "asm" not in text
    words = f"constexpr auto rounded = rounded_{kernel.operation.w};\n"  # type: ignore[attr-defined]
    text = words + text + _LAUNCH.format(number=number, name=kernel.name)
    return f"namespace kernel{number} {{\n{text}}}\n"


@cache
def _built(kernels: tuple[KernelSpec, ...], wrong: Edit | None = None) -> tuple[object, Any]:
    folder = TemporaryDirectory()
    text = _CUDA + "".join(_part(i, one, wrong) for i, one in enumerate(kernels))
    headers = ("thread", "cstddef", "pthread.h", "cmath", "mutex")
    return folder, ctypes.CDLL(str(library(text, Path(folder.name) / "kernels.so", headers)))


def verify(
    kernels: list[KernelSpec],
    kernel: KernelSpec,
    given: PackedExperts,
    pad: tuple[int, int] = (0, 0),
    shift: int = 0,
    wrong: Edit | None = None,
) -> None:
    """Run a kernel on a poisoned room, with elements between rows and experts that are no one's."""
    (count, n, k), operation = given.shape, kernel.operation
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[operation.w]  # type: ignore[attr-defined]
    pitch = k + pad[0]
    expert_pitch = n * pitch + pad[1]
    room = torch.full((count * expert_pitch + shift + BEHIND,), -1, dtype=torch.int16)
    room[-BEHIND:] = -2
    problem = DequantizeProblem(count, n, k, pitch, expert_pitch)
    (launch,) = FAMILY.launches(kernel, problem, NO_GPU)
    places = {name: one.data_ptr() for name, one in given.tensors().items()}
    places["w"] = room[shift:].data_ptr()
    values = {
        name: places[value.tensor] if isinstance(value, Address) else value
        for name, value in launch.parameters.items()
    }
    block = ctypes.create_string_buffer(FAMILY.parameters(kernel).pack(values))
    _, built = _built(tuple(kernels), wrong)
    getattr(built, f"launch{kernels.index(kernel)}")(block, launch.grid)
    right = torch.full_like(room, -1)
    right[-BEHIND:] = -2
    view = right[shift:].as_strided((count, n, k), (expert_pitch, pitch, 1), shift)
    view.copy_(given.dequantize(dtype).view(torch.int16))
    apart = room != right
    floats = room.view(dtype).isnan() & right.view(dtype).isnan() & (right != -1)
    apart &= ~floats
    assert not apart.any(), apart.nonzero()[:8].tolist()


@needs_compiler
@pytest.mark.parametrize("number", range(len(EVERY)), ids=lambda i: "-".join(map(str, EVERY[i])))
def test_every_bit_is_right_in_every_order_of_codes(number: int) -> None:
    """Rows and columns that no slab divides, and a chunk of K that has fewer slabs."""
    given = experts(EVERY[number], 2, 70 if number % 2 else 33, 384)
    verify(KERNELS, KERNELS[number], given)


@needs_compiler
@pytest.mark.parametrize("number", range(0, len(EVERY), 5))
def test_results_may_have_any_strides_and_addresses(number: int) -> None:
    k = EVERY[number][1] or 200
    given = experts(EVERY[number], 2, 17, k)
    for pad, shift in (((8, 24), 8), ((8, 3), 0), ((1, 0), 0), ((0, 0), 3)):
        verify(KERNELS, KERNELS[number], given, pad, shift)


@needs_compiler
@pytest.mark.parametrize("k", [1, 7, 130, 260])
def test_columns_of_any_number_end_where_they_should(k: int) -> None:
    number = next(i for i, kind in enumerate(EVERY) if kind[:2] == ("int4", None))
    verify(KERNELS, KERNELS[number], experts(EVERY[number], 1, 65, k))


MUTANTS: dict[str, tuple[str, Edit]] = {
    "row r + 8 has the scale of row r": (
        "int4",
        ("i % 2 ? group.high() : group.low()", "group.low()"),
    ),
    "a group has the scales of the first": (
        "int4",
        ("step * Slab::kGroups / Slab::kSteps", "0"),
    ),
    "rows past the last are written": ("int4", ("p.n - row, p.k", "p.n - row + 1, p.k")),
    "the last column is left out": (
        "uint4",
        ("min(columns - column, 8)", "min(columns - column, 7)"),
    ),
    "zero points are not taken away": ("uint4", ("Decode(group.zeros)", "Decode(0u)")),
    "experts begin where the first does": (
        "mxfp4",
        ("block / p.row_blocks * p.expert_pitch", "0"),
    ),
    "a row has the second-level scale of another": ("nvfp4", ("? row_high", "? row_low")),
}


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(name: str) -> None:
    format_, wrong = MUTANTS[name]
    kind = next(one for one in EVERY if one[0] == format_ and one[1] in (16, 32))
    with pytest.raises(AssertionError):
        verify([spec(kind)], spec(kind), experts(kind, 2, 33, 160), wrong=wrong)
