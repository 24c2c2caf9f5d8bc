"""GEMM as a user names it: the operation (which result) and the schedule (how it is computed).

Layouts: `row` and `col` of A [M, K] and of B [K, N]; a torch weight [N, K] is a B `col`. D and C
are row-major.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from warploom.generator.elements import Element, element
from warploom.generator.epilogue import EpilogueStep

Input = Literal["fp16", "bf16", "e4m3", "e5m2", "int8"]
Output = Literal["fp16", "bf16", "fp32", "int32"]
Layout = Literal["row", "col"]

WARPGROUP = 128  # threads
WGMMA_M = 64  # rows of one wgmma


@dataclass(frozen=True, slots=True)
class GemmOperation:
    """What is computed. Accumulation is fp32, or int32 for int8 operands; then the epilogue."""

    a: Input
    b: Input
    d: Output
    layout_a: Layout = "row"
    layout_b: Layout = "col"
    epilogue: tuple[EpilogueStep, ...] = ()
    family: Literal["gemm"] = "gemm"

    @property
    def accumulator(self) -> Element:
        """The element type that the tensor core accumulates in."""
        return element("int32" if element(self.a).is_integer else "fp32")

    @property
    def tokens(self) -> tuple[str, ...]:
        """The operation in a kernel's name."""
        steps = tuple(step.token for step in self.epilogue)
        return (self.a, self.b, self.d, self.layout_a, self.layout_b, *steps)


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """How it is computed.

    roles        cooperative: the consumers share a tile, each taking its share of the rows;
                 pingpong: each has a tile of its own, one's epilogue under the other's products
    tile         (m, n, k) of one block; k is 128 bytes
    cluster      blocks along (m, n) that multicast what they share
    consumers    warpgroups that issue wgmma, beside one producer warpgroup that issues TMA
    stages       k tiles in flight
    raster       the direction in which consecutive tiles advance inside a band of `group` tiles
    store        tma: staged through shared memory, operands of the epilogue read in pairs;
                 direct: predicated, one element at a time, for any pitch and address
    """

    tile: tuple[int, int, int]
    stages: int
    cluster: tuple[int, int] = (1, 1)
    consumers: Literal[1, 2] = 2
    raster: Literal["along_m", "along_n"] = "along_m"
    group: int = 8
    store: Literal["tma", "direct"] = "tma"
    roles: Literal["cooperative", "pingpong"] = "cooperative"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The schedule in a kernel's name."""
        return (
            self.roles,
            "x".join(map(str, self.tile)),
            "cluster" + "x".join(map(str, self.cluster)),
            f"consumers{self.consumers}",
            f"stages{self.stages}",
            self.raster,
            f"group{self.group}",
            self.store,
        )

    @property
    def threads(self) -> int:
        """Threads of one block."""
        return WARPGROUP * (1 + self.consumers)

    @property
    def cluster_size(self) -> int:
        """Blocks of one cluster."""
        return self.cluster[0] * self.cluster[1]

    @property
    def sharing(self) -> int:
        """Consumers that share one tile."""
        return self.consumers if self.roles == "cooperative" else 1
