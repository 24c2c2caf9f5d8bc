"""Which keys a row attends to, told by a band and by lengths of sequences."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences in the rows of a batch that is laid end to end: `warploom.attention`'s packed form.

    Keys that nobody attends to are sequences without rows, hidden rows are such without keys: so a
    padded batch is packed where it lies, and nothing of it is gathered.
    """

    cu_seqlens_q: torch.Tensor  # int32 [sequences + 1]
    cu_seqlens_k: torch.Tensor
    max_seqlen_q: int
    max_seqlen_k: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Which keys a row attends to, without a tensor of rows and keys.

    keys       keys from this one on are hidden from every row: a cache's that are not yet filled
    causal     the last row attends to the last key, each row before it to one fewer
    window     how many keys on each side of its own a row attends to; None is no bound
    sequences  rows attend to keys of their own sequence only, and the above holds in each
    lengths    int32 [batch], on the device: keys of each item up to the last row's, which is the
               last one. `keys` is how many there may be
    starts     int32 [batch], on the device, beside lengths: the first key of each item; None: 0
    """

    keys: int
    causal: bool
    window: int | None = None
    sequences: Sequences | None = None
    lengths: torch.Tensor | None = None
    starts: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Pattern:
    """A mask by positions, before padding and the lengths of a call."""

    causal: bool = False
    window: int | None = None  # keys on each side, beside the row's own
    chunk: int | None = None  # rows attend to keys of their own chunk of so many
    packed: torch.Tensor | None = None  # [batch, rows]: the sequence of each row


@dataclass(frozen=True, slots=True)
class Extents:
    """Where the rows and keys of a call lie: the first row and the first key have these offsets."""

    batch: int
    rows: int
    keys: int
    row_offset: int = 0
    key_offset: int = 0

    @property
    def last(self) -> int:
        """Keys up to the one at the last row's position."""
        return self.row_offset + self.rows - self.key_offset

    @property
    def whole(self) -> bool:
        """Whether rows and keys are the same positions, from the first on."""
        return self.rows == self.keys and self.row_offset == self.key_offset == 0


def bounds(
    pattern: Pattern, extents: Extents, padding: torch.Tensor | None, device: torch.device
) -> Bounds | None:
    """Return the bounds of a mask, or None where bounds cannot say it.

    `padding` is [batch, positions], bool, True where a key may be attended to; there are none after
    its last. Reads it, and so waits for a GPU: once for all layers.
    """
    if pattern.chunk is not None or pattern.packed is not None:
        return _separate(pattern, extents, padding, device)
    positioned = pattern.causal or pattern.window is not None
    keys = extents.last if pattern.causal else extents.keys
    if positioned and (keys > extents.keys or keys != extents.last):
        return None
    window = None if pattern.window is None or pattern.window >= keys - 1 else pattern.window
    dense = Bounds(keys, pattern.causal, window)
    if padding is None:
        return dense
    valid = padding[:, extents.key_offset : extents.key_offset + keys]
    valid = functional.pad(valid, (0, keys - valid.shape[1]))
    begins = functional.pad(valid, (1, 0))[:, :-1].logical_not() & valid
    together = begins.sum(1) <= 1
    facts = torch.stack([valid.all(), together.all(), valid[:, -1].all()])
    everything, in_one_piece, to_the_end = facts.tolist()
    if everything:
        return dense
    if not in_one_piece:
        return None
    sequences = _padded(valid, extents.rows, hidden=positioned and not to_the_end)
    return Bounds(keys, pattern.causal, window, sequences)


def _padded(valid: torch.Tensor, rows: int, *, hidden: bool) -> Sequences:
    """Pack a batch where it lies: one piece of each item's keys is valid, [batch, keys].

    The last row is the last key's. With `hidden`, rows past the last valid key see nothing; rows
    before the first belong to the sequence, whose bounds leave them nothing to see.
    """
    keys = valid.shape[1]
    count = valid.sum(1)
    first = torch.where(count > 0, valid.int().argmax(1), 0)
    end = first + count
    following = functional.pad(first[1:], (0, 1))
    none, seeing = torch.zeros_like(count), torch.full_like(count, rows)
    lengths_q, lengths_k = [seeing, none], [count, keys - end + following]
    if hidden:
        seeing = (end - (keys - rows)).clamp(0, rows)
        lengths_q, lengths_k = [seeing, rows - seeing, none], [count, none, lengths_k[1]]
    return Sequences(
        _offsets(functional.pad(torch.stack(lengths_q, 1).flatten(), (1, 0))),
        _offsets(torch.cat([first[:1], torch.stack(lengths_k, 1).flatten()])),
        rows,
        keys,
    )


def _separate(
    pattern: Pattern, extents: Extents, padding: torch.Tensor | None, device: torch.device
) -> Bounds | None:
    """Sequences that follow each other without gaps: chunks, or those of a packed batch."""
    if not extents.whole or (pattern.chunk is not None and pattern.packed is not None):
        return None
    if padding is not None and not padding.all():
        return None
    ends = [extents.batch * extents.rows]
    if pattern.packed is not None:
        changes = functional.pad(pattern.packed.diff() != 0, (1, 0), value=True)
        starts = changes.flatten().nonzero().flatten().tolist()
    else:
        chunk = pattern.chunk or extents.rows
        items = range(0, ends[0], extents.rows)
        starts = [item + at for item in items for at in range(0, extents.rows, chunk)]
    longest = max(b - a for a, b in zip(starts, starts[1:] + ends, strict=True))
    offsets = torch.tensor(starts + ends, dtype=torch.int32, device=device)
    sequences = Sequences(offsets, offsets, longest, longest)
    return Bounds(extents.keys, pattern.causal, pattern.window, sequences)


def _offsets(lengths: torch.Tensor) -> torch.Tensor:
    """Return [0, lengths summed up ...]; the first sum is the first length's end."""
    return functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
