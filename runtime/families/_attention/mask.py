"""The mask of an attention: which columns a row attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from warploom.errors import ProblemError
from warploom.generator.families._attention import UNBOUNDED
from warploom.runtime.families._attention.problem import Arguments, Extents, Window
from warploom.runtime.tensors import shown

_SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "dim", "total_q", "total_k")


@dataclass(frozen=True, slots=True)
class Band:
    """The columns that a row attends to: row + offset - left <= column <= row + offset + right.

    offset is seq_k - seq_q of each sequence where `bottom_right`, else 0. UNBOUNDED is no bound.
    """

    left: int = UNBOUNDED
    right: int = UNBOUNDED
    bottom_right: bool = False

    @property
    def mask(self) -> Literal["none", "causal", "window"]:
        """The mask of the kernel that computes it."""
        if self.left < UNBOUNDED:
            return "window"
        return "causal" if self.right < UNBOUNDED else "none"

    def shifted(self, sizes: Extents) -> tuple[int, int]:
        """Left and right as bounds of column - row, for the one length that all sequences have."""
        offset = sizes.seq_k - sizes.seq_q if self.bottom_right else 0
        left = self.left - offset if self.left < UNBOUNDED else UNBOUNDED
        return left, self.right + offset if self.right < UNBOUNDED else UNBOUNDED

    def fields(self, sizes: Extents) -> dict[str, Any]:
        """The fields of a kernel's problem that sizes and mask decide."""
        left, right = (self.left, self.right) if sizes.packed else self.shifted(sizes)
        return {
            **{name: getattr(sizes, name) for name in _SIZES},
            "left": left,
            "right": right,
            "bottom_right": sizes.packed and self.bottom_right,
        }


def band(call: Arguments, sizes: Extents) -> Band:
    """Return the mask of a call, without bounds that leave out nothing at these lengths.

    A window is relative to the diagonal that `causal` aligns, at the bottom right by default.
    """
    if call.causal not in (False, True, "top_left", "bottom_right"):
        raise ProblemError(
            f"causal {call.causal!r}",
            rule="must be False, True, 'top_left' or 'bottom_right'",
            fix="'bottom_right' is FlashAttention's alignment, 'top_left' that of torch",
        )
    if call.causal is True and not _equal_lengths(call, sizes):
        raise ProblemError(
            f"causal=True with seq_q {sizes.seq_q} and seq_k {sizes.seq_k}",
            rule="needs equal lengths (packed: one cu_seqlens for both), else it is ambiguous",
            fix="name the alignment: 'bottom_right' (FlashAttention) or 'top_left' (torch)",
        )
    left, right = _bounds(call.window)
    if call.causal:
        right = 0
    bottom_right = call.causal != "top_left"
    beside, above = (sizes.seq_q, sizes.seq_k) if bottom_right else (sizes.seq_k, sizes.seq_q)
    right = UNBOUNDED if right >= beside - 1 else right
    left = UNBOUNDED if left >= above - 1 else left
    return Band(left, right, bottom_right and min(left, right) < UNBOUNDED)


def _equal_lengths(call: Arguments, sizes: Extents) -> bool:
    if not sizes.packed:
        return sizes.seq_q == sizes.seq_k
    queries, keys = call.offsets
    return queries.data_ptr() == keys.data_ptr() and call.max_seqlen_q == call.max_seqlen_k


def _bounds(window: Window | None) -> tuple[int, int]:
    if window is None:
        return UNBOUNDED, UNBOUNDED
    if len(window) != 2 or any(
        bound is not None and (type(bound) is not int or bound < 0) for bound in window
    ):
        raise ProblemError(
            f"window {shown(window)}",
            rule="must be (left, right): how many columns beside the diagonal, ints of at least 0",
            fix="None is no bound, where FlashAttention has -1",
        )
    left, right = (UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in window)
    return left, right
