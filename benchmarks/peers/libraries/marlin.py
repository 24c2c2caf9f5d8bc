"""Marlin as vLLM 0.33 has it: libmarlin_c.so, with one C function, in a folder of sys.path.

Its layout of weights: tiles of 16 (k) by 64 (n) in the order in which the threads of a warp hold
operand B of `mma.m16n8k16`, and scales in the order in which they hold its results.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.peers._mixed_codes import Codes, four_bits, words
from benchmarks.peers._mixed_problem import Activations, Quantised
from benchmarks.peers._mixed_weights import Weight, only
from benchmarks.peers.libraries import shared_library

# Where a word's numbers are taken from so that a mask and a shift give pairs: of 4 and of 8 bits.
_PAIRS = {4: (0, 2, 4, 6, 1, 3, 5, 7), 8: (0, 2, 1, 3)}
_KINDS = {"int4": 0, "uint4": 1, "e4m3": 3, "mxfp4": 4}  # as libmarlin_c.so counts them
_EXPONENT = 120  # what Marlin leaves out of e4m3's exponents in bf16: 127 - 7


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
        codes = only("marlin", given.codes, *_KINDS)
        tensors = marlin_words(codes), marlin_scales(codes)
        group = -1 if codes.group == codes.k else codes.group
        return cls((*tensors, marlin_zeros(codes)), codes.format, codes.n, group)

    def multiply(self, a: Activations, out: torch.Tensor) -> torch.Tensor:
        """bf16 activations."""
        if a.rows is not None:
            raise RuntimeError("marlin: not for e4m3 activations on this GPU")
        function, told = _marlin()
        (m, k), (words, factors, zeros) = a.values.shape, self.tensors
        count, locks, sums = _marlin_memory()
        addresses = [_address(one) for one in (a.values, words, out, sums, factors, None)]
        addresses += [_address(one) for one in (zeros, locks)]
        kind = _KINDS[self.format]
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        numbers = (m, self.n, k, k, kind, self.group, 0, count, stream, 1)
        if function(*addresses, *numbers):
            raise RuntimeError(f"marlin: {told().decode()}")
        return out


@cache
def _marlin() -> tuple[Any, Any]:
    """The function, and what says why it failed."""
    path = shared_library("libmarlin_c.so")
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


# ---- The layout ----------------------------------------------------------------------------------


def marlin_words(found: Codes) -> torch.Tensor:
    """Codes as int32 [k / 16, n bits / 2]."""
    order = _fragments(found.bits).to(found.codes.device)
    tiles = found.codes.t().reshape(found.k // 16, 16, found.n // 16, 16).transpose(1, 2)
    ordered = tiles.reshape(-1, order.numel())[:, order].view(found.k // 16, found.n * 16)
    return words(ordered, found.bits)


def _fragments(bits: int) -> torch.Tensor:
    """Places, in four tiles of 16 x 16 (k, n), of the numbers of 32 threads, 32 each."""
    lane = torch.arange(32).view(32, 1, 1, 1)
    tile = torch.arange(4).view(1, 4, 1, 1)
    half = torch.arange(2).view(1, 1, 2, 1)  # of a tile's columns
    k = 2 * (lane % 4) + torch.tensor([0, 1, 8, 9]).view(1, 1, 1, 4)
    places = 256 * tile + 16 * k + lane // 4 + 8 * half
    pairs = _PAIRS[bits]
    return places.reshape(-1, len(pairs))[:, pairs].reshape(-1)


def marlin_scales(found: Codes) -> torch.Tensor:
    """Scales as [k / group, n]; of mxfp4 bytes, of e4m3 with what its exponents lack."""
    if found.format == "e4m3":
        scaled = found.scales.float() * 2.0**_EXPONENT
        return _permuted(scaled.to(found.scales.dtype).t(), _channels())
    if found.format == "mxfp4":
        return _permuted(_permuted(found.scales.t(), _groups()), [0, 2, 1, 3])
    return _permuted(found.scales.t(), _groups())


def marlin_zeros(found: Codes) -> torch.Tensor | None:
    """Zero points as int32 [k / group, n / 8]; None where the format has none."""
    if found.zeros is None:
        return None
    zeros = four_bits("Marlin", found.zeros)
    return words(_permuted(_permuted(zeros.t(), _groups()), [*_PAIRS[4]]), 4)


def _groups() -> list[int]:
    """Of 64 columns: a thread's of eight fragments beside each other."""
    return [i + 8 * j for i in range(8) for j in range(8)]


def _channels() -> list[int]:
    """Of 32 columns: a thread's pairs of four fragments beside each other."""
    return [2 * i + j for i in range(4) for j in (0, 1, 8, 9, 16, 17, 24, 25)]


def _permuted(rows: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Every run of as many columns as `order` has, in that order."""
    return rows.reshape(-1, len(order))[:, order].reshape(rows.shape).contiguous()
