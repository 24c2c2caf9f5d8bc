"""One call of the backward: the forward's problem, the gradients, and the tiles of both."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families._attention.problem import AttentionProblem, Strides
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackwardProblem(AttentionProblem):
    """The forward's problem, and where the gradients lie: strides of (batch, head, seq)."""

    strides_do: Strides
    strides_dq: Strides
    strides_dk: Strides
    strides_dv: Strides
    strides_ds: Strides = (0, 0, 0)  # of a bias's gradient, by scores; columns are contiguous
    scores: tuple[int, int, int, int] = (0, 0, 0, 0)  # its extents: batch, head, row, column


@dataclass(frozen=True, slots=True)
class Tiles:
    """How many tiles there are of one head, and heads in all; packed: as many as there can be.

    There, what follows the last sequence counts as one more.
    """

    q_tiles: int
    kv_tiles: int
    all_heads: int
    all_kv_heads: int

    @property
    def all_q_tiles(self) -> int:
        """Q tiles of all heads."""
        return self.q_tiles * self.all_heads

    @property
    def all_kv_tiles(self) -> int:
        """Kv tiles of all kv heads."""
        return self.kv_tiles * self.all_kv_heads


def tiles_of(spec: AttentionBackwardSpec, problem: AttentionBackwardProblem) -> Tiles:
    """The tiles of one call."""
    operation, schedule = spec.operation, spec.schedule
    if operation.lengths == "packed":
        return Tiles(
            q_tiles=problem.total_q // schedule.q_tile + problem.batch + 1,
            kv_tiles=problem.total_k // schedule.kv_tile + problem.batch + 1,
            all_heads=problem.heads,
            all_kv_heads=problem.kv_heads,
        )
    return Tiles(
        q_tiles=-(-problem.seq_q // schedule.q_tile),
        kv_tiles=-(-problem.seq_k // schedule.kv_tile),
        all_heads=problem.heads * problem.batch,
        all_kv_heads=problem.kv_heads * problem.batch,
    )
