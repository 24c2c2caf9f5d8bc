"""A weight as a contender keeps it, and its product: Warploom's, and those of dense weights.

Those of libraries are in libraries/; what computes no such product raises RuntimeError.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch.utils import _pytree

import warploom
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

    accumulation: ClassVar[Accumulation] = "fast"

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


class EightInteger(Eight):
    """The dequantised weight in int8 with a scale for each row, by Warploom's int8 product."""

    accumulation = "promoted"

    @classmethod
    def of(cls, given: Quantised) -> EightInteger:
        """Quantised once more: ternary weights are exact."""
        return cls(by_rows(given.codes.weight().float(), torch.int8))


def only(name: str, codes: Codes, *formats: str) -> Codes:
    """The numbers of a weight, where they are in one of these formats."""
    if codes.format not in formats:
        raise RuntimeError(f"{name}: not for {codes.format} here")
    return codes
