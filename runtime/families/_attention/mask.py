"""The mask of an attention: which columns a row attends to, and what kernels are chosen by it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from warploom.errors import ProblemError
from warploom.generator.families._attention import UNBOUNDED, AttentionShape
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.modifiers.modifier import Fields
from warploom.runtime.families._attention.problem import Arguments, Extents, Window
from warploom.runtime.tensors import shown

OperationT = TypeVar("OperationT", bound=Operation)
_SIZES = ("batch", "heads", "kv_heads", "seq_q", "seq_k", "dim", "total_q", "total_k", "dim_v")


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


_WHOLE = Band()


def band(call: Arguments, sizes: Extents) -> Band:
    """Return the mask of a call, without bounds that leave out nothing at these lengths.

    A mask of blocks is checked here: with it there are no bounds.

    A window is relative to the diagonal that `causal` aligns, at the bottom right by default.
    """
    if call.block_mask is not None:
        _check_blocks(call, sizes)
        return _WHOLE
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


def refuse_beside_blocks(call: Arguments) -> None:
    """Raise ProblemError for what no kernel has beside lists of blocks."""
    for name in call.further:
        if name != "dropout_state":
            raise ProblemError(
                f"{name} with block_mask", rule="no kernel has both", fix="leave out one of them"
            )


def _check_blocks(call: Arguments, sizes: Extents) -> None:
    """Raise ProblemError for a mask of blocks beside bounds, or of another size."""
    mask: BlockMask = call.block_mask
    beside = {
        "causal": call.causal,
        "window": call.window,
        "cu_seqlens_q": call.cu_seqlens_q,
    }
    for name, value in beside.items():
        if value is not None and value is not False:
            raise ProblemError(
                f"{name} with block_mask",
                rule="must be left out: a block_mask alone determines which keys a row attends to",
                fix="add the condition to its mask_mod",
            )
    refuse_beside_blocks(call)
    batch, heads = mask.places.shape[:2]
    wanted = (sizes.seq_q, sizes.seq_k)
    if (mask.seq_q, mask.seq_k) != wanted or not (
        batch in (1, sizes.batch) and heads in (1, sizes.heads)
    ):
        raise ProblemError(
            f"block_mask {[batch, heads, mask.seq_q, mask.seq_k]}",
            rule=f"must be of {sizes.seq_q} rows and {sizes.seq_k} columns, of {sizes.batch} "
            f"batches or 1, and of {sizes.heads} heads or 1",
            fix="make it for these lengths: seq_q and seq_k of warploom.block_mask",
        )
    if mask.places.device != call.q.device:
        raise ProblemError(
            f"block_mask on {mask.places.device}",
            rule=f"must be on the device of q, {call.q.device}",
            fix="make its lists there, or use block_mask.to(device)",
        )


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
            rule="must be (left, right): how many keys left and right of the diagonal, ints of at "
            "least 0",
            fix="None is no bound, where FlashAttention has -1",
        )
    left, right = (UNBOUNDED if bound is None else min(bound, UNBOUNDED) for bound in window)
    return left, right


# ---- What kernels are chosen by ------------------------------------------------------------------


def operation(
    kind: type[OperationT],
    element: str,
    sizes: Extents,
    dims: tuple[int, int],
    band: Band,
    fields: Fields,
) -> OperationT:
    """The operation of this kind that computes a call, by a kernel of `dims`, with more fields."""
    dim, dim_v = dims
    return kind(
        element=element,  # type: ignore[arg-type]
        dim=dim,  # type: ignore[arg-type,unused-ignore]
        dim_v=dim_v,  # type: ignore[arg-type,unused-ignore]
        mask=band.mask,
        lengths="packed" if sizes.packed else "fixed",
        **fields,
    )


def shape(sizes: Extents, band: Band) -> AttentionShape:
    """Return what of a call decides its time."""
    bounds = (band.left, band.right)
    bounded = all(bound < UNBOUNDED for bound in bounds)
    return AttentionShape(
        batch=sizes.batch,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        seq_q=sizes.seq_q,
        seq_k=sizes.seq_k,
        dim=sizes.dim,
        window=max(1, sum(bounds) + 1) if bounded else 0,
        total_q=sizes.total_q if sizes.packed else 0,
        total_k=sizes.total_k if sizes.packed else 0,
    )
