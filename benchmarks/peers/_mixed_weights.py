"""A weight as each contender keeps it, and its product: Warploom, torch, Marlin, Machete.

Marlin and Machete are vLLM's kernels, in libraries that are looked for in the folders of sys.path:
libmarlin_c.so with one C function, libmachete.so with operators of torch. What is missing, or
computes no such product, raises RuntimeError or ValueError. humming is in _mixed_humming.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.utils import _pytree

import warploom
from benchmarks.peers import _mixed_layouts as layouts
from benchmarks.peers._mixed_codes import Codes
from benchmarks.peers._mixed_problem import Activations, Quantised, by_rows
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec


@dataclass(frozen=True)
class Weight:
    """A weight [n, k] in a contender's layout; `tensors` are what a product reads.

    `wide`: it multiplies activations in bf16 whatever they are given in.
    """

    tensors: tuple[Any, ...]
    wide: ClassVar[bool] = False
    accumulation: ClassVar[Accumulation] = "promoted"

    @classmethod
    def of(cls, given: Quantised) -> Weight:
        """Pack the numbers of a weight."""
        raise NotImplementedError

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """D [m, n], in `out` where the contender can write to a given tensor."""
        raise NotImplementedError

    def exact(self, codes: Codes) -> torch.Tensor:
        """What it stands for in float64 [n, k]."""
        return codes.weight()

    def told(self, a: Activations, out: torch.Tensor) -> tuple[str, str]:
        """The kernel, and what decided on it, where that is known."""
        return "", ""

    def copy(self) -> Weight:
        """The same, in memory of its own."""
        return replace(self, tensors=_pytree.tree_map(_copied, self.tensors))

    @property
    def bytes(self) -> int:
        """The size of what a product reads."""
        return sum(one.nbytes for one in _pytree.tree_leaves(self.tensors) if _is_tensor(one))


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _copied(value: Any) -> Any:  # noqa: ANN401 (tensors are cloned as they lie, all else is kept)
    return value.clone() if isinstance(value, torch.Tensor) else value


# ---- Warploom ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Packed(Weight):
    """Warploom's mixed product: as dispatched, or by one kernel."""

    spec: KernelSpec | None = None

    @classmethod
    def of(cls, given: Quantised) -> Packed:
        """The packed weight itself."""
        return cls((given.packed,))

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """With the scales of rows of activations that have them."""
        return warploom.mixed_gemm(
            a.values, self.tensors[0], out=out, scale_a=a.rows, spec=self.spec
        )

    def told(self, a: Activations, out: torch.Tensor) -> tuple[str, str]:
        """The kernel, and what decided on it."""
        given: Any = {"out": out, "scale_a": a.rows, "spec": self.spec}
        found = warploom.explain(warploom.mixed_gemm, a.values, self.tensors[0], **given)
        return found.kernel, found.reason


class Wide(Weight):
    """The dequantised weight in bf16, by torch (cuBLAS)."""

    wide = True

    @classmethod
    def of(cls, given: Quantised) -> Wide:
        """Rounded to bf16."""
        return cls((given.codes.weight().bfloat16(),))

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """torch.mm."""
        weight: torch.Tensor = self.tensors[0]
        return torch.mm(a.wide, weight.t(), out=out)

    def exact(self, codes: Codes) -> torch.Tensor:
        """The rounded weight."""
        return codes.weight().bfloat16().double()


class WideGemm(Wide):
    """The dequantised weight in bf16, by Warploom."""

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """As dispatched."""
        return warploom.gemm(a.wide, self.tensors[0].t(), out=out)


class Eight(Weight):
    """The dequantised weight in e4m3 with a scale for each row, by Warploom's fp8 product."""

    accumulation = "fast"

    @classmethod
    def of(cls, given: Quantised) -> Eight:
        """Quantised once more."""
        return cls(by_rows(given.codes.weight().float()))

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """As dispatched."""
        values, columns = self.tensors
        return warploom.gemm(a.values, values.t(), out=out, scale_a=a.rows, scale_b=columns)

    def exact(self, codes: Codes) -> torch.Tensor:
        """The weight that was quantised twice."""
        values, columns = self.tensors
        found: torch.Tensor = values.double() * columns.double()[:, None]
        return found


# ---- torch ---------------------------------------------------------------------------------------


