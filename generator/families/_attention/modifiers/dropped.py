"""Dropout: weights are dropped behind the softmax."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from warploom.generator.families._attention.modifiers.modifier import (
    MOST_SCORES_REGISTERS,
    Modifier,
)
from warploom.generator.parameters import Field, pointer, scalar

# Of the forward pass: without overlap; where any score may be left out.
FORWARD_SERIAL_REGISTERS, FORWARD_HIDES_REGISTERS = 40, 4
# Of its tiles beyond 112 columns, beside 32 bits, or a mask and one thing more; beyond 96 beside 32
# bits and one thing more, where a mask takes the other, too.
FORWARD_STAGED_REGISTERS, FORWARD_WIDE_MASKED_REGISTERS = 24, 8
FORWARD_PACKED_MASKED_REGISTERS = 4  # of tiles beyond 96 columns
# Of the backward pass.
REGISTERS, OVERLAP_REGISTERS, PARTS_REGISTERS = 16, 8, 12
CLUSTER_REGISTERS, MASK_REGISTERS, TALL_REGISTERS = 8, 8, 12
BIAS_REGISTERS = 16  # of 96 rows
ROWS_CAPPED_REGISTERS = 8  # of a pair with overlap that shares rows
LISTED_REGISTERS = 8  # where rows of a pair do not leave room
# Without overlap: words, too, are not live with what changes scores; but where dq is added at once,
# or rows are shared, a cap takes more beside what hides.
SERIAL_SCORES_REGISTERS = 20
CAPPED_REGISTERS = {"direct": 16, "bulk": 8}


class Dropped(Modifier):
    """Drop weights, and divide those that are kept by the probability with which they are."""

    name = "dropout"
    doc = (
        "dropout of the softmax's weights: those that are not dropped are divided by "
        "`keep`, the probability to be kept"
    )
    place = 60
    feature = True

    def weight_parameters(self) -> Sequence[Field[Any]]:
        return [
            pointer(
                "dropout_state", "int64_t", "[2]: what is drawn for each position follows from it"
            ),
            scalar("keep", "probability that a weight is kept, a multiple of 1 / 65536"),
        ]

    def forward_registers(self, schedule: Any) -> int:  # noqa: ANN401
        registers = 0 if schedule.overlap else FORWARD_SERIAL_REGISTERS
        registers += FORWARD_HIDES_REGISTERS if self.operation.hides else 0
        return registers + self._beside_scores(schedule.kv_tile)

    def _beside_scores(self, columns: int) -> int:
        """Registers beside scores that are changed, of wide tiles."""
        operation = self.operation
        alone = not operation.alibi and operation.mask != "window"
        masked, wide = operation.masked, operation.bias == "fp32"
        if operation.bias == "none" and (alone or not masked):
            crowded = columns > 96 and masked and operation.lengths == "packed"
            return FORWARD_PACKED_MASKED_REGISTERS if crowded else 0
        if wide and (masked or not alone):
            more = FORWARD_WIDE_MASKED_REGISTERS if masked else 0
            return FORWARD_STAGED_REGISTERS + more if columns > 96 else 0
        return FORWARD_STAGED_REGISTERS if columns > 112 and (masked or wide) else 0

    def backward_registers(self, schedule: Any, q_rows: int, columns: int) -> int:  # noqa: ANN401
        operation = self.operation
        shares_rows = schedule.cluster_split == "rows"
        direct = schedule.accumulate == "direct"
        masked = operation.mask == "window" or (operation.mask == "causal" and not direct)
        pair, tall = schedule.overlap and shares_rows, q_rows > 96
        serial = not schedule.overlap and (direct or shares_rows)
        more = (
            (schedule.overlap, OVERLAP_REGISTERS),
            (columns < operation.dim, PARTS_REGISTERS),
            (schedule.cluster > 1, CLUSTER_REGISTERS),
            (masked, MASK_REGISTERS),
            (tall, TALL_REGISTERS * (2 if operation.hides else 1)),
            (q_rows == 96 and operation.bias != "none", BIAS_REGISTERS),
            (pair and operation.caps, ROWS_CAPPED_REGISTERS),
            (operation.blocks and (schedule.overlap or not shares_rows), LISTED_REGISTERS),
            (serial and operation.caps and operation.hides, CAPPED_REGISTERS[schedule.accumulate]),
        )
        return REGISTERS + sum(registers for applies, registers in more if applies)

    def most_score_registers(self, schedule: Any) -> int:  # noqa: ANN401
        return MOST_SCORES_REGISTERS if schedule.overlap else SERIAL_SCORES_REGISTERS
