"""The operators that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. An epilogue
crosses as its kinds, one tensor or none and one number for each item; an amax, which is written,
crosses beside `out`. `causal` crosses as the name of its alignment, "equal" being that of True.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch

from warploom.errors import ProblemError
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime import attention as attentions
from warploom.runtime import gemm as gemms
from warploom.runtime.attention_operands import ordered_strides
from warploom.runtime.attention_problem import Alignment, Call, Window
from warploom.runtime.batches import broadcast
from warploom.runtime.epilogue import Item
from warploom.runtime.gemm_problem import Options
from warploom.runtime.gemm_result import result_type


class _Call(NamedTuple):
    """What both operators take, in order, each with its type in their schemas."""

    a: Annotated[torch.Tensor, "Tensor"]
    b: Annotated[torch.Tensor, "Tensor"]
    kinds: Annotated[Sequence[str], "str[]"]
    operands: Annotated[Sequence[torch.Tensor], "Tensor[]"]
    numbers: Annotated[Sequence[float], "float[]"]
    out_dtype: Annotated[torch.dtype, "ScalarType"]
    accumulation: Annotated[Accumulation, "str"]
    spec: Annotated[str | None, "str?"]


_ARGUMENTS = ", ".join(
    f"{annotation.__metadata__[0]} {name}"
    for name, annotation in get_type_hints(_Call, include_extras=True).items()
)
_library: Any = torch.library.Library("warploom", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"gemm({_ARGUMENTS}) -> Tensor")
_library.define(f"gemm_out({_ARGUMENTS}, *, Tensor(a!) out, Tensor(b!)? amax=None) -> ()")

_TENSOR_KINDS = ("scale_tensor", "scale_row", "scale_column", "bias", "residual")


def _flatten(listed: Sequence[Item]) -> tuple[list[str], list[torch.Tensor], list[float]]:
    kinds: list[str] = []
    operands: list[torch.Tensor] = []
    numbers: list[float] = []
    for item in listed:
        kind, value = item[0], item[1]
        if kind == "amax":
            kinds.append(kind)
        elif isinstance(value, torch.Tensor):
            kinds.append("scale_tensor" if kind == "scale" else kind)
            operands.append(value)
        elif kind == "activation":
            kinds.append(value)
        else:
            kinds.append(kind)
            numbers.append(float(value))
        if kind == "residual":
            numbers.append(float(item[2]))
    return kinds, operands, numbers


def _listed(call: _Call, amax: torch.Tensor | None) -> list[Item]:
    tensor, number = iter(call.operands), iter(call.numbers)
    listed: list[Item] = []
    for kind in call.kinds:
        if kind == "residual":
            listed.append((kind, next(tensor), next(number)))
        elif kind in _TENSOR_KINDS:
            listed.append((kind.replace("_tensor", ""), next(tensor)))
        elif kind == "scale":
            listed.append((kind, next(number)))
        elif kind == "amax":
            listed.append((kind, amax))
        else:
            listed.append(("activation", kind))
    return listed


def _run(
    call: _Call, out: torch.Tensor | None = None, amax: torch.Tensor | None = None
) -> torch.Tensor:
    found = parse_name(call.spec) if call.spec else None
    options = Options(call.out_dtype, call.accumulation, found)
    with torch.no_grad():
        return gemms.gemm(call.a, call.b, _listed(call, amax), out, options)


def _gemm(*arguments: Any) -> torch.Tensor:
    return _run(_Call(*arguments))


def _gemm_out(*arguments: Any, out: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    _run(_Call(*arguments), out, amax)


for _key in ("CUDA", "CPU"):
    _library.impl("gemm", _gemm, _key)
    _library.impl("gemm_out", _gemm_out, _key)


@torch.library.register_fake("warploom::gemm", lib=_library)  # type: ignore[untyped-decorator]
def _fake(*arguments: Any) -> torch.Tensor:
    call = _Call(*arguments)
    return _made(call.a, call.b, call.out_dtype)


def _made(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((*broadcast(a, b), a.shape[-2], b.shape[-1]), dtype=out_dtype)


@torch.library.register_fake("warploom::gemm_out", lib=_library)  # type: ignore[untyped-decorator]
def _fake_out(*arguments: Any, out: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    return None


def call(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    accumulation: Accumulation,
    spec: KernelSpec | str | None,
) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace.

    Raises ProblemError for more than one amax, which only eager calls take.
    """
    amaxes = [item[1] for item in listed if item[0] == "amax"]
    if len(amaxes) > 1:
        raise ProblemError(
            f"an epilogue with {len(amaxes)} amax under torch.compile",
            rule="is one at most",
            fix="call warploom.gemm outside of the compiled function",
        )
    name = spec.name if isinstance(spec, KernelSpec) else spec
    asked = result_type(a, out, out_dtype, len(listed) > 0)
    arguments = _Call(a, b, *_flatten(listed), asked, accumulation, name)
    if out is None and not amaxes:
        result: torch.Tensor = torch.ops.warploom.gemm(*arguments)
        return result
    out = _made(a, b, asked) if out is None else out
    torch.ops.warploom.gemm_out(*arguments, out=out, amax=amaxes[0] if amaxes else None)
    return out


# ---- Attention -----------------------------------------------------------------------------------

_ATTENTION_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, str? causal, SymInt? left, SymInt? right, float? softcap, "
    "float? scale, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, SymInt? max_seqlen_q, "
    "SymInt? max_seqlen_k, str? spec"
)
_library.define(f"attention({_ATTENTION_ARGUMENTS}) -> (Tensor, Tensor)")
# Not called `out`: torch.compile refuses operators with a strided one.
_library.define(f"attention_into({_ATTENTION_ARGUMENTS}, Tensor(a!) result) -> Tensor")

_NAMES: dict[bool | str, str | None] = {False: None, True: "equal"}


def _call(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: str | None,
    left: int | None,
    right: int | None,
    softcap: float | None,
    scale: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    spec: str | None,
    result: torch.Tensor | None = None,
) -> Call:
    """The call that an operator's arguments stand for."""
    aligned: Any = causal == "equal" if causal in (None, "equal") else causal
    window = None if left is None and right is None else (left, right)
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return Call(q, k, v, aligned, window, softcap, scale, *lengths, result, spec)


def _attention(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.no_grad():
        return attentions.attention(_call(*arguments))


def _attention_into(*arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        return attentions.attention(_call(*arguments))[1]


for _key in ("CUDA", "CPU"):
    _library.impl("attention", _attention, _key)
    _library.impl("attention_into", _attention_into, _key)


@torch.library.register_fake("warploom::attention", lib=_library)  # type: ignore[untyped-decorator]
def _fake_attention(q: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty_strided(q.shape, ordered_strides(q)), _fake_attention_into(q, *rest)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "warploom::attention_into", lib=_library
)
def _fake_attention_into(q: torch.Tensor, *rest: Any) -> torch.Tensor:
    shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
    return q.new_empty(shape, dtype=torch.float32)


def call_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool | Alignment,
    window: Window | None,
    softcap: float | None,
    scale: float | None,
    cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
    out: torch.Tensor | None,
    spec: KernelSpec | str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an attention as an operator, for a compiler to trace; return out and lse."""
    left, right = window or (None, None)
    name = spec.name if isinstance(spec, KernelSpec) else spec
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    aligned = _NAMES.get(causal, causal)
    arguments = (q, k, v, aligned, left, right, softcap, scale, *lengths, name)
    if out is None:
        result: tuple[torch.Tensor, torch.Tensor] = torch.ops.warploom.attention(*arguments)
        return result
    return out, torch.ops.warploom.attention_into(*arguments, out)
