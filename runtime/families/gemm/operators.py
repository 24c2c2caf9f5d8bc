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
from warploom.runtime.families.gemm.gradient import differentiate
from warploom.runtime.families.gemm.gradient_rule import (
    GradientOptions,
    Preactivation,
    numbers_of,
    rule,
)
from warploom.runtime.families.gemm.operands import (
    refuse_grad,
    requiring_grad,
    unseen,
    written_unseen,
)
from warploom.runtime.families.gemm.result import result_type
from warploom.runtime.families.gemm.steps import KINDS, flatten, step_of, unflatten
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


class _Gradients(NamedTuple):
    """How gradients are computed."""

    preactivation: Annotated[Preactivation, "str"] = "save"
    accumulate_into: Annotated[torch.Tensor | None, "Tensor?"] = None
    gradient_dtype: Annotated[torch.dtype | None, "ScalarType?"] = None


class _Outputs(NamedTuple):
    """The outputs of steps as they were before; the operator returns them as they are then."""

    written_kinds: Annotated[Sequence[str], "str[]"]
    written: Annotated[Sequence[torch.Tensor], "Tensor[]"]


class _Refused(NamedTuple):
    """What the operator takes that raises; `name` is that of an output that requires grad."""

    a: Annotated[torch.Tensor, "Tensor"]
    b: Annotated[torch.Tensor, "Tensor"]
    out_dtype: Annotated[torch.dtype, "ScalarType"]
    name: Annotated[str, "str"]


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


_WIDTH = len(_Call._fields)


def _gemm(*given: Any) -> torch.Tensor:
    return _run(_Call(*given[:_WIDTH]), None, {})


def _gemm_outputs(*given: Any) -> list[torch.Tensor]:
    call, outputs = _Call(*given[:_WIDTH]), _Outputs(*given[_WIDTH : _WIDTH + 2])
    written = [one.clone() for one in outputs.written]
    return [_run(call, None, dict(zip(outputs.written_kinds, written, strict=True))), *written]


def _gemm_out(*given: Any, out: torch.Tensor, **written: torch.Tensor | None) -> None:
    _run(_Call(*given), out, written)


def _refused(*given: Any) -> NoReturn:
    raise unseen(_Refused(*given).name)


def _refuse_grad(
    *given: Any, out: torch.Tensor | None = None, **written: torch.Tensor | None
) -> None:
    if torch.is_grad_enabled():
        refuse_grad(given[0], given[1], out, _listed(_Call(*given), written))


def _made(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((*broadcast(a, b), a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _fake(*given: Any) -> torch.Tensor:
    call = _Call(*given[:_WIDTH])
    return _made(call.a, call.b, call.out_dtype)


def _fake_outputs(*given: Any) -> list[torch.Tensor]:
    outputs = _Outputs(*given[_WIDTH : _WIDTH + 2])
    return [_fake(*given), *map(torch.empty_like, outputs.written)]


def _fake_out(*given: Any, **written: torch.Tensor | None) -> None:
    return None


def _fake_refused(*given: Any) -> torch.Tensor:
    call = _Refused(*given)
    return _made(call.a, call.b, call.out_dtype)


# ---- Autograd ------------------------------------------------------------------------------------


def _save(
    ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
    inputs: tuple[Any, ...],
    output: object,
) -> None:
    call = _Call(*inputs[:_WIDTH])
    asked = _Gradients(*inputs[_WIDTH + len(_Outputs._fields) :])
    read = [item for item in _listed(call, {}) if not step_of(item).step.auxiliary]
    tensors = (call.a, call.b, *call.operands)
    ctx.rule = rule(tensors, read, tuple(one.requires_grad for one in tensors))
    ctx.save_for_backward(*[tensors[place] for place in ctx.rule.kept])
    ctx.set_materialize_grads(False)
    ctx.numbers = numbers_of(read)
    dtype = asked.gradient_dtype or torch.bfloat16
    ctx.options = GradientOptions(call.accumulation, dtype, asked.accumulate_into)
    ctx.none = [[] if isinstance(one, list | tuple) and not one else None for one in inputs]


def _differentiate(ctx: Any, *arriving: Any) -> tuple[object, ...]:  # noqa: ANN401
    dd = arriving[0][0] if isinstance(arriving[0], list | tuple) else arriving[0]
    if dd is None:
        return tuple(ctx.none)
    found = differentiate(ctx.rule, ctx.numbers, ctx.options, dd, *ctx.saved_tensors)
    results = list(ctx.none)
    results[:2], results[_Call._fields.index("operands")] = found[:2], list(found[2:])
    return tuple(results)


register(
    "gemm",
    _Call,
    returns="Tensor",
    run=_gemm,
    fake=_fake,
    backward=_differentiate,
    save=_save,
)
register(
    "gemm_outputs",
    _Call,
    _Outputs,
    _Gradients,
    returns="Tensor[]",
    run=_gemm_outputs,
    fake=_fake_outputs,
    backward=_differentiate,
    save=_save,
)
register(
    "gemm_out",
    _Call,
    returns="()",
    run=_gemm_out,
    fake=_fake_out,
    written=_WRITTEN,
    refuse=_refuse_grad,
)
register("gemm_unseen", _Refused, returns="Tensor", run=_refused, fake=_fake_refused)


def call(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    accumulation: Accumulation,
    spec: KernelSpec | str | None,
    *gradients: Any,
) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace; `gradients` are those of `_Gradients`.

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    `out` with what requires grad. Dynamo would make another error of that one, so there an operator
    raises it, as soon as the compiled function runs.
    """
    asked = result_type(a, out, out_dtype, len(listed) > 0)
    wanted = torch.is_grad_enabled() and requiring_grad(a, b, out, listed) is not None
    name = written_unseen(a, b, out, listed) if wanted else None
    if name is not None:
        if not torch.compiler.is_dynamo_compiling():
            raise unseen(name)
        return _refuse(a, b, out, asked, name)
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
    kernel = spec.name if isinstance(spec, KernelSpec) else spec
    given = _Call(a, b, flat.words, flat.tensors, flat.numbers, asked, accumulation, kernel)
    asked_of_gradients = _Gradients(*gradients)
    if wanted and (written or asked_of_gradients != _Gradients()):
        return _outputs(given, asked_of_gradients, written)
    if out is None and not written:
        result: torch.Tensor = torch.ops.warploom.gemm(*given)
        return result
    out = _made(a, b, asked) if out is None else out
    torch.ops.warploom.gemm_out(*given, out=out, **written)
    return out


def _refuse(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, dtype: torch.dtype, name: str
) -> torch.Tensor:
    refused: torch.Tensor = torch.ops.warploom.gemm_unseen(a.detach(), b.detach(), dtype, name)
    if out is not None:
        out.detach().copy_(refused)
    return refused


def _outputs(
    given: _Call, gradients: _Gradients, written: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Run a call for autograd, whose operators write to nothing: what steps write is copied."""
    outputs = _Outputs(list(written), list(written.values()))
    d: torch.Tensor
    d, *found = torch.ops.warploom.gemm_outputs(*given, *outputs, *gradients)
    for one, new in zip(written.values(), found, strict=True):
        one.copy_(new.detach())
    return d
