"""Kernels that cast groups of rows, or by given scales, run on the CPU with made-up CUDA.

Every bit of what they write is that of the reference, and nothing else is written.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from host import library, needs_compiler

from warploom.generator.families import family
from warploom.generator.families.cast import CastOperation, CastSchedule
from warploom.generator.launches import Address, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.runtime.families.cast.call import AnyCast, Details, call_of
from warploom.runtime.families.cast.reference import Results

FAMILY = family("cast")
TYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
_CUDA = Path(__file__).with_name("emulated.h")
_MADE_UP = ("wait_for_previous_grid", "larger", "packed")
_LAUNCH = """
template <class Kernel> static void run(Kernel kernel, const void* block, int grid) {
  Parameters p;
  std::memcpy(&p, block, sizeof(p));
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) Cta::run(kThreads, [&] { kernel(p); });
}
"""
_ENTRY = 'extern "C" void launch{0}(const void* block, int grid) {{ run({1}, block, grid); }}\n'
Edit = tuple[str, str]


@cache
def _built(spec: KernelSpec, wrong: Edit | None = None) -> tuple[TemporaryDirectory[str], Any]:
    """The kernels of a spec, or of one that is wrong in a place, and the folder they are in."""
    text = render(spec)
    if wrong is not None:
        assert text.count(wrong[0]) == 1
        text = text.replace(*wrong)
    entries = re.findall(rf"^    ({spec.name}\w*)\(const", text, re.M)
    text = re.sub(r"^#.*\n", "", text[text.index("using X") :], flags=re.M)
    for name in _MADE_UP:
        pattern = rf"^__device__ __forceinline__ \w+ {name}\([^{{]*\{{\n.*?^\}}\n"
        text, count = re.subn(pattern, "", text, flags=re.M | re.S)
        assert count == 1, name
    text = re.sub(r"asm volatile\(.*?\);", ";", text)
    text = re.sub(r"extern __shared__[^;]*;", "uint8_t* dynamic_shared = shared_memory;", text)
    assert "asm" not in text
    kind = f"constexpr int kType = {[*TYPES].index(spec.operation.q)};\n"  # type: ignore[attr-defined]
    text += _LAUNCH + "".join(_ENTRY.format(i, name) for i, name in enumerate(entries))
    folder = TemporaryDirectory()
    headers = ("cstddef", "cmath", "ucontext.h")
    path = library(kind + _CUDA.read_text() + text, Path(folder.name) / "kernel.so", headers)
    return folder, ctypes.CDLL(str(path))


def spec(block: str, q: str = "e4m3", **options: Any) -> KernelSpec:
    options = {"offsets": True, **options}
    operation = CastOperation("fp32", q, block, transpose=True, **options)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, CastSchedule(256))


def drawn(kernel: KernelSpec, m: int, n: int, ends: Sequence[int]) -> AnyCast:
    """A call on random rows, of which those of no group are NaN; of an odd number some values are
    infinite, where the largest magnitude of all says nothing. Given scales have both signs.
    """
    operation: Any = kernel.operation
    random = torch.Generator().manual_seed(m + n)
    sizes = torch.exp2(torch.randint(-9, 9, (m, 1), generator=random).float())
    x = torch.randn(m, n, generator=random) * sizes
    offsets = torch.tensor(ends, dtype=torch.int32) if operation.offsets else None
    last = m if offsets is None else int(offsets.clamp(0, m).amax())
    if m % 2 and operation.q != "int8":
        x[last // 2, n // 2], x[last - 1, 0] = torch.inf, -torch.inf
    x[last:] = torch.nan
    call = call_of(
        *(x, TYPES[operation.q]),
        block=operation.block,
        transpose=True,
        pow2=operation.pow2,
        rounding=operation.rounding,
        offsets=offsets,
    )
    if operation.static:
        for name, usual in zip(("scale", "scale_t"), call.results(Details(()))[1:4:2], strict=True):
            if usual is not None:  # with strides of their own
                values = torch.rand(*usual.shape, 2, generator=random)[..., 0] + 0.01
                setattr(
                    call, name, values * (torch.rand(usual.shape, generator=random) - 0.5).sign()
                )
    if operation.rounding == "stochastic":
        call.rounding_state = torch.tensor([5, 11])
    if operation.amax:
        call.amax = torch.tensor([0.25])
    return call


def poisoned(call: AnyCast) -> Results:
    """Results of which every byte is 0xff."""
    found = call.results(Details(()))
    for one in found:
        if one is not None:
            one.view(torch.uint8 if one.dtype.itemsize == 1 else torch.int32).fill_(-1 % 256)
    return found


def run(kernel: KernelSpec, call: AnyCast, wrong: Edit | None = None) -> Results:
    """What the emitted kernels write where every byte was 0xff; workspaces that are kept are 0."""
    folder, built = _built(kernel, wrong)
    assert folder is not None
    found, problem = poisoned(call), call._problem(())
    tensors: dict[str, Any] = dict(zip(call.outputs, found, strict=True))
    tensors |= {"x": call.x, "offsets": call.offsets, "state": call.rounding_state}
    tensors |= {"amax": call.amax}
    given = {"scale": call.scale, "scale_t": call.scale_t}
    tensors |= {name: one for name, one in given.items() if one is not None}
    spaces = FAMILY.workspaces(kernel, problem)
    for space in spaces:
        byte = 0 if space.kept else 0xFF
        tensors[space.tensor] = torch.full((space.bytes,), byte, dtype=torch.uint8)
    for index, launch in enumerate(FAMILY.launches(kernel, problem, DeviceLimits(2))):
        values = {
            name: tensors[value.tensor].data_ptr() if isinstance(value, Address) else value
            for name, value in launch.parameters.items()
        }
        entry = f"launch{_place(kernel, launch.entry, index)}"
        block = ctypes.create_string_buffer(FAMILY.parameters(kernel).pack(values))
        getattr(built, entry)(block, launch.grid)
    assert not any(space.kept and tensors[space.tensor].any() for space in spaces)
    return found


def _place(kernel: KernelSpec, entry: str, index: int) -> int:
    """Entries are in the order of launches: the first launch comes first in the text."""
    assert (entry == kernel.name) == (index == len(kernel_entries(kernel)) - 1)
    return index


def kernel_entries(kernel: KernelSpec) -> list[str]:
    return re.findall(rf"^    ({kernel.name}\w*)\(const", render(kernel), re.M)


def verify(
    kernel: KernelSpec, m: int, n: int, ends: Sequence[int], wrong: Edit | None = None
) -> None:
    """Every bit is right, of offsets as the device reads them."""
    call = drawn(kernel, m, n, ends)
    amax = None if call.amax is None else call.amax.clone()
    clamped = None
    if call.offsets is not None:
        clamped = call.offsets.clamp(0, m).cummax(0).values.to(torch.int32)
    offsets = {} if clamped is None else {"offsets": clamped}
    right_call = replace(call, amax=amax, **offsets)  # type: ignore[arg-type]
    right = poisoned(right_call)
    right_call.compute(Details(()), right)
    found = run(kernel, call, wrong)
    if clamped is not None and not int(clamped[-1]):
        assert torch.equal(found[4], right[4])  # type: ignore[arg-type]
        return  # what one tile of zeros has, and one scale, is of no group
    for name, one, other in zip(call.outputs, found, right, strict=True):
        if one is None or other is None:
            assert one is other
            continue
        integer = torch.uint8 if one.dtype.itemsize == 1 else torch.int32
        wide = one.float(), other.float()
        same = (one.view(integer) == other.view(integer)) | (wide[0].isnan() & wide[1].isnan())
        assert same.all(), (name, (~same).nonzero()[:4].tolist())
    if call.amax is not None:
        assert torch.equal(call.amax, amax)  # type: ignore[arg-type]


KERNELS = [
    spec("1x128"),
    spec("1x128", "e5m2", pow2=True),
    spec("1x128", "int8", rounding="stochastic"),
    spec("row"),
    spec("tensor"),
    spec("tensor", "int8", static=True, amax=True, rounding="stochastic"),
    spec("tensor", "e5m2", amax=True),
    spec("1x128", "e5m2", static=True),
    spec("row", static=True, rounding="stochastic"),
]
GIVEN = [
    spec(block, q, static=True, offsets=False, rounding=rounding)
    for block, q, rounding in (
        ("1x128", "e4m3", "nearest"),
        ("1x128", "e5m2", "stochastic"),
        ("row", "e5m2", "nearest"),
        ("row", "int8", "nearest"),
    )
]
ENDS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "ragged, and rows of no group": (420, 200, (5, 5, 130, 131, 387)),
    "one": (257, 33, (257,)),
    "empty at both ends": (130, 130, (0, 0, 130, 130)),
    "as many as there may be": (16, 8, (*range(-400, 15), *[15] * 608, 16)),
    "offsets in no order": (301, 40, (200, -7, 90, 2**31 - 1, 3, -(2**31))),
    "none has a row": (60, 40, (0, 0, -3)),
}


@needs_compiler
@pytest.mark.parametrize("case", ENDS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda one: one.name.split("fp32_")[1])
def test_every_bit_of_groups_is_right(kernel: KernelSpec, case: str) -> None:
    verify(kernel, *ENDS[case])


@needs_compiler
@pytest.mark.parametrize("extents", [(1, 1), (129, 260), (300, 128), (257, 33)], ids=str)
@pytest.mark.parametrize("kernel", GIVEN, ids=lambda one: one.name.split("fp32_")[1])
def test_every_bit_of_given_scales_is_right(kernel: KernelSpec, extents: tuple[int, int]) -> None:
    verify(kernel, *extents, ())


MUTANTS: dict[str, tuple[KernelSpec, Edit]] = {
    "a block of scales has rows of the next group": (KERNELS[0], ("  p.m = at.end;", "  ;")),
    "groups end where they do in x": (
        KERNELS[0],
        ("p.ends[group] = past * kTile", "p.ends[group] = end"),
    ),
    "a scale is the one of another block of rows": (
        KERNELS[0],
        ("before = side == 0 ? column0 : column_t;", "before = side == 0 ? column0 : row0;"),
    ),
    "the largest magnitude is that of all rows": (
        KERNELS[4],
        ("  p.m = 0;\n", ""),
    ),
    "an offset that is below the one before counts": (
        KERNELS[0],
        (
            "const int end = max(start, end_of(p, group)), past",
            "const int end = end_of(p, group), past",
        ),
    ),
    "an infinite value is where its row is": (KERNELS[0], ("i + ahead]", "i]")),
}


OF_GIVEN: dict[str, tuple[KernelSpec, Edit]] = {
    "rows of x.T have the scales of the next block": (
        GIVEN[0],
        ("before = side == 0 ? column0 : row0;", "before = column0;"),
    ),
    "x.T has the scales of x": (GIVEN[2], ("side == 0 ? p.scale : p.scale_t;", "p.scale;")),
    "infinite values of x.T have the signs of x": (
        GIVEN[2],
        ("(factors_t[j - column] < 0.f)", "(factors[i - row] < 0.f)"),
    ),
    "columns have the scale of the next column": (
        GIVEN[2],
        ("[1][0][lane * kValues];", "[1][0][lane * kValues ^ 1];"),
    ),
}


@needs_compiler
@pytest.mark.parametrize("name", OF_GIVEN)
def test_a_kernel_that_takes_another_given_scale_is_caught(name: str) -> None:
    kernel, wrong = OF_GIVEN[name]
    with pytest.raises(AssertionError):
        verify(kernel, 257, 260, (), wrong)


@needs_compiler
@pytest.mark.parametrize("name", MUTANTS)
def test_a_kernel_that_takes_a_neighbour_for_its_own_is_caught(name: str) -> None:
    kernel, wrong = MUTANTS[name]
    caught = 0
    for case in ("ragged, and rows of no group", "offsets in no order"):
        try:
            verify(kernel, *ENDS[case], wrong)
        except AssertionError:
            caught += 1
    assert caught
