"""Which schedule a decoding attention gets that nothing was tuned for."""

from __future__ import annotations

from warploom.generator.families.attention_decode.operation import DecodeOperation
from warploom.generator.families.attention_decode.problem import DecodeShape
from warploom.generator.families.attention_decode.schedule import DecodeSchedule
from warploom.generator.families.table import Feature, Table


class DecodeTable(Table[DecodeOperation, DecodeSchedule, DecodeShape]):
    """Schedules of classes of rows, of the bytes of a key, and of how many keys there are."""

    kinds = ("row_bytes",)

    def features(self, operation: DecodeOperation, shape: DecodeShape) -> dict[str, Feature]:
        """Bytes of a row of k, rows of q that share keys, keys of a sequence, and of all heads."""
        return {
            "row_bytes": operation.dim * operation.kv.bytes,
            "rows": shape.rows,
            "seq_k": shape.seq_k,
            "keys_of_all": shape.seq_k * shape.batch * shape.kv_heads,
            "page": operation.page,
        }
