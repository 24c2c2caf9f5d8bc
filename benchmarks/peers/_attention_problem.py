"""One attention to be measured: its extents, its mask, and the work that these leave."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from warploom.generator.families._attention import DIMS


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention: [batch, heads, seq, dim] or, with `lengths`, packed sequences of them.

    Where rows and columns differ in number, the last row's diagonal is at the last column; a causal
    mask or a window then has no more rows than columns.
    """

    name: str
    batch: int
    heads: int
    kv_heads: int
    seq: int  # of q; packed: of the longest
    dim: int
    causal: bool = False
    window: int | None = None  # columns to the left of the diagonal; not causal: to its right, too
    lengths: tuple[int, ...] = ()
    seq_k: int = 0  # of k and v, where it is not `seq`
    lengths_k: tuple[int, ...] = ()
    element: str = "bf16"
    dim_v: int = 0  # of v and the output, where it is not `dim`

    @property
    def columns(self) -> int:
        """The length of k and v; packed: of the longest."""
        return self.seq_k or self.seq

    @property
    def sequences(self) -> list[tuple[int, int]]:
        """Rows and columns of each packed sequence, or of the one length that all have."""
        if not self.lengths:
            return [(self.seq, self.columns)]
        return list(zip(self.lengths, self.lengths_k or self.lengths, strict=True))

    @property
    def square(self) -> bool:
        """Whether every sequence has as many rows as columns, so that masks align in one way."""
        return all(rows == columns for rows, columns in self.sequences)

    @property
    def band(self) -> tuple[int, int] | None:
        """Columns on the left and right of the diagonal, of a window."""
        if self.window is None:
            return None
        return self.window, 0 if self.causal else self.window

    @property
    def keywords(self) -> dict[str, Any]:
        """What `warploom.attention` is given beside tensors."""
        causal = self.causal if self.square and not self.lengths_k else "bottom_right"
        window = {} if self.band is None else {"window": self.band}
        return {"causal": self.causal and causal, **window}

    @property
    def operation(self) -> dict[str, Any]:
        """The fields of the operation that it is."""
        mask = "window" if self.window is not None else "causal" if self.causal else "none"
        dim = next(dim for dim in DIMS if dim >= self.dim)
        lengths = "packed" if self.lengths else "fixed"
        found = {"element": self.element, "dim": dim, "mask": mask, "lengths": lengths}
        return {**found, "dim_v": self.dim_v} if self.dim_v else found

    @property
    def flops(self) -> int:
        """The work that the mask leaves the forward pass: 2 (dim + dim_v) for each score.

        A causal square counts half the scores of a full one, as it does everywhere; a window
        counts its own, exactly.
        """
        return self._flops(2)

    @property
    def moved(self) -> int:
        """The bytes of q, k, v and the output, of 16 bits each."""
        many = 1 if self.lengths else self.batch
        rows, columns = (sum(each[of] for each in self.sequences) for of in (0, 1))
        dims = self.dim + (self.dim_v or self.dim)
        return 2 * dims * many * (self.heads * rows + self.kv_heads * columns)

    def record(self, passed: str, products: int) -> dict[str, Any]:
        """The problem of a cell, of a pass with so many products where the forward pass has two."""
        about = asdict(self)
        if not self.dim_v:
            del about["dim_v"]  # as cells were measured before there were two
        return {**about, "type": self.element, "pass": passed, "flops": self._flops(products)}

    def _flops(self, products: int) -> int:
        """The work of so many products; of an odd number one more is of q's dimension than of v's.

        The forward pass has q k^T and p v; the backward pass q k^T, dq and dk, and dp and dv.
        """
        twice = sum(self._twice()) * self.heads * (1 if self.lengths else self.batch)
        dims = -(-products // 2) * self.dim + products // 2 * (self.dim_v or self.dim)
        return twice * dims

    def _twice(self) -> Iterator[int]:
        """Twice the scores of one head, of each sequence."""
        for rows, columns in self.sequences:
            if self.band is None:
                yield 2 * rows * columns - (rows * rows if self.causal else 0)
                continue
            left, right = self.band
            hidden = _ramp(columns - 1 - left) - _ramp(columns - rows - 1 - left)
            yield 2 * rows * columns - hidden - _ramp(rows - 1 - right)


def _ramp(height: int) -> int:
    """Twice the sum of 1 to `height`."""
    return max(0, height) * (max(0, height) + 1)
