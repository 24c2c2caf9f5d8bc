"""The operators of GEMM that torch.compile sees, registered with torch.library.

Eager calls do not pass here: a torch operator costs several microseconds a call. An epilogue
crosses as its steps flatten it: a word for each, and their tensors and numbers; outputs of steps,
which are written, cross beside `out`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, NoReturn

import torch

from warploom.errors import ProblemError
from warploom.generator.families.gemm import Accumulation
from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.families.gemm import plan as gemms
from warploom.runtime.families.gemm.batches import broadcast
from warploom.runtime.families.gemm.call import GemmCall
from warploom.runtime.families.gemm.operands import differentiated, refuse_grad, requiring_grad
from warploom.runtime.families.gemm.result import result_type
from warploom.runtime.families.gemm.steps import KINDS, flatten, unflatten
from warploom.runtime.families.gemm.steps.step import Given, Item
from warploom.runtime.operator import register


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


class _Refused(NamedTuple):
    """What the operator takes that raises; `found` is the shape of what requires grad."""

    a: Annotated[torch.Tensor, "Tensor"]
    b: Annotated[torch.Tensor, "Tensor"]
    out_dtype: Annotated[torch.dtype, "ScalarType"]
    found: Annotated[Sequence[int], "SymInt[]"]


_AUXILIARY = [kind for kind, one in KINDS.items() if one.step.auxiliary]
_WRITTEN = {
    "out": "Tensor(a!)",
    **{kind: f"Tensor({chr(ord('b') + i)}!)?" for i, kind in enumerate(_AUXILIARY)},
}


def _listed(call: _Call, written: Mapping[str, torch.Tensor | None]) -> list[Item]:
    return unflatten(call.kinds, Given(iter(call.operands), iter(call.numbers), written))


def _run(
    call: _Call, out: torch.Tensor | None, written: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    found = parse_name(call.spec) if call.spec else None
    listed = _listed(call, written)
    with torch.no_grad():
        return gemms.gemm(
            GemmCall(call.a, call.b, listed, out, call.out_dtype, call.accumulation, found)
        )


def _gemm(*given: Any) -> torch.Tensor:
    return _run(_Call(*given), None, {})


def _gemm_out(*given: Any, out: torch.Tensor, **written: torch.Tensor | None) -> None:
    _run(_Call(*given), out, written)


def _refused(*given: Any) -> NoReturn:
    raise differentiated(_Refused(*given).found)


def _refuse_grad(
    *given: Any, out: torch.Tensor | None = None, **written: torch.Tensor | None
) -> None:
    if torch.is_grad_enabled():
        refuse_grad(given[0], given[1], out, _listed(_Call(*given), written))


def _made(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((*broadcast(a, b), a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _fake(*given: Any) -> torch.Tensor:
    call = _Call(*given)
    return _made(call.a, call.b, call.out_dtype)


def _fake_out(*given: Any, **written: torch.Tensor | None) -> None:
    return None


def _fake_refused(*given: Any) -> torch.Tensor:
    call = _Refused(*given)
    return _made(call.a, call.b, call.out_dtype)


register("gemm", _Call, returns="Tensor", run=_gemm, fake=_fake, refuse=_refuse_grad)
register(
    "gemm_out",
    _Call,
    returns="()",
    run=_gemm_out,
    fake=_fake_out,
    written=_WRITTEN,
    refuse=_refuse_grad,
)
register("gemm_refused", _Refused, returns="Tensor", run=_refused, fake=_fake_refused)


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

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    what requires grad. Dynamo would make another error of that one, so there an operator raises it,
    as soon as the compiled function runs.
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
    flat = flatten(listed)
    written = dict(flat.written)
    if len(written) < len(flat.written):
        kinds = [kind for kind, _ in flat.written]
        often = max(kinds, key=kinds.count)
        raise ProblemError(
            f"an epilogue with {kinds.count(often)} {often} under torch.compile",
            rule="must be one at most",
            fix="call warploom.gemm outside of the compiled function",
        )
    name = spec.name if isinstance(spec, KernelSpec) else spec
    given = _Call(a, b, flat.words, flat.tensors, flat.numbers, asked, accumulation, name)
    if out is None and not written:
        result: torch.Tensor = torch.ops.warploom.gemm(*given)
        return result
    out = _made(a, b, asked) if out is None else out
    torch.ops.warploom.gemm_out(*given, out=out, **written)
    return out
