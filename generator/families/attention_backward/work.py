"""What the backward pass of attention asks of any kernel, for a roofline."""

from __future__ import annotations

from warploom.generator.families._attention.shape import AttentionShape, rows_of, scores
from warploom.generator.families.attention_backward.schedule import AttentionBackwardOperation
from warploom.generator.shapes import Work


def work(operation: AttentionBackwardOperation, shape: AttentionShape) -> Work:
    """Count five MMAs of each score: q k^T, dq and dk of q's dimension, dp and dv of v's."""
    dim, dim_v = shape.dim, operation.dim_v or shape.dim
    rows, columns = rows_of(shape)
    moved = 2 * (2 * rows * shape.heads + 2 * columns * shape.kv_heads) * (dim + dim_v)
    flops = 2.0 * (3 * dim + 2 * dim_v) * scores(operation, shape)
    return Work(flops, float(moved + 4 * rows * shape.heads))
