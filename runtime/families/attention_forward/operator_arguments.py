"""What attention's operators take: the named tuples of their schemas, and the call of them."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.runtime.families.attention_forward.call import AttentionCall


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
