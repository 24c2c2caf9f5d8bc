"""What attention's operators take, and how a call becomes one of theirs, for a compiler to trace.

`causal` crosses as the name of its alignment, "equal" being that of True; a window as its two
bounds; a mask of blocks as its tensors and sizes. operators.py says what the operators compute.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.mask import refuse_beside_blocks
from warploom.runtime.families.attention_forward import gradient
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.operator import is_distributed


class Operands(NamedTuple):
    """What is attended from and to."""

    q: Annotated[torch.Tensor, "Tensor"]
    k: Annotated[torch.Tensor, "Tensor"]
    v: Annotated[torch.Tensor, "Tensor"]


class Function(NamedTuple):
    """What all operators take of a call beside q, k and v, each with its type in their schemas."""

    causal: Annotated[str | None, "str?"]
    left: Annotated[int | None, "SymInt?"]
    right: Annotated[int | None, "SymInt?"]
    softcap: Annotated[float | None, "float?"]
    scale: Annotated[float | None, "float?"]
    cu_seqlens_q: Annotated[torch.Tensor | None, "Tensor?"]
    cu_seqlens_k: Annotated[torch.Tensor | None, "Tensor?"]
    max_seqlen_q: Annotated[int | None, "SymInt?"]
    max_seqlen_k: Annotated[int | None, "SymInt?"]


class Options(NamedTuple):
    """How gradients are computed."""

    deterministic: Annotated[bool | None, "bool?"]
    backward_spec: Annotated[str | None, "str?"]


class Further(NamedTuple):
    """What joined later: tensors that results depend on beside q, k and v, and dropout_p.

    Graphs that were exported before do without: what joins these joins at the end, by default None.
    Torch leaves out the last ones that are None.
    """

    sinks: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    alibi_slopes: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    bias: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    mask: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    dropout_state: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None
    dropout_p: Annotated[float | None, "float?", "=None"] = None


class Spec(NamedTuple):
    """The kernel that was asked for."""

    spec: Annotated[str | None, "str?"]


class MaskOfBlocks(NamedTuple):
    """A mask of blocks. Kernels' lists are known by the tensor of its places."""

    places: Annotated[torch.Tensor, "Tensor"]
    bits: Annotated[torch.Tensor, "Tensor"]
    block_q: Annotated[int, "int"]
    block_kv: Annotated[int, "int"]


class BlocksFunction(NamedTuple):
    """What operators with a mask of blocks take beside it."""

    softcap: Annotated[float | None, "float?"]
    scale: Annotated[float | None, "float?"]


class Dropout(NamedTuple):
    """What joined these later."""

    dropout_p: Annotated[float | None, "float?", "=None"] = None
    dropout_state: Annotated[torch.Tensor | None, "Tensor?", "=None"] = None


TENSORS = Further._fields[:-1]  # those of Further that are tensors


def call_of(inputs: tuple[Any, ...], further: tuple[Any, ...]) -> AttentionCall:
    """The call that the arguments of Operands, Function and Further stand for."""
    function = Function(*inputs[3:])
    causal, left, right = function[:3]
    aligned: Any = causal == "equal" if causal in (None, "equal") else causal
    window = None if left is None and right is None else (left, right)
    q, k, v = inputs[:3]
    others: tuple[Any, ...] = function[3:]
    given = Further(*further)
    dropped: dict[str, Any] = {"dropout_p": given.dropout_p or 0.0}
    return AttentionCall(q, k, v, aligned, window, *others, **(given._asdict() | dropped))


_ALIGNMENTS: dict[bool | str, str | None] = {False: None, True: "equal"}


def attention(call: AttentionCall) -> Pair:
    """Run a call as an operator, for a compiler to trace; return out and lse."""
    if is_distributed(call.q):
        if call.further:
            raise ProblemError(
                f"{' and '.join(call.further)} with distributed tensors",
                rule="must be left out: no rule says how they are split",
                fix="call it on the local shards, of heads or of the batch",
            )
        from warploom.runtime.families.attention_forward import sharding  # noqa: F401 (registers)
    if call.block_mask is not None:
        return _attention_blocks(call)
    left, right = call.window or (None, None)
    operands = (call.q, call.k, call.v)
    causal: Any = _ALIGNMENTS.get(call.causal, call.causal)
    function = Function(
        causal,
        left,
        right,
        call.softcap,
        call.scale,
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.max_seqlen_q,
        call.max_seqlen_k,
    )
    spec, further = _name(call.spec), call.further
    values: tuple[Any, ...] = ()
    if further:
        values = (*(further.get(name) for name in TENSORS), call.dropout_p or None)
    out = call.out
    if out is None:
        result: Pair = torch.ops.warploom.attention(
            *operands, *function, spec, call.deterministic, _name(call.backward_spec), *values
        )
        return result
    given = (*operands, out, *further.values())
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        gradient.refuse_out()
    return out, torch.ops.warploom.attention_into(*operands, *function, spec, out, *values)


def _attention_blocks(call: AttentionCall) -> Pair:
    """Run a call with a mask of blocks as an operator."""
    mask: BlockMask = call.block_mask
    refuse_beside_blocks(call)
    operands = (call.q, call.k, call.v)
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in operands)
    if wanted and call.out is not None:
        gradient.refuse_out()
    found: Pair = torch.ops.warploom.attention_blocks(
        *operands,
        mask.places,
        mask.bits,
        *mask.block,
        call.softcap,
        call.scale,
        _name(call.spec),
        call.deterministic,
        _name(call.backward_spec),
        call.dropout_p or None,
        call.dropout_state if call.dropout_p else None,
    )
    return found if call.out is None else (call.out.copy_(found[0]), found[1])


def _name(spec: KernelSpec | str | None) -> str | None:
    return spec.name if isinstance(spec, KernelSpec) else spec
