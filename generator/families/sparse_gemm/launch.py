"""A call's only launch: persistent blocks, and what each of its parameters holds."""

from __future__ import annotations

from functools import lru_cache

from warploom.generator import launches as data
from warploom.generator import limits
from warploom.generator.elements import element
from warploom.generator.families.sparse_gemm.layout import SparseGemmLayout
from warploom.generator.families.sparse_gemm.schedule import (
    BLOCK,
    GROUP,
    TILE_K,
    SparseGemmOperation,
    SparseGemmSchedule,
    SparseGemmSpec,
)
from warploom.generator.families.sparse_gemm.shape import SparseGemmProblem
from warploom.generator.launches import DeviceLimits, Launch
from warploom.generator.parameters import (
    Field,
    ParameterBlock,
    block,
    int32,
    int64,
    pointer,
    tensor_map,
)
from warploom.generator.tensor_maps import TensorMap


class AtLaunch(data.AtLaunch[SparseGemmOperation, SparseGemmSchedule, SparseGemmProblem]):
    """What the parameters of a launch are functions of."""

    @property
    def tiles(self) -> int:
        """Tiles of y."""
        problem, schedule = self.problem, self.schedule
        return -(-problem.m // schedule.tokens) * -(-problem.n // schedule.rows)

    @property
    def x_map(self) -> TensorMap:
        """x: a row of 128 bytes of each token."""
        problem, kind = self.problem, element(self.operation.element)
        pitch = problem.x_pitch * kind.bytes
        box = (TILE_K, self.schedule.tokens)
        return TensorMap("x", kind, (problem.k, problem.m), (pitch,), box, 128)

    @property
    def values_map(self) -> TensorMap:
        """The values of the weight: a row of 64 bytes of each of its rows."""
        problem, kind = self.problem, element(self.operation.element)
        half = problem.k // 2
        box = (TILE_K // 2, self.schedule.rows)
        return TensorMap("values", kind, (half, problem.n), (half * kind.bytes,), box, 64)


@lru_cache(maxsize=1024)
def parameters(spec: SparseGemmSpec) -> ParameterBlock[AtLaunch]:
    """The parameter block: both maps, metadata, bias, y and the extents."""
    cpp = element(spec.operation.element).cpp
    fields: list[Field[AtLaunch]] = [
        tensor_map("x_map", "x [m, k]", lambda at: at.x_map),
        tensor_map("values_map", "values of W [n, k / 2]", lambda at: at.values_map),
        pointer("metadata", "const uint8_t", "[n / 64][k / 64][128] words, rounded up"),
        pointer("y", cpp, "[m][y_pitch]"),
        int64("y_pitch", "elements between rows of y", lambda at: at.problem.y_pitch),
        int32("m", "rows of x", lambda at: at.problem.m),
        int32("n", "rows of W", lambda at: at.problem.n),
        int32("k_tiles", "of 64 columns", lambda at: -(-at.problem.k // TILE_K)),
    ]
    if spec.operation.bias:
        fields.append(pointer("bias", f"const {cpp}", "[n]"))
    return block(fields)


def launches(
    spec: SparseGemmSpec, problem: SparseGemmProblem, device: DeviceLimits
) -> list[Launch]:
    """One launch. No extent may be 0; ProblemError for extents beyond 32 bits."""
    at, schedule = AtLaunch(spec, problem, device), spec.schedule
    limits.refuse_beyond(
        {
            f"m {problem.m}": problem.m + schedule.tokens,
            f"n {problem.n}": problem.n + schedule.rows,
            f"k {problem.k}": problem.k + TILE_K,
            f"m {problem.m}, n {problem.n}: tiles": at.tiles * GROUP + device.multiprocessors,
            f"n {problem.n}, k {problem.k}: words of metadata": (
                -(-problem.n // BLOCK) * -(-problem.k // TILE_K)
            ),
        }
    )
    return [
        Launch(
            entry=spec.name,
            grid=min(at.tiles, device.multiprocessors),
            block=schedule.threads,
            cluster=1,
            shared_bytes=SparseGemmLayout(schedule).shared_bytes,
            parameters=parameters(spec).values(at),
            early=True,
        )
    ]
