"""Attention as it was called before: by what is kept of such calls, with the least on the host.

A call like an earlier one is recognised by torch's guards (runtime/kinds.py), and its plan is
launched on addresses: no key is made. The first time that these come up, the call itself is made
and checked, as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from warploom.runtime.families._attention.problem import Alignment, Window
from warploom.runtime.families.attention_forward import gradient
from warploom.runtime.families.attention_forward.call import AttentionCall, Pair
from warploom.runtime.families.attention_forward.gradient import Asked, Numbers
from warploom.runtime.families.attention_forward.plan import AttentionPlan
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import maker
from warploom.runtime.tensors import UnlikeError, launchable

Offsets = tuple[torch.Tensor | None, torch.Tensor | None]

_BOUND = 4096  # kinds of calls remembered
_NUMBERS = (float, int)


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call: its plan, and what makes its results."""

    plan: AttentionPlan
    make_out: Callable[[], torch.Tensor]
    make_lse: Callable[[], torch.Tensor]
    differentiable: bool

    def launch(
        self,
        asked: Asked,
        numbers: Numbers,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *offsets: torch.Tensor,
    ) -> Pair:
        out = self.make_out()
        lse = self.make_lse()
        addresses: tuple[int, ...] = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
        )
        if offsets:
            addresses += (offsets[0].data_ptr(), offsets[1].data_ptr())
        scale, softcap, _ = numbers
        scale = self.plan.details.scale if scale is None else scale
        scalars = (scale,) if softcap is None else (scale, softcap)
        given = (asked, numbers, q, k, v, *offsets)
        self.plan.run_at((addresses, scalars), (out, lse), _call, *given)
        return out, lse


_kinds: Kinds[_Kind] = Kinds(_BOUND)


def asked(
    causal: bool | Alignment,
    window: Window | None,
    softcap: float | None,
    deterministic: bool | None,
    offsets: Offsets,
    longest: tuple[int | None, int | None],
) -> Asked | None:
    """What a call asks for whose arguments are of the usual types; None for others."""
    queries, keys = offsets
    if queries is None or keys is None:
        if queries is not keys:
            return None
        lists = 0
    else:
        lists = 1 if queries is keys else 2
    if (
        (window is None or type(window) is tuple)
        and (softcap is None or (type(softcap) in _NUMBERS and softcap > 0))
        and (deterministic is None or type(deterministic) is bool)
    ):
        return Asked(
            causal, window, softcap is not None, deterministic, None, *longest, offsets=lists
        )
    return None


def again(
    asked: Asked,
    numbers: Numbers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    offsets: Offsets,
) -> Pair | None:
    """out and lse of a call that is like one that was kept; None where there is none.

    Not for compilers to trace.
    """
    read: tuple[Any, ...] = (q, k, v, *offsets) if asked.offsets else (q, k, v)
    try:
        kind = _kinds.find(asked, *read[: 3 + asked.offsets])
    except Exception:  # arguments of no type that they may have: the call tells of them
        return None
    if kind is None:
        return None
    try:
        if kind.differentiable:
            return gradient.apply(kind.launch, asked, numbers, *read)
        return kind.launch(asked, numbers, *read)
    except UnlikeError:  # their addresses, which are new
        return None


def keep(asked: Asked, plan: AttentionPlan, call: AttentionCall, results: Pair) -> None:
    """Keep what is known of a call that a plan ran, for others like it."""
    read = (call.q, call.k, call.v, *call.offsets[: asked.offsets])
    if not plan.copies and launchable(*read):
        out, lse = results
        kind = _Kind(plan, maker(out), maker(lse), out.requires_grad)
        _kinds.keep(kind, asked, *read)


def _call(
    asked: Asked,
    numbers: Numbers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *offsets: torch.Tensor,
) -> AttentionCall:
    scale, softcap, _ = numbers
    queries, keys = offsets or (None, None)
    return AttentionCall(
        q,
        k,
        v,
        asked.causal,
        asked.window,
        softcap,
        scale,
        queries,
        keys,
        asked.max_seqlen_q,
        asked.max_seqlen_k,
        deterministic=asked.deterministic,
    )
