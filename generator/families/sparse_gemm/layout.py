"""The shared memory of a block: stages of both operands and of metadata, and what is stored."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.families.sparse_gemm.schedule import TILE_K, SparseGemmSchedule

_ALIGNMENT = 1024  # bytes that swizzles of 128 bytes repeat in
_BARRIERS = 16  # bytes of both barriers of a stage
_VALUE = 2  # bytes of an element
_WORDS = 8  # bytes of metadata of a row of the weight, in a stage
STAGED_PITCH = 144  # bytes between tokens of a tile that is stored: 64 rows, and 16 to part banks


@dataclass(frozen=True, slots=True)
class SparseGemmLayout:
    """What a block has."""

    schedule: SparseGemmSchedule

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
        row = TILE_K // 2 * _VALUE + _WORDS
        stage = schedule.tokens * TILE_K * _VALUE + schedule.rows * row + _BARRIERS
        staging = schedule.consumers * self.chunk * STAGED_PITCH
        return -(-(schedule.stages * stage + staging) // _ALIGNMENT) * _ALIGNMENT

    @property
    def registers(self) -> int:
        """What a consumer's thread is expected to hold: sums, and what it needs beside them."""
        return self.schedule.blocks * self.schedule.tokens // 2 + 40
