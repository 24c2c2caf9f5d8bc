"""The shared memory of a block: stages of both operands and of metadata, and what is stored."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families.sparse_gemm.schedule import (
    STAGE_BYTES,
    WORD_K,
    SparseGemmOperation,
    SparseGemmSchedule,
)

_ALIGNMENT = 1024  # bytes that swizzles of 128 bytes repeat in
_BARRIERS = 16  # bytes of both barriers of a stage
_WORD = 8  # bytes of metadata of a row of the weight and 64 of its columns
STAGED_PITCH = 144  # bytes between tokens of a tile that is stored: 64 rows, and 16 to part banks


@dataclass(frozen=True, slots=True)
class SparseGemmLayout:
    """What a block has."""

    operation: SparseGemmOperation
    schedule: SparseGemmSchedule

    @property
    def words(self) -> int:
        """Words of metadata of each thread, in 64 rows and a stage."""
        return self.operation.tile_k // WORD_K

    @property
    def chunk(self) -> int:
        """Tokens that are staged at a time."""
        return min(64, self.schedule.tokens)

    @property
    def staged_pitch(self) -> int:
        """Bytes from one token to the next, where a tile is staged to be stored."""
        return STAGED_PITCH

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of the launch."""
        schedule = self.schedule
        row = STAGE_BYTES // 2 + self.words * _WORD
        stage = schedule.tokens * STAGE_BYTES + schedule.rows * row + _BARRIERS
        staging = schedule.consumers * self.chunk * STAGED_PITCH
        return -(-(schedule.stages * stage + staging) // _ALIGNMENT) * _ALIGNMENT

    @property
    def registers(self) -> int:
        """What a consumer's thread is expected to hold: sums, and what it needs beside them."""
        return self.schedule.blocks * self.schedule.tokens // 2 + 40
