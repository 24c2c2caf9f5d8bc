"""What an attention's forward pass has to do: tiles of q, each in steps over tiles of k and v."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from warploom.generator.families._attention import AttentionShape
from warploom.generator.families._attention.shape import rows_of, scores
from warploom.generator.families.attention_forward.schedule import (
    AttentionOperation,
    AttentionSchedule,
)
from warploom.generator.shapes import Work as Roofline


@dataclass(frozen=True, slots=True)
class Work:
    """Tiles of all heads, and the steps of one.

    q_tiles   of one head
    heads     of all batches; packed: of one sequence's
    longest, mean, shortest   steps of the tiles that have most, of all, of those that have least
    bounded   steps of a tile, of the mean, that a mask's bound goes through
    dealt     tiles of all heads, with those that packed sequences could need, and do not
    """

    q_tiles: float
    heads: int
    longest: float
    mean: float
    shortest: float
    bounded: float
    dealt: float

    @property
    def tiles(self) -> float:
        """Of all heads."""
        return self.q_tiles * self.heads


def work_of(
    operation: AttentionOperation, schedule: AttentionSchedule, shape: AttentionShape
) -> Work:
    """Count the tiles, and their steps."""
    q, kv = schedule.tile
    packed = bool(shape.total_q)
    heads = shape.heads * (1 if packed else shape.batch)
    # A tile of each sequence ends with it.
    q_tiles, rows, columns = float(-(-shape.seq_q // q)), float(shape.seq_q), float(shape.seq_k)
    dealt = heads * q_tiles
    if packed:
        q_tiles = max(shape.batch, shape.total_q / q + shape.batch / 2)
        rows, columns = shape.packed_rows[0], shape.packed_columns[0]
        dealt = heads * (shape.total_q // q + shape.batch)
    if operation.mask == "none":
        mean = columns / kv + 0.5 if packed else float(-(-shape.seq_k // kv))
        mean = max(1.0, mean)
        return Work(q_tiles, heads, float(-(-shape.seq_k // kv)), mean, mean, 0, dealt)
    # A bound moves by q from one tile to the next: what of tiles of k and v lies beyond it.
    apart, diagonal = gcd(q, kv), shape.seq_k - shape.seq_q
    even = not packed or (shape.total_q, shape.seq_q) == (shape.total_k, shape.seq_k)

    def beyond(bound: int) -> float:
        return (bound % apart if even else apart / 2) + (kv - apart) / 2

    ramp, width = min(columns, rows), shape.window + q - 1
    seen = [columns, min(columns, columns - ramp / 2 + q / 2), min(columns, columns - ramp + q)]
    ends, bounded = beyond(-diagonal), q / kv + 1 - apart / kv
    if shape.window and width < seen[1]:
        seen = [min(float(width), one) for one in seen]
        ends += beyond(diagonal - shape.window + 1)
        bounded *= 2
    longest, mean, shortest = (max(1.0, (one + ends) / kv) for one in seen)
    return Work(q_tiles, heads, longest, mean, shortest, min(bounded, mean), dealt)


def work(operation: AttentionOperation, shape: AttentionShape) -> Roofline:
    """What a forward pass asks of any kernel, for a roofline: two MMAs of each score."""
    dim, dim_v = shape.dim, operation.dim_v or shape.dim
    rows, columns = rows_of(shape)
    k, v = operation.element_of("k"), operation.element_of("v")
    q_and_o = rows * shape.heads * (dim * k.bytes + 2 * dim_v)
    moved = q_and_o + columns * shape.kv_heads * (dim * k.bytes + dim_v * v.bytes)
    return Roofline(2.0 * (dim + dim_v) * scores(operation, shape), float(moved), k.bits)
