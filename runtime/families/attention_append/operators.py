"""The operator that torch.compile sees, registered with torch.library; eager calls pass it by."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.families.attention_append.call import AttentionAppendCall
from warploom.runtime.operator import register
from warploom.runtime.plan import run

Optional = torch.Tensor | None


class _Call(NamedTuple):
    """What the operator takes, in order, each with its type in its schema."""

    k_cache: Annotated[torch.Tensor, "Tensor(a!)"]
    v_cache: Annotated[torch.Tensor, "Tensor(b!)"]
    k: Annotated[torch.Tensor, "Tensor"]
    v: Annotated[torch.Tensor, "Tensor"]
    lengths: Annotated[torch.Tensor, "Tensor"]
    page_table: Annotated[Optional, "Tensor?"]
    cu_seqlens: Annotated[Optional, "Tensor?"]
    q: Annotated[Optional, "Tensor?"]
    cos: Annotated[Optional, "Tensor?"]
    sin: Annotated[Optional, "Tensor?"]
    interleaved: Annotated[bool, "bool"]
    scale_k: Annotated[Optional, "Tensor?"]
    scale_v: Annotated[Optional, "Tensor?"]
    spec: Annotated[str | None, "str?"]


Q = _Call._fields.index("q")
WRITTEN = {
    "scales_k": "Tensor(c!)?",  # of tokens; those that are given are `scale_k`
    "scales_v": "Tensor(d!)?",
    "lengths_after": "Tensor(e!)?",
}


def _asked(given: tuple[Any, ...], written: dict[str, Optional]) -> AttentionAppendCall:
    *operands, scale_k, scale_v, name = given
    scales = written.get("scales_k"), written.get("scales_v")
    scale_k, scale_v = scales if scales[0] is not None else (scale_k, scale_v)
    others: dict[str, Any] = {"scale_k": scale_k, "scale_v": scale_v}
    others |= {"lengths_after": written.get("lengths_after")}
    others |= {"spec": parse_name(name) if name else None}
    return AttentionAppendCall(*operands, **others)


def _run(*given: Any, **written: Optional) -> torch.Tensor:
    with torch.no_grad():
        found = run(_asked(given, written))
    return _Call(*given).k.new_empty(0) if found is None else found


def _fake(*given: Any, **written: Optional) -> torch.Tensor:
    call = _Call(*given)
    return call.k.new_empty(0 if call.q is None else call.q.shape)


def _refuse(*given: Any, **written: Optional) -> None:
    _asked(given, written).refuse()


register(
    "attention_append",
    _Call,
    returns="Tensor",
    run=_run,
    fake=_fake,
    written=WRITTEN,
    refuse=_refuse,
)


def call(
    given: tuple[Any, ...],
    scale_k: Optional,
    scale_v: Optional,
    lengths_after: Optional,
    out: Optional,
    spec: KernelSpec | str | None,
) -> Optional:
    """Run the call as an operator, for a compiler to trace; `out` is copied to.

    `given` is what the call begins with, as far as `interleaved`.
    """
    name = spec.name if isinstance(spec, KernelSpec) else spec
    read, scales_k, scales_v = (scale_k, scale_v), None, None
    if scale_k is not None and scale_k.dim() == 3:  # of tokens: written
        read, scales_k, scales_v = (None, None), scale_k, scale_v
    found: torch.Tensor = torch.ops.warploom.attention_append(
        *given, *read, name, scales_k=scales_k, scales_v=scales_v, lengths_after=lengths_after
    )
    if given[Q] is None:
        return None
    return found if out is None else out.copy_(found)