class TorchInt4(Weight):
    """torch._weight_int4pack_mm: scale (code - 8) + an offset in bf16."""

    most: ClassVar[int] = 512  # rows: it reads the weight for every 16 of them

    @classmethod
    def of(cls, given: Quantised) -> TorchInt4:
        """By torch's own packing."""
        codes = only("torch", given.codes, "int4", "uint4")
        packed = torch._convert_weight_to_int4pack(layouts.torch_bytes(codes), 8)
        offsets = layouts.torch_offsets(codes)
        return cls((packed, torch.stack((codes.scales.t(), offsets.t()), 2).contiguous()))

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """bf16 activations."""
        m, k = a.values.shape
        if a.rows is not None or m > self.most:
            raise RuntimeError(f"torch: for bf16 and up to {self.most} rows here")
        packed, factors = self.tensors
        group = k // factors.shape[0]
        found: torch.Tensor = torch._weight_int4pack_mm(a.values, packed, group, factors)
        return found

    def exact(self, codes: Codes) -> torch.Tensor:
        """With the offset as it is rounded."""
        grouped = (codes.codes.double() - 8).view(codes.n, -1, codes.group)
        offsets = layouts.torch_offsets(codes).double()[..., None]
        return (grouped * codes.factors()[..., None] + offsets).view(codes.n, codes.k)


def only(name: str, codes: Codes, *formats: str) -> Codes:
    """The numbers of a weight, where they are in one of these formats."""
    if codes.format not in formats:
        raise RuntimeError(f"{name}: not for {codes.format} here")
    return codes


# ---- vLLM's kernels ------------------------------------------------------------------------------


def library(name: str) -> str:
    """The path of a library in a folder of sys.path."""
    for folder in map(Path, sys.path):
        if (folder / name).is_file():
            return str(folder / name)
    raise RuntimeError(f"{name} is in no folder of sys.path")


@dataclass(frozen=True)
class Marlin(Weight):
    """Marlin: scales multiply weights, rounded to bf16."""

    format: str
    n: int
    group: int  # -1: a scale for each row

    @classmethod
    def of(cls, given: Quantised) -> Marlin:
        """In tiles."""
        _marlin()
        codes = given.codes
        tensors = layouts.marlin_words(codes), layouts.marlin_scales(codes)
        group = -1 if codes.group == codes.k else codes.group
        return cls((*tensors, layouts.marlin_zeros(codes)), codes.format, codes.n, group)

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """bf16 activations."""
        if a.rows is not None:
            raise RuntimeError("marlin: not for e4m3 activations on this GPU")
        function, told = _marlin()
        (m, k), (words, factors, zeros) = a.values.shape, self.tensors
        count, locks, sums = _marlin_memory()
        addresses = [_address(one) for one in (a.values, words, out, sums, factors, None)]
        addresses += [_address(one) for one in (zeros, locks)]
        kind = {"int4": 0, "uint4": 1, "e4m3": 3, "mxfp4": 4}[self.format]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        numbers = (m, self.n, k, k, kind, self.group, 0, count, stream, 1)
        if function(*addresses, *numbers):
            raise RuntimeError(f"marlin: {told().decode()}")
        return out


@cache
def _marlin() -> tuple[Any, Any]:
    """The function, and what says why it failed."""
    path = library("libmarlin_c.so")
    try:
        ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)
        found = ctypes.CDLL(path)
    except OSError as error:
        raise RuntimeError(f"marlin: {error}") from error
    found.marlin_error.restype = ctypes.c_char_p
    return found.marlin_gemm_c, found.marlin_error


@cache
def _marlin_memory() -> tuple[int, torch.Tensor, torch.Tensor]:
    """Multiprocessors, and what blocks wait and add up in; its calls follow one another."""
    count = torch.cuda.get_device_properties(0).multi_processor_count
    locks = torch.zeros(count * 4, dtype=torch.int32, device="cuda")
    return count, locks, torch.empty(count * 64 * 256, dtype=torch.float32, device="cuda")


def _address(tensor: torch.Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(0 if tensor is None else tensor.data_ptr())


class Machete(Weight):
    """Machete, by its own choice of schedules: scales multiply weights, rounded to bf16."""

    uint4_less_8: ClassVar[int] = 1125899907892224  # vLLM's number of the type

    @classmethod
    def of(cls, given: Quantised) -> Machete:
        """By Machete's own packing."""
        codes, kind = only("machete", given.codes, "int4"), torch.bfloat16
        words = layouts.machete_words(codes)
        packed = _machete().machete_prepack_B(words, kind, cls.uint4_less_8, kind)
        return cls((packed, codes.scales.t().contiguous()))

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """bf16 activations."""
        if a.rows is not None:
            raise RuntimeError("machete: not for e4m3 activations here")
        words, factors = self.tensors
        group = a.values.shape[1] // factors.shape[0]
        more = (None, factors, None, group, None, None, None)
        found: torch.Tensor = _machete().machete_mm(a.values, words, self.uint4_less_8, *more)
        return found


@cache
def _machete() -> Any:  # noqa: ANN401 (operators that only the library knows)
    path = library("libmachete.so")
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise RuntimeError(f"machete: {error}") from error
    return torch.ops.machete_peer
