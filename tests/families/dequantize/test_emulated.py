"""The emitted kernels run on the CPU with made-up CUDA: every bit of W is that of torch's, and
nothing beside it is written.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from dequantize_weights import EVERY, experts, rows, rows_spec, spec
from host import library, needs_compiler

from warploom.generator.families import family
from warploom.generator.families.dequantize import DequantizeProblem
from warploom.generator.launches import NO_GPU, Address
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.quantization import PackedExperts
from warploom.runtime.elements import TORCH
from warploom.runtime.families.gemm.block_scales import dequantised

FAMILY = family("dequantize")
HERE = Path(__file__)
_CUDA = "constexpr int kType = 0;\n" + "".join(
    path.read_text()
    for path in (HERE.parents[1] / "cast" / "emulated.h", HERE.with_name("emulated_bf16.h"))
)
_MADE_UP = (
    "wait_for_previous_grid|store_eight|fp16_of_e4m3|fma_bf16|multiply_bf16|permute|both|"
    "masked_with|rounded"
)
_LAUNCH = """
extern "C" void launch{number}(const void* block, int grid) {{
  Parameters p;
  std::memcpy(&p, block, sizeof(p));
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) Cta::run(kThreads, [&] {{ {name}(p); }});
}}
"""
STRIDES = [(8, 24, 8), (8, 3, 0), (1, 0, 0), (0, 0, 3)]
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
    headers = ("cstddef", "cmath", "ucontext.h")
    return folder, ctypes.CDLL(str(library(text, Path(folder.name) / "kernels.so", headers)))


@dataclass(frozen=True)
class Strides:
    """Elements between rows of W, and between its experts, that are no one's; where W begins."""

    of_rows: int = 0
    of_experts: int = 0
    shift: int = 0


def run(
    kernels: Sequence[KernelSpec],
    kernel: KernelSpec,
    places: Mapping[str, int],
    wanted: torch.Tensor,
    strides: Strides,
    wrong: Edit | None = None,
    **problem: Any,
) -> None:
    """Run a kernel into memory where every bit is 1: each of W is right, the others are left."""
    count, n, k = wanted.shape
    row_stride = k + strides.of_rows
    expert_stride = n * row_stride + strides.of_experts
    memory = torch.full((count * expert_stride + strides.shift + BEHIND,), -1, dtype=torch.int16)
    sizes = DequantizeProblem(count, n, k, row_stride, expert_stride, **problem)
    (launch,) = FAMILY.launches(kernel, sizes, NO_GPU)
    places = {**places, "w": memory[strides.shift :].data_ptr()}
    values = {
        name: places[value.tensor] if isinstance(value, Address) else value
        for name, value in launch.parameters.items()
    }
    block = ctypes.create_string_buffer(FAMILY.parameters(kernel).pack(values))
    _, built = _built(tuple(kernels), wrong)
    getattr(built, f"launch{kernels.index(kernel)}")(block, launch.grid)
    right = torch.full_like(memory, -1)
    view = right.as_strided((count, n, k), (expert_stride, row_stride, 1), strides.shift)
    view.copy_(wanted.view(torch.int16))
    inside = torch.zeros_like(right)
    inside.as_strided(view.shape, view.stride(), strides.shift).fill_(1)
    nan = memory.view(wanted.dtype).isnan() & right.view(wanted.dtype).isnan()
    apart = (memory != right) & ~(nan & inside.bool())
    assert not apart.any(), apart.nonzero()[:8].tolist()


def verify(
    kernels: Sequence[KernelSpec],
    kernel: KernelSpec,
    packed: PackedExperts,
    strides: Strides = Strides(),
    wrong: Edit | None = None,
) -> None:
    """Run a kernel on experts in slabs."""
    places = {name: one.data_ptr() for name, one in packed.tensors().items()}
    wanted = packed.dequantize(TORCH[kernel.operation.w])  # type: ignore[attr-defined]
    run(kernels, kernel, places, wanted, strides, wrong)


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
    for strides in STRIDES:
        verify(KERNELS, KERNELS[number], given, Strides(*strides))


@needs_compiler
@pytest.mark.parametrize("k", [1, 7, 130, 260])
def test_columns_of_any_number_end_where_they_should(k: int) -> None:
    number = next(i for i, kind in enumerate(EVERY) if kind[:2] == ("int4", None))
    verify(KERNELS, KERNELS[number], experts(EVERY[number], 1, 65, k))


ROWS = [rows_spec("bf16", "fp32"), rows_spec("fp16", "e8m0", slabs=1), rows_spec("fp16", "fp32")]


@needs_compiler
@pytest.mark.parametrize("sizes", [(2, 70, 300), (3, 129, 64), (1, 1, 1), (2, 65, 520)], ids=str)
@pytest.mark.parametrize("number", range(len(ROWS)))
def test_rows_of_e4m3_are_right_of_any_strides(number: int, sizes: tuple[int, int, int]) -> None:
    """Every code, NaN as well, and scales of all sizes; codes and scales have strides, too."""
    kernel = ROWS[number]
    for each, strides in enumerate(STRIDES):
        apart = (0, 8, 3, 16)[each]
        data, scale = rows(kernel, *sizes, apart=apart)
        wanted = dequantised(data, scale, torch.float32).to(TORCH[kernel.operation.w])  # type: ignore[attr-defined]
        run(
            ROWS,
            kernel,
            {"data": data.data_ptr(), "scales": scale.data_ptr()},
            wanted,
            Strides(*strides),
            data_strides=data.stride()[:2],
            scale_strides=scale.stride(),
        )


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
    "a warp stores what not all of its threads have decoded": (
        "int4",
        ("    __syncwarp();\n    from +=", "    from +="),
    ),
    "a slab takes the place of one that is still stored": (
        "int4",
        ("    __syncwarp();  // before the next", "    // before the next"),
    ),
    "zero points are not taken away": ("uint4", ("Decode(group.zeros)", "Decode(0u)")),
    "experts begin where the first does": (
        "mxfp4",
        ("block / p.row_blocks * p.expert_stride", "0"),
    ),
    "a row has the second-level scale of another": ("nvfp4", ("? row_high", "? row_low")),
}


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_is_wrong_in_one_place_is_caught(name: str) -> None:
    format_, wrong = MUTANTS[name]
    kind = next(one for one in EVERY if one[0] == format_ and one[1] in (16, 32))
    with pytest.raises(AssertionError):
        verify([spec(kind)], spec(kind), experts(kind, 2, 33, 192), wrong=wrong)
