"""The operands of a GEMM call: their layouts, and what is refused of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from warploom.errors import ProblemError
from warploom.generator.elements import element
from warploom.generator.families.gemm import GemmOperation
from warploom.generator.specification import KernelSpec
from warploom.runtime.elements import name_of
from warploom.runtime.families._product.operands import unseen
from warploom.runtime.families._product.steps import OUTPUTS
from warploom.runtime.families._product.steps.step import Item
from warploom.runtime.negation import refuse_negated
from warploom.runtime.operands import refuse_repeated
from warploom.runtime.tensors import shown


def layouts(a: torch.Tensor, spec: KernelSpec | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The layouts in which A and B may be read in place, the one that a copy takes first."""
    if spec is not None:
        operation = cast("GemmOperation", spec.operation)
        return (operation.layout_a,), (operation.layout_b,)
    if element(name_of(a.dtype, "a")).bits == 16:
        return ("row", "col"), ("col", "row")
    return ("row",), ("col",)


def refuse_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> None:
    """Raise ProblemError where a call would write what autograd is to know of."""
    name = written_unseen(a, b, out, listed)
    if name is not None:
        raise unseen(name)


def written_unseen(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> str | None:
    """Return the name of what a call would write and autograd is to know of."""
    if out is not None and requiring_grad(a, b, out, listed) is not None:
        return "out"
    for item in listed:
        if item[0] in OUTPUTS and item[1].requires_grad:
            return str(item[0])
    return None


def requiring_grad(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> torch.Tensor | None:
    """Return a tensor of a call that requires grad. Every call asks, so it is asked shortly."""
    if a.requires_grad:
        return a
    if b.requires_grad:
        return b
    if out is not None and out.requires_grad:
        return out
    for item in listed:
        if isinstance(item[1], torch.Tensor) and item[1].requires_grad:
            return item[1]
    return None


def check_gradient_options(
    b: torch.Tensor,
    preactivation: object,
    accumulate_into: torch.Tensor | None,
    gradient_dtype: torch.dtype | None,
) -> None:
    """Raise ProblemError for what gradients cannot be computed by, or added to."""
    if preactivation not in ("save", "recompute"):
        raise ProblemError(
            f"preactivation {shown(preactivation)}",
            rule="must be save or recompute",
            fix="leave it out: what the activation is given is then kept for the backward pass",
        )
    if gradient_dtype not in (None, torch.bfloat16, torch.float8_e5m2):
        raise ProblemError(
            f"gradient_dtype {shown(gradient_dtype)}",
            rule="must be torch.bfloat16 or torch.float8_e5m2",
            fix="leave it out for bf16; operands of 16 bits are multiplied in their own type",
        )
    if accumulate_into is not None:
        _check_accumulate_into(b, accumulate_into)


def _check_accumulate_into(b: torch.Tensor, into: torch.Tensor) -> None:
    if not isinstance(into, torch.Tensor) or into.dtype != torch.float32:
        told = into.dtype if isinstance(into, torch.Tensor) else shown(into)
        raise ProblemError(
            f"accumulate_into of {told}", rule="must be an fp32 tensor", fix="use .float()"
        )
    if into.shape != b.shape or into.device != b.device:
        raise ProblemError(
            f"accumulate_into {list(into.shape)} on {into.device}",
            rule=f"must be as b, {list(b.shape)} on {b.device}",
            fix="a weight [N, K] that is passed as b by .t() has its sums passed by .t() too",
        )
    if into.requires_grad:
        raise ProblemError(
            f"accumulate_into {list(into.shape)} that requires grad",
            rule="must not: gradients are added to it in place",
            fix="pass accumulate_into.detach()",
        )
    if torch.is_grad_enabled() and not b.requires_grad:
        raise ProblemError(
            f"accumulate_into beside b {list(b.shape)} that does not require grad",
            rule="must be of a b whose gradient is wanted",
            fix="leave it out, or call under torch.no_grad()",
        )
    if not torch.compiler.is_dynamo_compiling():  # which does not trace is_neg()
        refuse_negated([("accumulate_into", into)])
    refuse_repeated("accumulate_into", into)


def named(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, listed: Sequence[Item]
) -> list[tuple[str, object]]:
    """The tensors of a call, by the names that messages have for them."""
    read = [(item[0], item[1]) for item in listed if isinstance(item[1], torch.Tensor)]
    return [("a", a), ("b", b), ("out", out), *read]
