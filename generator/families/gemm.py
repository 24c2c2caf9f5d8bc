"""GEMM: D[m, n] = epilogue(A[m, k] B[k, n]), for Hopper's TMA and wgmma.

The family's operation, schedule, rules and kernel name. What a kernel needs at launch is in
`gemm_launch.py`. Layouts: `row` and `col` of A [M, K] and of B [K, N]; a torch weight [N, K] is a
B `col`. D and C are row-major.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from warploom.generator import rules
from warploom.generator.architectures import ARCHITECTURES, Architecture, architecture
from warploom.generator.elements import Element, element
from warploom.generator.epilogue import STEPS, EpilogueStep, legal
from warploom.generator.specification import KernelSpec
from warploom.generator.tensor_maps import OperandTile, operand_reason, operand_tile, widest_span

Input = Literal["fp16", "bf16", "e4m3", "int8"]
Output = Literal["fp16", "bf16", "fp32", "int32"]
Layout = Literal["row", "col"]

WARPGROUP = 128  # threads
WGMMA_M = 64  # rows of one wgmma
STORE_BUFFERS = 2  # staging buffers per consumer: one being filled, one being stored
PRODUCER_REGISTERS = 40  # with two consumers: 40 + 2 * 232 is the 504 that 384 threads may hold
CONSUMER_REGISTERS = {1: 255, 2: 232}


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


@dataclass(frozen=True, slots=True)
class GemmLayout:
    """Shared memory of one block, derived from operation and schedule. Bytes throughout."""

    a: OperandTile
    b: OperandTile
    chunk_columns: int  # columns of D that are finished, staged and stored at a time
    store_span: int  # bytes of a row of the staging buffers, 64 rows tall; 0: none
    stages: int
    consumers: int

    @property
    def stage_bytes(self) -> int:
        """Operand bytes of one stage: what its full barrier expects."""
        return self.a.bytes + self.b.bytes

    @property
    def store_bytes(self) -> int:
        """All staging buffers of D."""
        return self.consumers * STORE_BUFFERS * WGMMA_M * self.store_span

    @property
    def fixed_bytes(self) -> int:
        """Everything but the stages, with room to align the base to 1024."""
        return -(-self.store_bytes // 1024) * 1024

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch: stages, staging, a pair of barriers a stage."""
        stages = self.stages * (self.stage_bytes + 2 * 8)
        return -(-(self.fixed_bytes + stages) // 1024) * 1024


def gemm_layout(operation: GemmOperation, schedule: GemmSchedule) -> GemmLayout:
    """Lay out shared memory for a schedule, legal or not."""
    m, n, k = schedule.tile
    cluster_m, cluster_n = schedule.cluster
    d_bits = element(operation.d).bits
    span = widest_span(n, d_bits)
    return GemmLayout(
        a=operand_tile(
            element(operation.a),
            k_major=operation.layout_a == "row",
            extent=m,
            tile_k=k,
            slices=cluster_n,
        ),
        b=operand_tile(
            element(operation.b),
            k_major=operation.layout_b == "col",
            extent=n,
            tile_k=k,
            slices=cluster_m,
        ),
        chunk_columns=span * 8 // d_bits,
        store_span=span if schedule.store == "tma" else 0,
        stages=schedule.stages,
        consumers=schedule.consumers,
    )


def operation_reasons(operation: GemmOperation) -> list[str]:
    """Why the operation is not legal; empty when it is."""
    a, b, d = element(operation.a), element(operation.b), element(operation.d)
    plain_int32 = a.is_integer and not operation.epilogue
    return rules.broken(
        [
            None if a == b else f"b {b.name}: is of the type of a, {a.name}",
            legal(operation.epilogue),
            None
            if d.name != "int32" or plain_int32
            else f"d int32 from {a.name} with {len(operation.epilogue)} epilogue steps: "
            "int32 is for int8 operands without epilogue",
        ]
    )


def schedule_reasons(
    arch: Architecture, operation: GemmOperation, schedule: GemmSchedule
) -> list[str]:
    """Why the schedule does not fit the operation on `arch`; empty when it does."""
    m, n, k = schedule.tile
    bits = element(operation.a).bits
    first = rules.broken(
        [
            rules.one_of("tile m", m, (64, 128, 256)),
            rules.wgmma_n("tile n", n, integer=element(operation.a).is_integer),
            rules.one_of("tile k", k, (1024 // bits,)),
            rules.one_of("cluster", schedule.cluster, ((1, 1), (2, 1), (1, 2))),
            rules.one_of("consumers", schedule.consumers, (1, 2)),
            None if 1 <= schedule.stages <= 32 else f"stages {schedule.stages}: is 1 to 32",
            None if 1 <= schedule.group <= 1024 else f"group {schedule.group}: is 1 to 1024",
            rules.one_of("roles", schedule.roles, ("cooperative", "pingpong")),
            None
            if schedule.roles == "cooperative" or schedule.consumers == 2
            else f"roles pingpong with {schedule.consumers} consumer: takes two",
        ]
    )
    if first:  # what follows would divide by them
        return first
    layout = gemm_layout(operation, schedule)
    rows = rules.multiple_of("tile m", m, WGMMA_M * schedule.sharing)
    return rules.broken(
        [
            rows and f"{rows} for {schedule.sharing} consumers sharing it",
            operand_reason("a", layout.a),
            operand_reason("b", layout.b),
            rules.fits_registers(
                m * n // (WARPGROUP * schedule.sharing), CONSUMER_REGISTERS[schedule.consumers]
            ),
            None if schedule.stages >= 2 else f"stages {schedule.stages}: TMA needs at least 2",
            rules.fits_shared(layout.shared_bytes, arch),
        ]
    )


def complete(arch: str, operation: GemmOperation, fields: Mapping[str, Any]) -> GemmSchedule:
    """Make a schedule of `fields`; `stages: auto` becomes as many as fill shared memory."""
    if fields.get("stages", "auto") != "auto":
        return GemmSchedule(**fields)
    schedule = GemmSchedule(**{**fields, "stages": 2})
    layout = gemm_layout(operation, schedule)
    room = architecture(arch).shared_bytes // 1024 * 1024 - layout.fixed_bytes
    stages = room // max(1, layout.stage_bytes + 2 * 8)
    return replace(schedule, stages=max(2, min(32, stages)))


_WORDS = {
    "arch": "|".join(row.token for row in ARCHITECTURES.values()),
    "a": "fp16|bf16|e4m3|int8",
    "d": "fp16|bf16|fp32|int32",
    "layout": "row|col",
    "step": "|".join(sorted((step.token for step in STEPS), key=len, reverse=True)),
}
_NAME = re.compile(
    r"gemm_(?P<arch>{arch})_(?P<a>{a})_(?P<b>{a})_(?P<d>{d})_(?P<layout_a>{layout})"
    r"_(?P<layout_b>{layout})(?P<epilogue>(?:_(?:{step}))*)_(?P<roles>cooperative|pingpong)"
    r"_(?P<tile>\d+x\d+x\d+)_cluster(?P<cluster>\d+x\d+)_consumers(?P<consumers>\d)"
    r"_stages(?P<stages>\d+)_(?P<raster>along_[mn])_group(?P<group>\d+)_(?P<store>tma|direct)"
    r"_[0-9a-f]{{8}}".format(**_WORDS)
)
_STEP = re.compile(rf"_({_WORDS['step']})")


def parse_name(name: str) -> KernelSpec | None:
    """Return the spec with the fields that `name` shows, or None when it is no GEMM's name."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    token: dict[str, Any] = match.groupdict()
    by_token = {step.token: step for step in STEPS}
    arch = next(row.name for row in ARCHITECTURES.values() if row.token == token["arch"])
    operation = GemmOperation(
        **{field: token[field] for field in ("a", "b", "d", "layout_a", "layout_b")},
        epilogue=tuple(by_token[word] for word in _STEP.findall(token["epilogue"])),
    )
    fields: dict[str, Any] = {
        **{field: token[field] for field in ("raster", "store", "roles")},
        **{field: int(token[field]) for field in ("stages", "consumers", "group")},
        **{field: tuple(map(int, token[field].split("x"))) for field in ("tile", "cluster")},
    }
    return KernelSpec(arch, operation, GemmSchedule(**fields))
