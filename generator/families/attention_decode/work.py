"""How many parts the work of one call has: kernels divide it, and hosts know bounds of it."""

from __future__ import annotations

from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeProblem, DecodeShape
from warploom.generator.families.attention_decode.schedule import DecodeSchedule

# batch_invariant: the parts of an item have at least so many keys, and there are so many at most.
LEAST_KEYS, MOST_CHUNKS = 512, 16
MOST_BLOCKS = 144  # for each that a multiprocessor has: workspaces are sized where no GPU is known

# More blocks than these have at least so many keys each: 2048 keys of 8 heads take 6.3 us by 64,
# and 7.0 by 128 (H200).
FEW_BLOCKS, KEYS_OF_BLOCK = 64, 256

# One sequence of 32768 keys of 8 heads takes 34.5 us by 128 blocks, and 36.0 by four more; eight of
# 8192 keys in e4m3 take 37.7, and 44.4 by four more (H200).
NEARLY_ALL = 16  # of so many blocks one may be left out

Extents = DecodeProblem | DecodeShape  # of which the work of a call is a function


def row_tiles(schedule: DecodeSchedule, rows: int) -> int:
    """Tiles of the rows that share a kv head's keys, of one sequence: at most."""
    return -(-rows // schedule.rows)


def items(schedule: DecodeSchedule, problem: Extents) -> int:
    """Tiles of rows of all kv heads and sequences."""
    return problem.batch * problem.kv_heads * row_tiles(schedule, problem.rows)


def tiles(schedule: DecodeSchedule, problem: Extents) -> int:
    """Steps over keys of all items, at most."""
    return items(schedule, problem) * max(1, -(-problem.seq_k // schedule.keys))


def most_blocks(schedule: DecodeSchedule, problem: Extents) -> int:
    """Blocks of a launch on any GPU: many of few keys would wait for each other's parts."""
    count = tiles(schedule, problem)
    worth_it = max(FEW_BLOCKS, count * schedule.keys // KEYS_OF_BLOCK)
    return min(MOST_BLOCKS * schedule.blocks, count, worth_it)


def blocks(schedule: DecodeSchedule, problem: Extents, multiprocessors: int) -> int:
    """Blocks of the launch: those that run at a time, or fewer where there is less to do.

    Nearly all of them, where as many then share each item, or have as many items, and no block has
    parts of two.
    """
    count = min(multiprocessors * schedule.blocks, most_blocks(schedule, problem))
    shared = items(schedule, problem)
    if not shared:
        return count
    even = count - count % shared
    if shared > count:
        even = -(-shared // -(-shared // count))
        even = 0 if shared % even else even
    return even if (count - even) * NEARLY_ALL <= count else count


def least_tiles(schedule: DecodeSchedule) -> int:
    """Tiles of a chunk, of batch_invariant kernels, at least."""
    return max(1, LEAST_KEYS // schedule.keys)


def chunks(schedule: DecodeSchedule, problem: Extents) -> int:
    """Chunks of an item, of batch_invariant kernels, at most."""
    count = -(-problem.seq_k // schedule.keys)
    return max(1, min(MOST_CHUNKS, -(-count // least_tiles(schedule))))


def part_rows(schedule: DecodeSchedule, problem: DecodeProblem) -> int:
    """Rows of an item's partial result."""
    return min(schedule.rows, problem.rows)


def parts(operation: DecodeOperation, schedule: DecodeSchedule, problem: DecodeProblem) -> int:
    """Places for partial results: two of each block, or one of each chunk."""
    if operation.batch_invariant:
        return items(schedule, problem) * chunks(schedule, problem)
    return 2 * most_blocks(schedule, problem)
