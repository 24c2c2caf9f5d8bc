"""Which schedule an attention gets that nothing was tuned for: the first legal one of its class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator.families._attention.modifiers import MODIFIERS
from warploom.generator.families._attention.operation import Operation
from warploom.generator.families._attention.shape import AttentionShape
from warploom.generator.families.table import Feature, ScheduleT, Table
from warploom.generator.shapes import LARGEST

OperationT = TypeVar("OperationT", bound=Operation, default=Any)

_MASKS = ("none", "causal", "window")  # each can compute those before it


class AttentionTable(Table[OperationT, ScheduleT, AttentionShape]):
    """What the tables of both passes have in common."""

    kinds = ("dim",)

    def features(self, operation: OperationT, shape: AttentionShape) -> dict[str, Feature]:
        """Dimension, type of q, mask, lengths, modifiers, seq, query heads of a kv head.

        Where v has a dimension of its own, both are one feature, such as 192x128.
        """
        return {
            "dim": f"{operation.dim}x{operation.dim_v}" if operation.dim_v else operation.dim,
            "scores": operation.element_of("q").name,
            "mask": operation.mask,
            "lengths": operation.lengths,
            "hides": operation.hides,
            "seq": max(shape.seq_q, shape.seq_k),
            "sharing": shape.sharing,
            **{kind.name: getattr(operation, kind.name) for kind in MODIFIERS if kind.feature},
        }

    def modelled(self, operation: OperationT) -> bool:
        """Sweeps had few of the modifiers."""
        sampled = not (operation.eight or operation.dim_v)
        return sampled and all(modifier.modelled for modifier in operation.modifiers)

    def reason(self, operation: OperationT, shape: AttentionShape, order: tuple[float, ...]) -> str:
        """Why the table has the schedule that came first."""
        low, high = self.first(operation, shape)["seq"]
        return f"default table: first of its class, sequences {lengths(low, high)}"

    def serves(self, have: OperationT, wanted: OperationT) -> bool:
        """A wider mask or head dimension computes the same: bounds and zeros are run-time."""
        return bool(
            have.dim >= wanted.dim
            and have.value_dim >= wanted.value_dim
            and _MASKS.index(have.mask) >= _MASKS.index(wanted.mask)
            and replace(wanted, dim=have.dim, dim_v=have.dim_v, mask=have.mask) == have
        )


def lengths(low: int, high: int) -> str:
    """A class's range of lengths, in words; the largest there can be is no bound."""
    if high >= LARGEST:
        return f"of {low} or more" if low else "of any length"
    return f"of {low} to {high}" if low else f"of up to {high}"
