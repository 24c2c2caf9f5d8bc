"""The operators of decoding that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. A window crosses
as its two bounds.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.specification import KernelSpec
from warploom.runtime.families.attention_decode.call import (
    AttentionDecodeCall,
    Pair,
    result_like,
)
from warploom.runtime.operator import register
from warploom.runtime.plan import run


class _Call(NamedTuple):
    """What both operators take, in order, each with its type in their schemas."""

    q: Annotated[torch.Tensor, "Tensor"]
    k: Annotated[torch.Tensor, "Tensor"]
    v: Annotated[torch.Tensor, "Tensor"]
    lengths: Annotated[torch.Tensor | None, "Tensor?"]
    starts: Annotated[torch.Tensor | None, "Tensor?"]
    page_table: Annotated[torch.Tensor | None, "Tensor?"]
    causal: Annotated[bool, "bool"]
    left: Annotated[int | None, "SymInt?"]
    right: Annotated[int | None, "SymInt?"]
    softcap: Annotated[float | None, "float?"]
    scale: Annotated[float | None, "float?"]
    sinks: Annotated[torch.Tensor | None, "Tensor?"]
    scale_k: Annotated[torch.Tensor | None, "Tensor?"]
    scale_v: Annotated[torch.Tensor | None, "Tensor?"]
    cu_seqlens_q: Annotated[torch.Tensor | None, "Tensor?"]
    cu_seqlens_k: Annotated[torch.Tensor | None, "Tensor?"]
    max_seqlen_q: Annotated[int | None, "SymInt?"]
    max_seqlen_k: Annotated[int | None, "SymInt?"]
    batch_invariant: Annotated[bool, "bool"]
    spec: Annotated[str | None, "str?"]

    def asked(self, out: torch.Tensor | None) -> AttentionDecodeCall:
        """The call."""
        left, right = self.left, self.right
        window = None if left is None and right is None else (left, right)
        given: Any = (*self[:7], window, *self[9:-1], out, self.spec)
        return AttentionDecodeCall(*given)


def _attention_decode(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return run(_Call(*given).asked(None))


def _attention_decode_out(*given: Any, out: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return run(_Call(*given).asked(out))[1]


def _refuse(*given: Any, out: torch.Tensor | None = None) -> None:
    _Call(*given).asked(out).refuse()


def _fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    q = _Call(*given).q
    return torch.empty_like(result_like(q), device=q.device), _fake_out(*given)


def _fake_out(*given: Any, out: torch.Tensor | None = None) -> torch.Tensor:
    call = _Call(*given)
    shape = (call.q.shape[1], call.q.shape[0]) if call.q.dim() == 3 else call.q.shape[:-1]
    return call.q.new_empty(shape, dtype=torch.float32)


register(
    "attention_decode",
    _Call,
    returns="(Tensor, Tensor)",
    run=_attention_decode,
    fake=_fake,
    refuse=_refuse,
)
register(
    "attention_decode_out",
    _Call,
    returns="Tensor",
    run=_attention_decode_out,
    fake=_fake_out,
    written={"out": "Tensor(a!)"},
    refuse=_refuse,
)


def attention_decode(call: AttentionDecodeCall) -> Pair:
    """Run a call as an operator, for a compiler to trace; return out and lse."""
    first = (call.q, call.k, call.v, call.lengths, call.starts, call.page_table, call.causal)
    numbers = (*(call.window or (None, None)), call.softcap, call.scale)
    read = (call.sinks, call.scale_k, call.scale_v, call.cu_seqlens_q, call.cu_seqlens_k)
    bounds = (call.max_seqlen_q, call.max_seqlen_k, call.batch_invariant)
    spec = call.spec.name if isinstance(call.spec, KernelSpec) else call.spec
    given: Any = (*first, *numbers, *read, *bounds, spec)
    if call.out is None:
        result: Pair = torch.ops.warploom.attention_decode(*given)
        return result
    return call.out, torch.ops.warploom.attention_decode_out(*given, out=call.out)
