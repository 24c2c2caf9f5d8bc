"""The operators of GEMM that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. An epilogue
crosses as its kinds, one tensor or none and one number for each item; an amax, which is written,
crosses beside `out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.families.gemm import plan as gemms
from warploom.runtime.families.gemm.batches import broadcast
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.epilogue import Item
from warploom.runtime.families.gemm.operands import differentiated, refuse_grad, requiring_grad
from warploom.runtime.families.gemm.result import result_type
from warploom.runtime.operator_schema import arguments


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


_ARGUMENTS = arguments(_Call)
_library: Any = torch.library.Library("warploom", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(f"gemm({_ARGUMENTS}) -> Tensor")
_library.define(f"gemm_out({_ARGUMENTS}, *, Tensor(a!) out, Tensor(b!)? amax=None) -> ()")
_library.define("gemm_refused(Tensor a, Tensor b, ScalarType out_dtype, SymInt[] found) -> Tensor")

SCALARS = ("scale", "scale_a", "scale_b", "scale_d")  # kinds whose value may be a number
_TENSOR_KINDS = ("scale_row", "scale_column", "bias", "residual")
_TENSOR = "_tensor"  # after the kind of a scale that is one


def _flatten(listed: Sequence[Item]) -> tuple[list[str], list[torch.Tensor], list[float]]:
    kinds: list[str] = []
    operands: list[torch.Tensor] = []
    numbers: list[float] = []
    for item in listed:
        kind, value = item[0], item[1]
        if kind == "amax":
            kinds.append(kind)
        elif isinstance(value, torch.Tensor):
            kinds.append(kind + _TENSOR if kind in SCALARS else kind)
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
        elif kind in _TENSOR_KINDS or kind.endswith(_TENSOR):
            listed.append((kind.removesuffix(_TENSOR), next(tensor)))
        elif kind in SCALARS:
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
    listed = _listed(call, amax)
    with torch.no_grad():
        return gemms.gemm(
            GemmCall(call.a, call.b, listed, out, call.out_dtype, call.accumulation, found)
        )


def _gemm(*given: Any) -> torch.Tensor:
    return _run(_Call(*given))


def _gemm_out(*given: Any, out: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    _run(_Call(*given), out, amax)


def _refused(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, found: Sequence[int]
) -> NoReturn:
    raise differentiated(found)


def _refuse_grad(*given: Any, out: torch.Tensor | None, amax: torch.Tensor | None) -> None:
    if torch.is_grad_enabled():
        refuse_grad(given[0], given[1], out, _listed(_Call(*given), amax))


def _gemm_autograd(*given: Any) -> torch.Tensor:
    _refuse_grad(*given, out=None, amax=None)
    with torch._C._AutoDispatchBelowAutograd():
        result: torch.Tensor = torch.ops.warploom.gemm(*given)
    return result


def _gemm_out_autograd(*given: Any, out: torch.Tensor, amax: torch.Tensor | None = None) -> None:
    _refuse_grad(*given, out=out, amax=amax)
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.warploom.gemm_out(*given, out=out, amax=amax)


for _key in ("CUDA", "CPU"):
    _library.impl("gemm", _gemm, _key)
    _library.impl("gemm_out", _gemm_out, _key)
    _library.impl("gemm_refused", _refused, _key)
_library.impl("gemm", _gemm_autograd, "Autograd")
_library.impl("gemm_out", _gemm_out_autograd, "Autograd")


@torch.library.register_fake("warploom::gemm", lib=_library)  # type: ignore[untyped-decorator]
def _fake(*given: Any) -> torch.Tensor:
    call = _Call(*given)
    return _made(call.a, call.b, call.out_dtype)


def _made(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((*broadcast(a, b), a.shape[-2], b.shape[-1]), dtype=out_dtype)


@torch.library.register_fake(  # type: ignore[untyped-decorator]
    "warploom::gemm_refused", lib=_library
)
def _fake_refused(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, found: Sequence[int]
) -> torch.Tensor:
    return _made(a, b, out_dtype)


@torch.library.register_fake("warploom::gemm_out", lib=_library)  # type: ignore[untyped-decorator]
def _fake_out(*given: Any, out: torch.Tensor, amax: torch.Tensor | None = None) -> None:
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

    Raises ProblemError for more than one amax, which only eager calls take, and for what requires
    grad. Dynamo would make another error of that one, so there an operator raises it, as soon as
    the compiled function runs.
    """
    asked = result_type(a, out, out_dtype, len(listed) > 0)
    found = requiring_grad(a, b, out, listed) if torch.is_grad_enabled() else None
    if found is not None:
        if not torch.compiler.is_dynamo_compiling():
            raise differentiated(found.shape)
        refused: torch.Tensor = torch.ops.warploom.gemm_refused(
            a.detach(), b.detach(), asked, found.shape
        )
        if out is not None:
            out.detach().copy_(refused)
        return refused
    amaxes = [item[1] for item in listed if item[0] == "amax"]
    if len(amaxes) > 1:
        raise ProblemError(
            f"an epilogue with {len(amaxes)} amax under torch.compile",
            rule="must be one at most",
            fix="call warploom.gemm outside of the compiled function",
        )
    name = spec.name if isinstance(spec, KernelSpec) else spec
    given = _Call(a, b, *_flatten(listed), asked, accumulation, name)
    if out is None and not amaxes:
        result: torch.Tensor = torch.ops.warploom.gemm(*given)
        return result
    out = _made(a, b, asked) if out is None else out
    torch.ops.warploom.gemm_out(*given, out=out, amax=amaxes[0] if amaxes else None)
    return out
