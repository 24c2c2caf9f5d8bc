"""Machete as vLLM has it: libmachete.so, with operators of torch, in a folder of sys.path."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any, ClassVar

import torch

from benchmarks.peers._mixed_codes import Codes, words
from benchmarks.peers._mixed_problem import Activations, Quantised
from benchmarks.peers._mixed_weights import Weight, only
from benchmarks.peers.libraries import shared_library


class Machete(Weight):
    """Machete, by its own choice of schedules: scales multiply weights, rounded to bf16."""

    uint4_less_8: ClassVar[int] = 1125899907892224  # vLLM's number of the type

    @classmethod
    def of(cls, given: Quantised) -> Machete:
        """By Machete's own packing."""
        codes, kind = only("machete", given.codes, "int4"), torch.bfloat16
        words = machete_words(codes)
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
    path = shared_library("libmachete.so")
    try:
        ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
        torch.ops.load_library(path)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise RuntimeError(f"machete: {error}") from error
    return torch.ops.machete_peer


def machete_words(found: Codes) -> torch.Tensor:
    """Codes as int32 [k / 8, n], column by column: what Machete's own packing takes."""
    return words(found.codes, 4).t()
