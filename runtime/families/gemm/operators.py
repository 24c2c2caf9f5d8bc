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
from warploom.runtime.families._product.epilogue import unseen
from warploom.runtime.families._product.operands import broadcast, result_type
from warploom.runtime.families._product.steps import KINDS, flatten
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.families.gemm import plan as gemms
from warploom.runtime.families.gemm import vmap
from warploom.runtime.families.gemm.call import (
    GemmCall,
    refuse_grad,
    requiring_grad,
    written_unseen,
)
from warploom.runtime.families.gemm.gradient_rule import (
    FLOATS,
    Preactivation,
    kept_type,
    storing_items,
    tensors_of,
    way_of,
)
from warploom.runtime.families.gemm.graph_trees import keep_in_place, refuse_copied
from warploom.runtime.families.gemm.operator_gradients import (
    WIDTH,
    Call,
    Gradients,
    Outputs,
    backward,
    listed_of,
    save,
)
from warploom.runtime.operator import is_distributed, register


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


def _run(
    call: Call, out: torch.Tensor | None, written: Mapping[str, torch.Tensor | None]
) -> torch.Tensor:
    found = parse_name(call.spec) if call.spec else None
    listed = listed_of(call, written)
    with torch.no_grad():
        return gemms.gemm(
            GemmCall(call.a, call.b, listed, out, call.out_dtype, call.accumulation, found)
        )


def _gemm(*given: Any) -> torch.Tensor:
    return _run(Call(*given[:WIDTH]), None, {})


def _gemm_outputs(*given: Any) -> list[torch.Tensor]:
    call, outputs = Call(*given[:WIDTH]), Outputs(*given[WIDTH : WIDTH + 2])
    asked = Gradients(*given[WIDTH + 2 :])
    if asked.accumulate_into is not None:
        refuse_copied(asked.accumulate_into)
    written = [
        torch.empty_like(one) if KINDS[kind].overwrites else one.clone()
        for kind, one in zip(outputs.written_kinds, outputs.written, strict=True)
    ]
    return [_run(call, None, dict(zip(outputs.written_kinds, written, strict=True))), *written]


def _gemm_out(*given: Any, out: torch.Tensor, **written: torch.Tensor | None) -> None:
    _run(Call(*given), out, written)


def _refused(*given: Any) -> NoReturn:
    raise unseen(_Refused(*given).name)


def _refuse_grad(
    *given: Any, out: torch.Tensor | None = None, **written: torch.Tensor | None
) -> None:
    if torch.is_grad_enabled():
        refuse_grad(given[0], given[1], out, listed_of(Call(*given), written))


def _made(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    return a.new_empty((*broadcast(a, b), a.shape[-2], b.shape[-1]), dtype=out_dtype)


def _fake(*given: Any) -> torch.Tensor:
    call = Call(*given[:WIDTH])
    return _made(call.a, call.b, call.out_dtype)


def _fake_outputs(*given: Any) -> list[torch.Tensor]:
    outputs = Outputs(*given[WIDTH : WIDTH + 2])
    return [_fake(*given), *map(torch.empty_like, outputs.written)]


def _fake_out(*given: Any, **written: torch.Tensor | None) -> None:
    return None


def _fake_refused(*given: Any) -> torch.Tensor:
    call = _Refused(*given)
    return _made(call.a, call.b, call.out_dtype)


register(
    "gemm",
    Call,
    returns="Tensor",
    run=_gemm,
    fake=_fake,
    backward=backward,
    save=save,
    vmap=vmap.gemm,
)
register(
    "gemm_outputs",
    Call,
    Outputs,
    Gradients,
    returns="Tensor[]",
    run=_gemm_outputs,
    fake=_fake_outputs,
    backward=backward,
    save=save,
    vmap=vmap.gemm_outputs,
)
register(
    "gemm_out",
    Call,
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
    preactivation: Preactivation = "recompute",
    accumulate_into: torch.Tensor | None = None,
    gradient_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Run the call as an operator, for a compiler to trace. Arguments are those of `GemmCall`.

    Raises ProblemError for more than one output of a kind, which only eager calls take, and for
    `out` with what requires grad. Dynamo would make another error of that one, so there an operator
    raises it, as soon as the compiled function runs.
    """
    if is_distributed(a) or is_distributed(b):
        from warploom.runtime.families.gemm import sharding  # noqa: F401 (registers the rules)
    asked = result_type(a, out, out_dtype, len(listed) > 0)
    wanted = torch.is_grad_enabled() and requiring_grad(a, b, out, listed) is not None
    name = written_unseen(a, b, out, listed) if wanted else None
    if name is not None:
        if not torch.compiler.is_dynamo_compiling():
            raise unseen(name)
        return _refuse(a, b, out, asked, name)
    if accumulate_into is not None and torch.compiler.is_dynamo_compiling():
        keep_in_place(accumulate_into)
    gradients = Gradients("recompute", accumulate_into, gradient_dtype)
    z: torch.Tensor | None = None
    if wanted and _saves(a, b, listed, asked, spec, preactivation):
        kept = kept_type(asked, a.dtype)
        z = a.new_empty((), dtype=kept).expand(_made(a, b, asked).shape)
        listed, gradients = storing_items(listed, z), gradients._replace(preactivation="save")
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
    given = Call(a, b, flat.words, flat.tensors, flat.numbers, asked, accumulation, kernel)
    if wanted and (written or accumulate_into is not None or gradient_dtype is not None):
        return _outputs(given, gradients, written)
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


def _saves(
    a: torch.Tensor,
    b: torch.Tensor,
    listed: Sequence[Item],
    dtype: torch.dtype,
    spec: object,
    preactivation: Preactivation,
) -> bool:
    """True for a call that stores what its activation is given; what is exported does not."""
    if spec is not None or preactivation == "recompute" or torch.compiler.is_exporting():
        return False
    needed = [one.requires_grad for one in tensors_of(a, b, listed)]
    stored = dtype in FLOATS
    return way_of(listed, needed, preactivation="save", stored=stored) == "save"


def _outputs(
    given: Call, gradients: Gradients, written: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """Run a call for autograd, whose operators write to nothing: what steps write is copied.

    What is kept for the backward pass only comes last.
    """
    kinds = sorted(written, key=lambda kind: kind == "preactivation")
    outputs = Outputs(kinds, [written[kind] for kind in kinds])
    d: torch.Tensor
    d, *found = torch.ops.warploom.gemm_outputs(*given, *outputs, *gradients)
    own = gradients.preactivation == "save"
    for one, new in zip(outputs.written[: len(kinds) - own], found, strict=False):
        one.copy_(new.detach())
    return d
