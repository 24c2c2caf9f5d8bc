"""The sizes of a call of `warploom.attention`: what its tensors say of each other.

Tensors are [batch, heads, seq, dim] views, or packed [total, heads, dim] with `cu_seqlens` of their
sequences. Only `check_offsets` reads a tensor's contents.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from dataclasses import dataclass, field

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention import DIMS, GRADIENT_DIMS, UNLIKE_DIMS
from warploom.runtime.families._attention import dropout
from warploom.runtime.families._attention.modifiers import modifiers_of
from warploom.runtime.families._attention.problem import Arguments
from warploom.runtime.tensors import require_one_device, shown


@dataclass(frozen=True, slots=True)
class Extents:
    """The sizes of a call; packed: `batch` counts sequences, `seq_q` and `seq_k` the longest."""

    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_k: int
    dim: int
    total_q: int
    total_k: int
    packed: bool
    dim_v: int = field(default=0, kw_only=True)  # of v and of the output; 0: `dim`

    @property
    def sharing(self) -> int:
        """Query heads of one kv head."""
        return self.heads // max(1, self.kv_heads)

    @property
    def empty(self) -> bool:
        """True when no product is left to compute."""
        totals = self.total_q and self.total_k
        return not (self.batch and self.heads and self.seq_q and self.seq_k and totals)

    @property
    def kernel_dims(self) -> tuple[int, int]:
        """The head dimensions of the forward kernel, of q and k, and of v; the latter 0: as many.

        They are the next there are that take the least work; the rest is filled with zeros.
        """
        square = DIMS[bisect_left(DIMS, max(self.dim, self.dim_v))]
        unlike = pair_of(self.dim, self.dim_v, UNLIKE_DIMS) if self.dim_v else None
        return unlike if unlike is not None and sum(unlike) < 2 * square else (square, 0)

    @property
    def has_gradients(self) -> bool:
        """Whether there are kernels of gradients of these head dimensions."""
        if not self.dim_v:
            return True
        pair = pair_of(self.dim, self.dim_v, GRADIENT_DIMS)
        return pair is not None and self.dim_v < self.dim

    def gradient_dims(self) -> tuple[int, int]:
        """The same of the kernel of gradients. Raises ProblemError where none has both."""
        if not self.dim_v:
            return self.kernel_dims
        pair = pair_of(self.dim, self.dim_v, GRADIENT_DIMS)
        if pair is None or not self.has_gradients:
            dims = " or ".join(f"{dim} and {dim_v}" for dim, dim_v in GRADIENT_DIMS)
            raise ProblemError(
                f"gradients of q and k of dim {self.dim} and v of dim {self.dim_v}",
                rule=f"where the dimensions differ, they must be up to {dims}, that of v less",
                fix="pad the smaller one with zeros, and pass the scale of the true dimension",
            )
        return pair

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """Of the log-sum-exp: one number for each query and head."""
        lead = (self.heads,) if self.packed else (self.batch, self.heads)
        return (*lead, self.total_q if self.packed else self.seq_q)


def pair_of(dim: int, dim_v: int, pairs: tuple[tuple[int, int], ...]) -> tuple[int, int] | None:
    """The pair of head dimensions with the least work that has room for these; None without."""
    fitting = [pair for pair in pairs if pair[0] >= dim and pair[1] >= dim_v]
    return min(fitting, key=sum, default=None)


def extents(call: Arguments) -> Extents:
    """Return the sizes of a call, or raise ProblemError for tensors that do not go together."""
    call.require()
    q, k, v = call.q, call.k, call.v
    if call.dropout_p:
        dropout.check_state(call.dropout_state, q.device)
    packed = _is_packed(call)
    rank = 3 if packed else 4
    layout = "[total, heads, dim]" if packed else "[batch, heads, seq, dim]"
    if any(t.dim() != rank for t in (q, k, v)):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule=f"each must be {layout}",
            fix="packed tensors come with cu_seqlens and max_seqlen, others without",
        )
    call.check_elements()
    heads_at, seq_at = (1, 0) if packed else (1, 2)
    heads, kv_heads, dim = q.shape[heads_at], k.shape[heads_at], q.shape[-1]
    values = call.values_shape
    dim_v = values[-1]
    if (
        k.shape[:-1] != values[:-1]
        or k.shape[-1] != dim
        or (not packed and k.shape[0] != q.shape[0])
    ):
        raise ProblemError(
            f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}",
            rule="k and v must have one batch, heads and length, and k the batch and dim of q",
            fix=f"give {layout} tensors; to swap heads and seq, use .transpose(1, 2)",
        )
    if heads and (kv_heads == 0 or heads % kv_heads):
        raise ProblemError(
            f"{heads} heads of q over {kv_heads} of k and v",
            rule="the heads of q must be a multiple of those of k and v",
            fix="consecutive heads of q share one of k and v",
        )
    if (dim | dim_v) % 8 or not 8 <= min(dim, dim_v) <= max(dim, dim_v) <= DIMS[-1]:
        raise ProblemError(
            f"dim {dim}" if dim == dim_v else f"dim {dim} of q and k, {dim_v} of v",
            rule=f"a head dimension must be a multiple of 8 up to {DIMS[-1]}",
            fix="pad q, k and v with zeros, and pass the scale of the true dimension",
        )
    total_q, total_k = q.shape[seq_at], k.shape[seq_at]
    batch, seq_q, seq_k = q.shape[0], total_q, total_k
    if packed:
        batch = call.offsets[0].shape[0] - 1
        seq_q, seq_k = min(call.max_seqlen_q or 0, total_q), min(call.max_seqlen_k or 0, total_k)
    sizes = (batch, heads, kv_heads, seq_q, seq_k, dim, total_q, total_k)
    found = Extents(*sizes, packed, dim_v=0 if dim_v == dim else dim_v)
    if further := call.further:
        require_one_device((("q", q), *further.items()))
    if modifiers := modifiers_of(call):
        scores = (call.max_seqlen_q or 0, call.max_seqlen_k or 0) if packed else (seq_q, seq_k)
        for modifier in modifiers:
            modifier.check(call, (batch, heads, *scores))
    return found


def _is_packed(call: Arguments) -> bool:
    """Whether lengths vary; ProblemError for half of what that takes."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    missing = [name for name in names if getattr(call, name) is None]
    if len(missing) == len(names):
        return False
    if missing:
        raise ProblemError(
            f"packed lengths without {', '.join(missing)}",
            rule=f"packed lengths take {', '.join(names)}",
            fix="the longest lengths are ints, so that no call waits for the GPU to learn them",
        )
    for name, offsets in zip(names, call.offsets, strict=False):
        if (
            offsets.dtype != torch.int32
            or offsets.dim() != 1
            or not offsets.is_contiguous()
            or offsets.shape != call.offsets[0].shape
            or offsets.shape[0] < 1
            or offsets.device != call.q.device
        ):
            raise ProblemError(
                f"{name} {list(offsets.shape)} {offsets.dtype} on {offsets.device}",
                rule="must be int32 [batch + 1], contiguous, on the device of q, of one length",
                fix="a cumulative sum of lengths that begins with 0",
            )
    for name in names[2:]:
        if getattr(call, name) < 0:
            raise ProblemError(
                f"{name} {getattr(call, name)}",
                rule="the longest length must be at least 0",
                fix="pass the largest length of a sequence",
            )
    return True


def check_offsets(call: Arguments) -> None:
    """Raise ProblemError for cu_seqlens of CPU tensors that are none, or too long a sequence.

    Contents are read, which no call on a GPU does.
    """
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
