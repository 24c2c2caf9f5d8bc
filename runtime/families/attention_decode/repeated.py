"""Decoding as it was called before: by what is kept of such calls, with the least on the host.

A call like an earlier one is recognised by torch's guards (runtime/kinds.py), and its plan is
launched on addresses: no key is made. The first time that these come up, the call itself is made
and checked, as any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from warploom.runtime.families._attention.problem import Window
from warploom.runtime.families.attention_decode.call import AttentionDecodeCall, Details, Pair
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import maker
from warploom.runtime.plan import Plan
from warploom.runtime.tensors import UnlikeError, launchable

Numbers = tuple[float | None, float | None]  # scale and softcap
Options = tuple[int | None, int | None, bool]
Optional = tuple[torch.Tensor | None, ...]  # in the order of a call's, and out

_BOUND = 4096  # kinds of calls remembered
_NUMBERS = (float, int)


class Asked(NamedTuple):
    """What decides a call beside its tensors, its scale and its softcap; hashable.

    options   max_seqlen_q, max_seqlen_k, batch_invariant
    given     which of the optional tensors are given
    """

    causal: bool
    window: Window | None
    capped: bool
    options: Options
    given: tuple[bool, ...]


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Kind:
    """What is known of a kind of call: its plan, and what makes its results."""

    plan: Plan[Details, Pair]
    make_out: Callable[[], torch.Tensor]
    make_lse: Callable[[], torch.Tensor]

    def launch(
        self,
        asked: Asked,
        numbers: Numbers,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        optional: Optional,
    ) -> Pair:
        *read, out = optional
        if out is None:
            out = self.make_out()
        lse = self.make_lse()
        addresses: tuple[int, ...] = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            lse.data_ptr(),
            *[one.data_ptr() for one in read if one is not None],
        )
        scale, softcap = numbers
        scale = self.plan.details.scale if scale is None else scale
        scalars = (scale,) if softcap is None else (scale, softcap)
        given = (asked, numbers, q, k, v, optional)
        self.plan.run_at((addresses, scalars), (out, lse), _call, *given)
        return out, lse


_kinds: Kinds[_Kind] = Kinds(_BOUND)


def asked(
    causal: bool,
    window: Window | None,
    softcap: float | None,
    options: Options,
    optional: Optional,
) -> Asked | None:
    """What a call asks for whose arguments are of the usual types; None for others."""
    if (window is None or type(window) is tuple) and (
        softcap is None or (type(softcap) in _NUMBERS and softcap > 0)
    ):
        given = tuple([one is not None for one in optional])
        return Asked(causal, window, softcap is not None, options, given)
    return None


def again(
    asked: Asked,
    numbers: Numbers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: Optional,
) -> Pair | None:
    """out and lse of a call that is like one that was kept; None where there is none.

    Not for compilers to trace.
    """
    try:
        if q.is_nested or k.is_nested or v.is_nested:  # of which guards ask what ends the process
            return None
        kind = _kinds.find(asked, q, k, v, *[one for one in optional if one is not None])
    except Exception:  # arguments of no type that they may have: the call tells of them
        return None
    if kind is None:
        return None
    try:
        return kind.launch(asked, numbers, q, k, v, optional)
    except UnlikeError:  # their addresses, which are new
        return None


def keep(asked: Asked, plan: Plan[Details, Pair], call: AttentionDecodeCall, results: Pair) -> None:
    """Keep what is known of a call that a plan ran, for others like it."""
    read = [one for _, one in call.read()]
    if call.out is not None:
        read.append(call.out)
    if not plan.copies and launchable(*read):
        out, lse = results
        _kinds.keep(_Kind(plan, maker(out), maker(lse)), asked, *read)


def _call(
    asked: Asked,
    numbers: Numbers,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    optional: Optional,
) -> AttentionDecodeCall:
    scale, softcap = numbers
    lengths, starts, page_table, *rest, out = optional
    given: Any = (*rest, *asked.options, out)
    return AttentionDecodeCall(
        q, k, v, lengths, starts, page_table, asked.causal, asked.window, softcap, scale, *given
    )
