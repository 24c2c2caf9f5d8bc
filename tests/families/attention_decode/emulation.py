"""A decode kernel's emitted text, run on the CPU by threads that are made up: see emulated.h."""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from host import library

from warploom.generator.families.attention_decode import FAMILY, DecodeProblem
from warploom.generator.launches import Address, Argument, DeviceLimits
from warploom.generator.render import render
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import TensorMap

_HEADER = Path(__file__).with_name("emulated.h")
_OFFSET = "#define OFFSET(type, field) offsetof(type, field)\n"
_HEADERS = ("array", "cmath", "deque", "functional", "memory", "random", "ucontext.h")
_MADE_UP = (
    *("multiply", "read", "read_transposed", "pair", "fast_exp2", "fast_log2"),
    *("copy_scale", "permute", "read_part", "of_rank", "send", "as_new"),
    *("arrive_with_copies", "fma_bf16", "multiply_bf16", "add_fp16", "fp16_of_e4m3", "count_up"),
)
_LAUNCH = """
extern "C" int launch_DIGEST(const void* block, int grid, int cluster, int threads, int bytes) {
  Parameters p;
  std::memcpy(&p, block, sizeof(p));
  gridDim.x = grid;
  bf16 = BF16;
  body = [&] { NAME(p); };
  failed = 0;
  for (int i = 0; i < grid && !failed; i += cluster) run_cluster(i, cluster, threads, bytes);
  return failed;
}
"""


def _text(spec: KernelSpec) -> str:
    """The kernel's text as the host's compiler takes it, in a namespace."""
    found = re.sub(
        r"^#.*\n", "", render(spec).split("// ---- Operation and schedule", 1)[1], flags=re.M
    )
    for name in _MADE_UP:
        pattern = rf"^__device__ __forceinline__ \w+ {name}\([^{{]*\{{\n.*?^\}}\n"
        found = re.sub(pattern, "", found, flags=re.M | re.S)
    found = re.sub(r'asm\("tanh.*?\);', "score = std::tanh(score * argument);", found)
    found = re.sub(r'asm volatile\("griddep.*?\);', "", found)
    found = re.sub(r"extern __shared__[^;]*;", "uint8_t* dynamic_shared = shared_memory;", found)
    assert "asm" not in found, found[found.index("asm") - 200 :][:400]
    launch = _LAUNCH.replace("NAME", spec.name).replace("DIGEST", spec.digest)
    launch = launch.replace("BF16", str(int(spec.operation.element == "bf16")))
    return f"namespace of_{spec.digest} {{\n// {found}{launch}}}\n"


def emulated(specs: Iterable[KernelSpec], folder: Path) -> dict[KernelSpec, Emulated]:
    """Compile kernels together, since what they are emulated by takes as long as one of them."""
    texts = {spec: _text(spec) for spec in specs}
    text = "".join(("#include <array>\n", _HEADER.read_text(), _OFFSET, *texts.values()))
    built = ctypes.CDLL(str(library(text, folder / "kernels.so", _HEADERS)))
    return {spec: Emulated(spec, getattr(built, f"launch_{spec.digest}")) for spec in texts}


class Emulated:
    """A kernel that runs on the CPU."""

    def __init__(self, spec: KernelSpec, launch: Callable[..., int]) -> None:
        self.spec = spec
        self._launch = launch

    def __call__(
        self,
        problem: DecodeProblem,
        tensors: Mapping[str, torch.Tensor],
        scalars: Mapping[str, float],
        multiprocessors: int = 3,
    ) -> None:
        """Run one call; workspaces are made, and those that are kept must be left as they were."""
        tensors, spaces = dict(tensors), FAMILY.workspaces(self.spec, problem)
        for space in spaces:
            filled = 0 if space.kept else 0xFF
            tensors[space.tensor] = torch.full((space.bytes,), filled, dtype=torch.uint8)
        (launch,) = FAMILY.launches(self.spec, problem, DeviceLimits(multiprocessors))
        values = {n: _value(v, tensors, scalars) for n, v in launch.parameters.items()}
        block = FAMILY.parameters(self.spec).pack(values)
        failed = self._launch(block, launch.grid, launch.cluster, launch.block, launch.shared_bytes)
        assert not failed, failed
        for space in spaces:
            assert not space.kept or not tensors[space.tensor].any(), f"{space.tensor} is not 0"


def _value(
    value: object, tensors: Mapping[str, torch.Tensor], scalars: Mapping[str, float]
) -> object:
    if isinstance(value, Address):
        return tensors[value.tensor].data_ptr()
    if isinstance(value, Argument):
        return scalars[value.name]
    if isinstance(value, TensorMap):
        assert value.fits(tensors[value.tensor].data_ptr()), value
        packed = struct.pack(
            "<Q4q10i2i",
            tensors[value.tensor].data_ptr(),
            *value.pitches,
            *value.extents,
            *value.box,
            value.span,
            value.element.bytes,
        )
        return packed.ljust(128, b"\0")
    return value
