"""Which weights of an attention are dropped: a function of a state and of their places.

Kernels of both passes, the reference and `dropout_mask` agree bit by bit, whatever the tiles.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from warploom.arguments import is_number, require_count
from warploom.errors import ProblemError
from warploom.runtime.philox import LOW, drawn, philox, words_of
from warploom.runtime.tensors import shown

STEPS = 1 << 16  # probabilities are multiples of 1 / STEPS
_MULTIPLIER = (1 << 32) - 69069
_BITS, _SHARED_BITS = 8, 2  # of a weight's number; of these, those that four words share


def keep_of(dropout_p: float) -> float:
    """The probability that a weight is kept: 1 - dropout_p, to the nearest that kernels have.

    1 where nothing is dropped; never 0. Raises ProblemError for a dropout_p beyond [0, 1).
    """
    if not (is_number(dropout_p) and 0 <= dropout_p < 1):
        raise ProblemError(
            f"dropout_p {shown(dropout_p)}",
            rule="must be at least 0 and less than 1: the probability that a weight is dropped",
            fix="pass 0.0 where nothing is to be dropped, as in evaluation",
        )
    return max(1, round((1 - dropout_p) * STEPS)) / STEPS


def settled(
    dropout_p: float, state: torch.Tensor | None, q: object
) -> tuple[float, torch.Tensor | None]:
    """A call's probability, 0 where kernels drop nothing, and its state, drawn where it lacks."""
    if keep_of(dropout_p) == 1:
        return 0.0, state
    if state is None and isinstance(q, torch.Tensor):
        return dropout_p, drawn(q.device)
    return dropout_p, state


def check_state(state: object, device: torch.device) -> None:
    """Raise ProblemError for a state that kernels cannot read."""
    if not isinstance(state, torch.Tensor):
        raise ProblemError(
            f"dropout_state {shown(state)}",
            rule="must be a tensor, or None for a random one",
            fix="torch.randint(2**62, (2,), device=q.device) makes one",
        )
    if (
        state.shape != (2,)
        or state.dtype != torch.int64
        or state.device != device
        or not state.is_contiguous()
    ):
        raise ProblemError(
            f"dropout_state {list(state.shape)} {state.dtype} on {state.device}",
            rule="must be int64 [2], contiguous, on the device of q",
            fix="torch.randint(2**62, (2,), device=q.device) makes one",
        )


@dataclass(frozen=True, slots=True)
class Dropout:
    """What is dropped of scores that begin at a place.

    state   int64 [2]
    keep    the probability that a weight is kept, a multiple of 1 / STEPS
    heads   query heads of one batch
    batch, row, column   of the first score
    """

    state: torch.Tensor
    keep: float
    heads: int
    batch: int = 0
    row: int = 0
    column: int = 0

    def kept(self, batches: slice, rows: slice, seq_k: int) -> torch.Tensor:
        """Which weights are kept: bool [batches, heads, rows, seq_k], on the state's device."""
        device = self.state.device
        batch, head, row, column = (
            torch.arange(first + at.start, first + at.stop, device=device)
            for first, at in (
                (self.batch, batches),
                (0, slice(0, self.heads)),
                (self.row, rows),
                (self.column, slice(0, seq_k)),
            )
        )
        patch_row, patch_column = row // 16, column // 16
        first_row, first_column = (self.row + rows.start) // 16, self.column // 16
        down = torch.arange(first_row, (self.row + rows.stop - 1) // 16 + 1, device=device)
        across = torch.arange(first_column, (self.column + seq_k - 1) // 16 + 1, device=device)
        all_head = (batch[:, None] * self.heads + head)[..., None, None]
        words = self._words(all_head, down[:, None], across)
        words = words[
            row[:, None] % 8 // 2 * 2 + column % 8 // 4,
            ...,
            (patch_row - first_row)[:, None],
            patch_column - first_column,
        ].permute(2, 3, 0, 1)
        of_row = row // 8 % 2 * 16 - row % 2 * 4
        of_column = column % 2 * 8 - column // 2 % 2 * 2 - column // 8 % 2
        return (words >> of_row[:, None] + of_column + 7 & 1) == 0

    def _words(self, head: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
        """The 8 words of patches of 16 rows and 16 columns: int64 [8, ...], 1 where one is dropped.

        Numbers of 8 bits are held against the threshold rounded down or up, as a number of four
        words says; the lowest bits are of four words, too.
        """
        threshold, share = divmod(round(self.keep * STEPS), 1 << _BITS)
        state = philox(*words_of(self.state))
        place = (row ^ state[0], column ^ state[1], head ^ state[2], state[3])
        draw = _numbers(*torch.broadcast_tensors(*philox(*place)))
        words = []
        for _ in range(2):
            shared = torch.where(next(draw) < share << 32 - _BITS, 0, LOW)
            for bit in range(_SHARED_BITS):
                shared = _compare(shared, next(draw), threshold >> bit & 1)
            for _ in range(4):
                word = shared
                for bit in range(_SHARED_BITS, _BITS):
                    word = _compare(word, next(draw), threshold >> bit & 1)
                words.append(word)
        return torch.stack(words)


def _compare(dropped: torch.Tensor, one: torch.Tensor, bit: int) -> torch.Tensor:
    """Which numbers are at least the threshold, by those of the bits below, and one bit more."""
    return one & dropped if bit else one | dropped


def _numbers(*seeds: torch.Tensor) -> Iterator[torch.Tensor]:
    """Upper halves of numbers of 64 bits: int64 wraps.

    A number is the one three before and the product of the lower half of that two before; the
    first three have these lower halves, and one upper half.
    """
    *lower, upper = seeds
    last = [upper << 32 | low for low in lower]
    while True:
        last = [last[1], last[2], (last[1] & LOW) * _MULTIPLIER + last[0]]
        yield last[2] >> 32 & LOW


def dropout_mask(
    state: torch.Tensor, dropout_p: float, batch: int, heads: int, seq_q: int, seq_k: int
) -> torch.Tensor:
    """Return which weights of the softmax `warploom.attention` keeps under dropout.

    Args:
        state: int64 [2], the `dropout_state` of the call.
        dropout_p: The probability that a weight is dropped, as in the call.
        batch: Sequences.
        heads: Query heads.
        seq_q: Rows; for variable-length sequences the longest. Each begins at row 0.
        seq_k: Keys; for variable-length sequences the most. Each begins at column 0.

    Returns:
        bool [batch, heads, seq_q, seq_k] on the device of `state`: True for kept weights, which the
        call divides by 1 - dropout_p, rounded to a multiple of 2^-16.

    Raises:
        ProblemError: For a state or a probability that no call can have.

    It needs 8 bytes of memory for each weight while it computes.

    Example:
        >>> warploom.dropout_mask(torch.tensor([1, 2]), 0.5, 1, 2, 8, 8).shape
        torch.Size([1, 2, 8, 8])
    """
    check_state(state, state.device if isinstance(state, torch.Tensor) else torch.device("cpu"))
    for name, size in zip(
        ("batch", "heads", "seq_q", "seq_k"), (batch, heads, seq_q, seq_k), strict=True
    ):
        require_count(name, size)
    keep = keep_of(dropout_p)
    if keep == 1:
        return torch.ones(batch, heads, seq_q, seq_k, dtype=torch.bool, device=state.device)
    return Dropout(state, keep, heads).kept(slice(0, batch), slice(0, seq_q), seq_k)
