"""Which schedule a decoding attention gets that nothing was tuned for."""

from __future__ import annotations

from dataclasses import replace

from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeShape
from warploom.generator.families.attention_decode.schedule import WARP_ROWS, DecodeSchedule
from warploom.generator.families.table import Feature, Table

_MASKS = ("none", "causal", "window")


class DecodeTable(Table[DecodeOperation, DecodeSchedule, DecodeShape]):
    """Schedules of classes of rows, of the bits of the cache, and of how many keys there are."""

    kinds = ("bits",)

    def features(self, operation: DecodeOperation, shape: DecodeShape) -> dict[str, Feature]:
        """Of the cache's elements, rows of q that share keys, keys of a sequence and of all.

        heads_of_all are kv heads of all sequences.
        """
        return {
            "dim": operation.dim,
            "bits": operation.kv.bits,
            "page": operation.page,
            "q_rows": shape.rows,
            "seq_k": shape.seq_k,
            "heads_of_all": shape.batch * shape.kv_heads,
            "keys_of_all": shape.seq_k * shape.batch * shape.kv_heads,
            "batch_invariant": operation.batch_invariant,
        }

    def uses_near_records(self, operation: DecodeOperation) -> bool:
        """None does: with each of 205 shapes on an H200 left out of the records in turn, near
        tuned configs chose kernels 2 % slower than the best, up to 1.4 times, and the table 0.2 %.
        The best cluster depends on the KV heads of all sequences, of which nearness knows nothing.
        """
        return False

    def suits(self, schedule: DecodeSchedule, shape: DecodeShape) -> bool:
        """Not where more than half of the rows that are multiplied are none."""
        return schedule.rows == WARP_ROWS or 2 * shape.rows >= schedule.rows

    def serves(self, have: DecodeOperation, wanted: DecodeOperation) -> bool:
        """A wider mask computes the same: bounds are run-time."""
        wider = _MASKS.index(have.mask) >= _MASKS.index(wanted.mask)
        return wider and replace(wanted, mask=have.mask) == have
