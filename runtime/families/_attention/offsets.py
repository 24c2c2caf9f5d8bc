"""What `cu_seqlens` of CPU tensors must be: contents are read, which no call on a GPU does."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from warploom.errors import ProblemError
from warploom.runtime.tensors import shown

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments


def check_offsets(call: Arguments) -> None:
    """Raise ProblemError for cu_seqlens of CPU tensors that are none, or too long a sequence."""
    longest = (call.max_seqlen_q, call.max_seqlen_k)
    named_offsets = zip(("q", "k"), call.offsets, (call.q, call.k), longest, strict=False)
    for name, offsets, tensor, most in named_offsets:
        starts, rows = offsets.tolist(), tensor.shape[0]
        lengths = [after - before for before, after in itertools.pairwise(starts)]
        if starts[0] != 0 or min(lengths, default=0) < 0 or starts[-1] > rows:
            raise ProblemError(
                f"cu_seqlens_{name} {shown(starts)} over {rows} rows",
                rule="must begin with 0, never decrease, and end at no more than the rows",
                fix="a cumulative sum of lengths that begins with 0",
            )
        if most is not None and max(lengths, default=0) > most:
            raise ProblemError(
                f"max_seqlen_{name} {most}",
                rule=f"must be at least the longest sequence, {max(lengths)}",
                fix="pass the largest length of a sequence, or any larger number",
            )
