"""Which attentions that drop weights Warploom computes: as the families say what goes together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, reduce

import torch

from warploom.generator.families import family
from warploom.generator.families.attention_backward import AttentionBackwardOperation
from warploom.generator.families.attention_forward import AttentionOperation
from warploom.runtime.families._attention.modifiers.bias import BIASES


def refusal(dropout_p: float, changes: Iterable[torch.Tensor | None]) -> str | None:
    """Why torch computes an attention that drops weights, as sdpa_rules.py has it, if it does.

    `changes` are masks of truth values, and biases of types that kernels add to scores.
    """
    number = isinstance(dropout_p, float | int) and not isinstance(dropout_p, bool)
    if not number or not 0 < dropout_p < 1:
        return f"kernels drop weights with a probability less than 1: dropout_p is {dropout_p}"
    given = [one for one in changes if one is not None]
    added = [one for one in given if one.dtype != torch.bool]
    kind = BIASES[reduce(torch.promote_types, [one.dtype for one in added])] if added else "none"
    masked, learnt = len(added) < len(given), any(one.requires_grad for one in added)
    found: str | None = _asked(kind, masked, learnt)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _asked(bias: str, masked: bool, bias_gradient: bool) -> str | None:
    """The same as `_forbidden`, which compilers do not trace."""
    return _forbidden(bias, masked, bias_gradient)


@cache
def _forbidden(bias: str, masked: bool, bias_gradient: bool) -> str | None:
    """What the families say of operations that drop weights beside these, where they refuse one."""
    forward = AttentionOperation("bf16", 64, bias=bias, masked=masked, dropout=True)
    backward = AttentionBackwardOperation(
        "bf16",
        64,
        bias=bias,
        masked=masked,
        dropout=True,
        bias_gradient=bias_gradient,
    )
    for one in (forward, backward):
        for reason in family(one.family).operation_reasons(one):
            return f"no kernel has {reason}"
    return None
