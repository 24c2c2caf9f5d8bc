"""One call of attention: its extents, strides and bounds."""

from __future__ import annotations

from dataclasses import dataclass

# A `left` or `right` that bounds nothing: beyond any sequence, and a row can be added to it.
UNBOUNDED = 1 << 30
# Of packed maps: the steps that lead back around 2^64, since 2^30 times 2^34 is that.
BACK = 1 << 30

Strides = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """The extents of one call, and where its tensors lie: everything in elements.

    Strides are those of (batch, head, seq). Packed: `batch` counts sequences, `seq_q` and `seq_k`
    are the longest, `total_q` and `total_k` the packed extents (fixed: equal to seq_q and seq_k),
    and strides are (0, head, token). Row r attends to columns r - left to r + right: alignment is
    in these bounds already. Both lie in [-UNBOUNDED, UNBOUNDED], and UNBOUNDED is none.
    """

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    total_q: int
    total_k: int
    strides_q: Strides
    strides_k: Strides
    strides_v: Strides
    strides_o: Strides
    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bottom_right: bool = False  # packed: bounds move by seq_k - seq_q of each sequence
    # Of lists of tiles: whether each batch, and each query head, has its own.
    lists_of_batches: bool = False
    lists_of_heads: bool = False
    alibi_batch: int = 0  # of slopes: the stride of batches
    strides_bias: Strides = (0, 0, 0)  # columns are contiguous
    strides_mask: Strides = (0, 0, 0)
    # Of q, k and v of 8 bits: those of the scales of (batch, head, row or block of 128 keys).
    strides_q_descale: Strides = (0, 0, 0)
    strides_k_descale: Strides = (0, 0, 0)
    strides_v_descale: Strides = (0, 0, 0)
    q_descale_sharing: int = 1  # query heads that have one of these
    dim_v: int = 0  # of v and o; 0: `dim`
