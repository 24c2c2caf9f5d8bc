"""The operator that torch.compile sees, registered with torch.library; eager calls pass it by."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.families.attention_merge.call import AttentionMergeCall, made
from warploom.runtime.families.attention_merge.reference import Results
from warploom.runtime.operator import register
from warploom.runtime.plan import run


class _Call(NamedTuple):
    """What the operator takes, in order, each with its type in its schema."""

    out_a: Annotated[torch.Tensor, "Tensor"]
    lse_a: Annotated[torch.Tensor, "Tensor"]
    out_b: Annotated[torch.Tensor, "Tensor"]
    lse_b: Annotated[torch.Tensor, "Tensor"]
    out_dtype: Annotated[torch.dtype | None, "ScalarType?"]
    spec: Annotated[str | None, "str?"]


def _asked(given: _Call) -> AttentionMergeCall:
    spec = parse_name(given.spec) if given.spec else None
    out_a, lse_a, out_b, lse_b, out_dtype, _ = given
    return AttentionMergeCall(out_a, lse_a, out_b, lse_b, None, None, out_dtype, spec)


def _run(*given: Any) -> Results:
    with torch.no_grad():
        return run(_asked(_Call(*given)))


def _fake(*given: Any) -> Results:
    call = _Call(*given)
    dtype = call.out_dtype or call.out_a.dtype
    return made(call.out_a, dtype), torch.empty_like(call.lse_a)


def _refuse(*given: Any) -> None:
    _asked(_Call(*given)).refuse()


register("attention_merge", _Call, returns="(Tensor, Tensor)", run=_run, fake=_fake, refuse=_refuse)


def call(
    operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    out: torch.Tensor | None,
    lse: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | str | None,
) -> Results:
    """Run the call as an operator, for a compiler to trace; `out` and `lse` are copied to."""
    name = spec.name if isinstance(spec, KernelSpec) else spec
    if out_dtype is None and out is not None:
        out_dtype = out.dtype
    given = _Call(*operands, out_dtype, name)
    found, logs = torch.ops.warploom.attention_merge(*given)
    return (
        found if out is None else out.copy_(found),
        logs if lse is None else lse.copy_(logs),
    )
