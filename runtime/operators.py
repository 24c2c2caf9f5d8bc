"""The operators that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. An epilogue
crosses as its kinds, one tensor or none and one number for each item; `causal` as the name of its
alignment, "equal" being that of True.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime import attention as attentions
from warploom.runtime import gemm as gemms
from warploom.runtime.attention_operands import ordered_strides
from warploom.runtime.attention_problem import Alignment, Call, Window
from warploom.runtime.epilogue import Item

_library: Any = torch.library.Library("warploom", "FRAGMENT")  # type: ignore[no-untyped-call]
_ARGUMENTS = (
    "Tensor a, Tensor b, str[] kinds, Tensor[] operands, float[] numbers, ScalarType out_dtype, "
    "str? spec"
)
_library.define(f"gemm({_ARGUMENTS}) -> Tensor")
_library.define(f"gemm_out({_ARGUMENTS}, *, Tensor(a!) out) -> ()")

_TENSOR_KINDS = ("scale_tensor", "scale_row", "scale_column", "bias", "residual")


def _flatten(listed: Sequence[Item]) -> tuple[list[str], list[torch.Tensor], list[float]]:
    kinds: list[str] = []
    operands: list[torch.Tensor] = []
    numbers: list[float] = []
    for item in listed:
        kind, value = item[0], item[1]
        if isinstance(value, torch.Tensor):
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


def _listed(
    kinds: Sequence[str], operands: Sequence[torch.Tensor], numbers: Sequence[float]
) -> list[Item]:
    tensor, number = iter(operands), iter(numbers)
    listed: list[Item] = []
    for kind in kinds:
        if kind == "residual":
            listed.append((kind, next(tensor), next(number)))
        elif kind in _TENSOR_KINDS:
            listed.append((kind.replace("_tensor", ""), next(tensor)))
        elif kind == "scale":
            listed.append((kind, next(number)))
        else:
            listed.append(("activation", kind))
    return listed


def _gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    kinds: Sequence[str],
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out_dtype: torch.dtype,
    spec: str | None,
) -> torch.Tensor:
    found = parse_name(spec) if spec else None
    with torch.no_grad():
        return gemms.gemm(a, b, _listed(kinds, operands, numbers), None, out_dtype, found)


def _gemm_out(
    a: torch.Tensor,
    b: torch.Tensor,
    kinds: Sequence[str],
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out_dtype: torch.dtype,
    spec: str | None,
    *,
    out: torch.Tensor,
) -> None:
    found = parse_name(spec) if spec else None
    with torch.no_grad():
        gemms.gemm(a, b, _listed(kinds, operands, numbers), out, out_dtype, found)


for _key in ("CUDA", "CPU"):
    _library.impl("gemm", _gemm, _key)
    _library.impl("gemm_out", _gemm_out, _key)


@torch.library.register_fake("warploom::gemm", lib=_library)  # type: ignore[untyped-decorator]
def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    kinds: Sequence[str],
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out_dtype: torch.dtype,
    spec: str | None,
) -> torch.Tensor:
    return a.new_empty((*a.shape[:-1], b.shape[1]), dtype=out_dtype)


@torch.library.register_fake("warploom::gemm_out", lib=_library)  # type: ignore[untyped-decorator]
def _fake_out(
    a: torch.Tensor,
    b: torch.Tensor,
    kinds: Sequence[str],
    operands: Sequence[torch.Tensor],
    numbers: Sequence[float],
    out_dtype: torch.dtype,
    spec: str | None,
    *,
    out: torch.Tensor,
) -> None:
    return None


def call(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | str | None,
) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace."""
    kinds, operands, numbers = _flatten(listed)
    name = spec.name if isinstance(spec, KernelSpec) else spec
    asked = gemms.result_type(a, out, out_dtype, len(listed) > 0)
    if out is None:
        result: torch.Tensor = torch.ops.warploom.gemm(a, b, kinds, operands, numbers, asked, name)
        return result
    torch.ops.warploom.gemm_out(a, b, kinds, operands, numbers, asked, name, out=out)
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
