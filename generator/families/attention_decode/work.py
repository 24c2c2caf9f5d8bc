"""How many parts the work of one call has: kernels divide it, and hosts know bounds of it."""

from __future__ import annotations

from dataclasses import dataclass

from warploom.generator.elements import element
from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeProblem, DecodeShape
from warploom.generator.families.attention_decode.schedule import WARP_ROWS, DecodeSchedule
from warploom.generator.shapes import Work

# batch_invariant: an item of up to WHOLE_KEYS is one part, a longer one FEW_CHUNKS of up to
# LONG_KEYS each, or up to MOST_CHUNKS of more. More parts share one sequence among more blocks:
# 2048 keys in bf16 take 6.6 us by chunks of 256, and 9.1 by 1024. Each costs where sequences are
# many: 64 of 8192 keys take 512 us by chunks of 1024, and 538 by 512 (H200).
WHOLE_KEYS, LONG_KEYS, FEW_CHUNKS, MOST_CHUNKS = 512, 1024, 8, 16
# Of at least so many keys each; of as many as a whole item where bytes are decoded, or rows are
# many: 64 sequences of 2048 keys in e4m3 take 79.5 us by 512, 96.3 by 256.
LEAST_KEYS = 256
MOST_BLOCKS = 144  # for each that a multiprocessor has: workspaces are sized where no GPU is known

# More blocks than these have at least so many keys each: 2048 keys of 8 heads take 6.3 us by 64,
# and 7.0 by 128 (H200).
FEW_BLOCKS, KEYS_OF_BLOCK = 64, 256

# One sequence of 32768 keys of 8 heads takes 34.5 us by 128 blocks, and 36.0 by four more; eight of
# 8192 keys in e4m3 take 37.7, and 44.4 by four more (H200).
NEARLY_ALL = 16  # of so many blocks one may be left out

# Items of up to so many keys for each that there is are not shared: eight sequences of 512 keys and
# 8 heads take 9.0 us by 64 blocks, and 10.4 by 128, in e4m3 7.4 and 9.1 (H100).
KEYS_OF_ITEM = 16

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
    return min(MOST_BLOCKS * schedule.ctas_per_sm, count, worth_it)


def blocks(schedule: DecodeSchedule, problem: Extents, multiprocessors: int) -> int:
    """Blocks of the launch: those that run at a time, or fewer where there is less to do.

    Nearly all of them, where as many then share each item, or have as many items, and no block has
    parts of two; one for each item that is not worth sharing.
    """
    shared = items(schedule, problem)
    if schedule.cluster > 1:
        room = multiprocessors * schedule.ctas_per_sm // schedule.cluster
        return schedule.cluster * min(shared, max(1, room))
    count = min(multiprocessors * schedule.ctas_per_sm, most_blocks(schedule, problem))
    if not shared:
        return count
    if shared <= count and problem.seq_k <= KEYS_OF_ITEM * shared:
        return shared
    even = count - count % shared
    if shared > count:
        even = -(-shared // -(-shared // count))
        even = 0 if shared % even else even
    return even if (count - even) * NEARLY_ALL <= count else count


@dataclass(frozen=True, slots=True)
class Chunks:
    """What decides how a batch_invariant kernel cuts an item: tiles of keys."""

    whole: int  # an item of so many is one chunk
    least: int  # of a chunk of a longer one
    long: int  # of a chunk, where there are no more than FEW_CHUNKS of these


def chunks_of(operation: DecodeOperation, schedule: DecodeSchedule) -> Chunks:
    """How items are cut, whatever the call."""
    few_rows = operation.cache == "same" and schedule.rows == WARP_ROWS
    least = LEAST_KEYS if few_rows else WHOLE_KEYS
    whole, least, long = (max(1, n // schedule.keys) for n in (WHOLE_KEYS, least, LONG_KEYS))
    return Chunks(whole, least, long)


def chunks(operation: DecodeOperation, schedule: DecodeSchedule, problem: Extents) -> int:
    """Chunks of an item, of batch_invariant kernels, at most."""
    cut = chunks_of(operation, schedule)
    count = -(-problem.seq_k // schedule.keys)
    if count <= cut.whole:
        return 1
    most = FEW_CHUNKS if count <= FEW_CHUNKS * cut.long else MOST_CHUNKS
    return min(most, -(-count // cut.least))


def part_rows(schedule: DecodeSchedule, problem: DecodeProblem) -> int:
    """Rows of an item's partial result."""
    return min(schedule.rows, problem.rows)


def parts(operation: DecodeOperation, schedule: DecodeSchedule, problem: DecodeProblem) -> int:
    """Places for partial results: two of each block, or one of each chunk; none in a cluster."""
    if schedule.cluster > 1:
        return 0
    if operation.batch_invariant:
        return items(schedule, problem) * chunks(operation, schedule, problem)
    return 2 * most_blocks(schedule, problem)


def work(operation: DecodeOperation, shape: DecodeShape) -> Work:
    """What a call asks of any kernel, for a roofline: keys and values of full length, read once."""
    keys = shape.batch * shape.seq_k
    q = element(operation.element)
    cached = q.bytes if operation.cache == "same" else element(operation.cache).bytes
    factors = 4 * (operation.scales == "token")  # of each row of k, and of v
    moved = 2 * keys * shape.kv_heads * (operation.dim * cached + factors)
    moved += 2 * shape.batch * shape.seq_q * shape.heads * operation.dim * q.bytes
    flops = 4.0 * operation.dim * keys * shape.seq_q * shape.heads
    return Work(flops, float(moved), q.bits)
