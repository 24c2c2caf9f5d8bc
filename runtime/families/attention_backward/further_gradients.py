"""Where a backward pass writes the gradients of sinks and of scores, and what those come to."""

from __future__ import annotations

import torch

from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.modifiers.score_tensors import four, row_pitch
from warploom.runtime.families._attention.problem import Arguments, extents
from warploom.runtime.families.attention_backward.arguments import BackwardArguments


def prepare(call: BackwardArguments, wanted: tuple[str, ...]) -> None:
    """Make room for the gradients of the further tensors that are named."""
    sinks = call.forward.sinks
    if "sinks" in wanted and sinks is not None:
        call.dsinks = torch.empty_like(sinks)
    if "bias" in wanted:
        call.ds = room_of_ds(call.forward)


def wanted_by(operation: AttentionBackwardOperation) -> tuple[str, ...]:
    """Return the further tensors whose gradients an operation has."""
    sinks, bias = operation.sinks != "none", operation.bias_gradient
    return (*["sinks"] * sinks, *["bias"] * bias)


def room_of_ds(forward: Arguments) -> torch.Tensor:
    """Where the gradients of scores go: [batch, heads, seq_q, seq_k] in the type of q.

    Packed, [sequences, heads, max_seqlen_q, max_seqlen_k]. Zeros where a kernel may not write.
    """
    q, sizes = forward.q, extents(forward)
    rows, columns = sizes.seq_q, sizes.seq_k
    if sizes.packed:
        rows, columns = forward.max_seqlen_q or 0, forward.max_seqlen_k or 0
    pitch = row_pitch(q, columns)
    writes_all = not sizes.packed and band(forward, sizes).mask == "none"
    room = q.new_empty if writes_all else q.new_zeros
    return room((sizes.batch, sizes.heads, rows, pitch))[..., :columns]


def of_pass(call: BackwardArguments) -> tuple[torch.Tensor, ...]:
    """The gradients of sinks and bias that are wanted, once the pass has run.

    That of a bias is the sum, in fp32 and in an order that does not change, over what is
    broadcast.
    """
    found = () if call.dsinks is None else (call.dsinks,)
    bias = call.forward.bias
    if call.ds is None or bias is None:
        return found
    whole = four(bias)
    broadcast = [i for i, extent in enumerate(whole.shape) if extent != call.ds.shape[i]]
    total = call.ds
    if broadcast:
        # Torch sums 16 bits in fp32, and rounds once; told of a type it writes all of that.
        wide = None if bias.dtype == call.ds.dtype else torch.float32
        total = call.ds.sum(broadcast, keepdim=True, dtype=wide)
    return (*found, total.to(bias.dtype).reshape(bias.shape))
