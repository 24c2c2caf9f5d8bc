"""What attention's operators take, and how a call becomes one of theirs, for a compiler to trace.

A mask of blocks crosses as its tensors and sizes, all else as it is declared. operators.py says
what the operators compute.
"""

from __future__ import annotations

import torch

from warploom.errors import ProblemError
from warploom.runtime.arguments import written
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.mask import refuse_beside_blocks
from warploom.runtime.families.attention_forward import gradient
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.operator import is_distributed

_DECLARATION = AttentionCall.declaration
_NAMES = _DECLARATION.names

# What all operators take, with what joined later at the end, by default None: graphs that were
# exported before do without. Torch leaves out the last ones that are None.
OPERANDS = _DECLARATION.part(*_NAMES[:3])
FUNCTION = _DECLARATION.part(*_NAMES[3 : _NAMES.index("out")])
OPTIONS = _DECLARATION.part("deterministic", "backward_spec")
SPEC = _DECLARATION.part("spec")
FURTHER = _DECLARATION.part(*_DECLARATION.graded, "dropout_p")
# Not called `out`: torch.compile refuses operators with a strided one.
INTO = (*OPERANDS, *FUNCTION, *SPEC, written("out", "Tensor(a!) result"), *FURTHER)
FORWARD = (*OPERANDS, *FUNCTION, *SPEC, *OPTIONS, *FURTHER)
# Beside a mask of blocks, whose lists kernels know by the tensor of its places.
BLOCKS = "Tensor places, Tensor bits, int block_q, int block_kv"
BESIDE_BLOCKS = (
    *_DECLARATION.part(*_DECLARATION.numbers),
    *SPEC,
    *OPTIONS,
    *_DECLARATION.part("dropout_p", "dropout_state"),
)


def attention(call: AttentionCall) -> Pair:
    """Run a call as an operator, for a compiler to trace; return out and lse."""
    further = call.further
    if is_distributed(call.q):
        if further:
            raise ProblemError(
                f"{' and '.join(further)} with distributed tensors",
                rule="must be left out: there is no sharding rule for them",
                fix="call it on the local shards, of heads or of the batch",
            )
        from warploom.runtime.families.attention_forward import sharding  # noqa: F401 (registers)
    if call.block_mask is not None:
        return _attention_blocks(call)
    rest = () if further else FURTHER
    if call.out is None:
        values = call.encoded(FORWARD[: len(FORWARD) - len(rest)])
        result: Pair = torch.ops.warploom.attention(*values)
        return result
    _refuse_out(call)
    values = call.encoded(INTO[: len(INTO) - len(rest)])
    return call.out, torch.ops.warploom.attention_into(*values)


def _attention_blocks(call: AttentionCall) -> Pair:
    """Run a call with a mask of blocks as an operator."""
    mask: BlockMask = call.block_mask
    refuse_beside_blocks(call)
    _refuse_out(call)
    found: Pair = torch.ops.warploom.attention_blocks(
        *call.encoded(OPERANDS),
        *(mask.places, mask.bits, *mask.block),
        *call.encoded(BESIDE_BLOCKS),
    )
    return found if call.out is None else (call.out.copy_(found[0]), found[1])


def _refuse_out(call: AttentionCall) -> None:
    tensors = (call.q, call.k, call.v, *call.further.values(), call.out)
    is_graded = any(one is not None and one.requires_grad for one in tensors)
    if call.out is not None and is_graded and torch.is_grad_enabled():
        gradient.refuse_out()
