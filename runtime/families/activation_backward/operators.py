"""The operator that torch.compile sees, registered with torch.library; eager calls pass it by."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch

from warploom.generator.specification import KernelSpec, parse_name
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall, Results
from warploom.runtime.operator import is_distributed, register
from warploom.runtime.plan import run


class _Call(NamedTuple):
    """What the operator takes, in order, each with its type in its schema."""

    dy: Annotated[torch.Tensor, "Tensor"]
    z: Annotated[torch.Tensor | None, "Tensor?"]
    activation: Annotated[str | None, "str?"]
    sums: Annotated[bool, "bool"]
    out_dtype: Annotated[torch.dtype | None, "ScalarType?"]
    spec: Annotated[str | None, "str?"]


def _asked(given: _Call) -> ActivationBackwardCall:
    spec = parse_name(given.spec) if given.spec else None
    dy, z, activation, sums, out_dtype, _ = given
    return ActivationBackwardCall(dy, z, activation, sums, None, out_dtype, None, spec)


def _run(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call(*given)
    with torch.no_grad():
        dz, sums = run(_asked(call))
    return _there(call.dy, dz), _there(call.dy, sums)


def _there(dy: torch.Tensor, result: torch.Tensor | None) -> torch.Tensor:
    """What an operator returns for a result that there is not: a tensor of no elements."""
    return dy.new_empty(0) if result is None else result


def _fake(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = _Call(*given)
    dy = call.dy
    dz = None if call.z is None else dy.new_empty(dy.shape, dtype=call.out_dtype or dy.dtype)
    sums = dy.new_empty(dy.shape[-1], dtype=torch.float32) if call.sums else None
    return _there(dy, dz), _there(dy, sums)


def _refuse(*given: Any) -> None:
    _asked(_Call(*given)).refuse()


register(
    "activation_backward",
    _Call,
    returns="(Tensor, Tensor)",
    run=_run,
    fake=_fake,
    refuse=_refuse,
)


def call(
    dy: torch.Tensor,
    z: torch.Tensor | None,
    activation: str | None,
    sums: bool,
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    spec: KernelSpec | str | None,
) -> Results:
    """Run the call as an operator, for a compiler to trace; `out` is copied to."""
    if is_distributed(dy):
        from warploom.runtime.families.activation_backward import sharding  # noqa: F401 (registers)
    name = spec.name if isinstance(spec, KernelSpec) else spec
    if out_dtype is None and out is not None:
        out_dtype = out.dtype
    given = _Call(dy, z, activation, sums, out_dtype, name)
    dz, summed = torch.ops.warploom.activation_backward(*given)
    if out is not None:
        dz = out.copy_(dz)
    return (None if z is None else dz), (summed if sums else None)
