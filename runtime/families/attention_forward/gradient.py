"""Attention as autograd sees it: what is saved for the backward pass, and what that computes.

Saved are q, k, v, out and lse (with the offsets of packed sequences and what else results depend
on), never the probabilities, or which are dropped. A second derivative is refused when it is asked
for, not before.

What computes a kind of backward pass is kept for the next of that kind, which torch's guards
recognise (runtime/kinds.py): no call and no key are made, unless an address is new.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.block_mask import BlockMask
from warploom.runtime.families._attention.problem import Alignment, Arguments, Window
from warploom.runtime.families.attention_backward.call import AttentionBackwardPlan, BackwardCall
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.families.attention_forward.call import (
    AttentionCall,
    Pair,
)
from warploom.runtime.function import Derive
from warploom.runtime.kinds import Kinds
from warploom.runtime.operands import maker
from warploom.runtime.plan import planned
from warploom.runtime.tensors import UnlikeError, launchable, refuse_dual


class Asked(NamedTuple):
    """What decides a call beside its tensors and numbers; hashable.

    numbered  which numbers there are behind the scale
    offsets   how many tensors have the offsets of packed sequences: 0, 1 for both, or 2
    further   the names of the tensors that scores or their sums depend on beside q and k
    wanted    those of them whose gradients are
    """

    causal: bool | Alignment
    window: Window | None
    numbered: tuple[bool, ...]
    deterministic: bool | None
    backward_spec: KernelSpec | str | None
    max_seqlen_q: int | None
    max_seqlen_k: int | None
    offsets: int
    further: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    block_mask: BlockMask | None = None

    @classmethod
    def of(cls, call: Arguments) -> Asked:
        """What a call asks for."""
        return cls(
            call.causal,
            None if call.window is None else (call.window[0], call.window[1]),
            tuple([getattr(call, name) is not None for name in NUMBERS[1:-1]]),
            call.deterministic,
            call.backward_spec,
            call.max_seqlen_q,
            call.max_seqlen_k,
            0 if call.cu_seqlens_q is None else 1 + (call.cu_seqlens_q is not call.cu_seqlens_k),
            tuple(call.further),
            block_mask=call.block_mask,
        )


_NUMBERS = AttentionCall.declaration.numbers
NUMBERS = ("scale", *[name for name in _NUMBERS if name != "scale"], "dropout_p")
Numbers = tuple[Any, ...]
"""What a call is given of these; None for what it is without."""

numbers_of: Callable[[Arguments], Numbers] = attrgetter(*NUMBERS)

Wanted = tuple[torch.Tensor | None, ...]

_BOUND = 4096  # kinds of passes remembered


# ---- Autograd ------------------------------------------------------------------------------------


def derive(call: AttentionCall, names: Sequence[str], apply: Callable[..., Pair]) -> Derive:
    """What has autograd know of the results of calls like this one, by `apply`.

    `names` are those of all arguments of the function that is called.
    """
    asked, numbers = Asked.of(call), numbers_of(call)
    read = itemgetter(*[names.index(name) for name, _ in call.read()])
    own = [(at, name) for at, name in enumerate(NUMBERS[:-1]) if numbers[at] is not None]
    places = [(at, names.index(name)) for at, name in own]

    def derived(values: tuple[Any, ...], results: Pair) -> Pair:
        given = numbers
        if places:
            replaced = [*numbers]
            for at, place in places:
                replaced[at] = values[place]
            given = tuple(replaced)
        return apply(asked, given, results, *read(values))

    return derived


def refuse_out() -> NoReturn:
    """Raise ProblemError for an `out` beside tensors that require grad."""
    raise ProblemError(
        "out with a tensor that requires grad",
        rule="autograd differentiates results that it has not seen before",
        fix="leave out=None, or call under torch.no_grad()",
    )


def refuse_second_derivative(*_: object) -> NoReturn:
    """Raise ProblemError where the gradients of an attention are differentiated themselves."""
    raise ProblemError(
        "a second derivative of warploom.attention",
        rule="attention is differentiable once",
        fix="leave out create_graph=True, or compute this attention with plain torch operations",
    )


class _Attention(torch.autograd.Function):
    """out and lse of a call, differentiable in what they are of."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 (torch's own type lacks what is kept on it)
        asked: Asked,
        numbers: Numbers,
        results: Pair,
        *read: torch.Tensor,
    ) -> Pair:
        out, lse = results
        ctx.save_for_backward(*read[:3], out, lse, *read[3:])
        ctx.set_materialize_grads(False)
        ctx.asked, ctx.numbers = asked, numbers  # no tensor, which would escape hooks
        return out, lse

    @staticmethod
    def backward(
        ctx: Any,  # noqa: ANN401
        dout: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> Wanted:
        """Return the gradients, each where it is wanted: dq, dk and dv are computed together."""
        run = _gradients if torch.is_grad_enabled() else differentiate  # create_graph=True
        asked: Asked = ctx.asked
        _, _, _, *needed = ctx.needs_input_grad
        if asked.further:
            names = zip(asked.further, needed[-len(asked.further) :], strict=True)
            asked = asked._replace(wanted=tuple(name for name, need in names if need))
        found = run(asked, ctx.numbers, dout, dlse, *ctx.saved_tensors)
        first = [one if need else None for one, need in zip(found[:3], needed, strict=False)]
        last = dict(zip(asked.wanted, found[3:], strict=True))
        offsets = len(needed) - 3 - len(asked.further)
        return None, None, None, *first, *[None] * offsets, *map(last.get, asked.further)


# Function.apply itself only adds what torch.func asks for, whose tensors no plan takes.
apply: Callable[..., Pair] = super(torch.autograd.Function, _Attention).apply
"""out and lse as autograd knows them, of what `_Attention.forward` takes."""


class _Gradients(torch.autograd.Function):
    """The backward pass where it might be differentiated: which it cannot be."""

    @staticmethod
    def forward(ctx: object, *given: Any) -> tuple[torch.Tensor, ...]:
        return differentiate(*given)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        """Refuse."""
        refuse_second_derivative()


_gradients: Callable[..., tuple[torch.Tensor, ...]] = _Gradients.apply


# ---- Plans that are kept -------------------------------------------------------------------------


def differentiate(
    asked: Asked,
    numbers: Numbers,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *saved: torch.Tensor,
    into: Gradients | None = None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of a call, `into` what is given; then what else is wanted.

    dout    None stands for a gradient of zeros
    saved   q, k, v, out and lse of the forward pass, its offsets, if any, and further tensors
    """
    if dout is None:
        dout = torch.zeros_like(saved[3])
    if asked.further:
        call = _call(asked, numbers, into, dout, dlse, *saved)
        return (*planned(call, AttentionBackwardPlan).run(call), *call.further_gradients())
    shared = len(saved) > 5 and saved[5] is saved[6]
    read = (dout, *(saved[:6] if shared else saved))  # guards take no tensor twice
    if dlse is not None:
        read = (*read, dlse)
    at = None if into is None else (into[0].stride(), into[1].stride(), into[2].stride())
    options = (asked, shared, at, dlse is None, torch.are_deterministic_algorithms_enabled())
    listed = asked.block_mask is not None  # whose lists no address of `saved` tells
    kind = None if listed else _kinds.find(options, *read)
    if kind is not None:
        with contextlib.suppress(UnlikeError):  # their addresses, which are new
            return kind.run(asked, numbers, into, dout, dlse, *saved)
    if forward_ad._current_level >= 0:
        refuse_dual("the gradient of warploom.attention", (dout, dlse))
    call = _call(asked, numbers, into, dout, dlse, *saved)
    plan = planned(call, AttentionBackwardPlan)
    found = plan.run(call)
    in_place = (
        not plan.copies and saved[4].is_contiguous() and (dlse is None or dlse.is_contiguous())
    )
    if kind is None and in_place and not listed and launchable(*read):
        _kinds.keep(_Pass(plan, tuple(map(maker, found))), options, *read)
    return found


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class _Pass:
    """What is known of a kind of backward pass: its plan, and what makes dq, dk and dv."""

    plan: AttentionBackwardPlan
    make: tuple[Callable[[], torch.Tensor], ...]

    def run(
        self,
        asked: Asked,
        numbers: Numbers,
        into: Gradients | None,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        *saved: torch.Tensor,
    ) -> Gradients:
        if into is None:
            dq, dk, dv = [make() for make in self.make]
        else:
            dq, dk, dv = into
        q, k, v, out, lse, *offsets = [one.data_ptr() for one in saved]
        at_dlse = 0 if dlse is None else dlse.data_ptr()
        written = (dq.data_ptr(), dk.data_ptr(), dv.data_ptr())
        addresses = (q, k, v, out, dout.data_ptr(), lse, at_dlse, *written, *offsets)
        scale, *others, _ = numbers
        scale = self.plan.details.scale if scale is None else scale
        scalars = (scale, *[number for number in others if number is not None])
        results = (dq, dk, dv)
        given = (asked, numbers, into, dout, dlse, *saved)
        self.plan.run_at((addresses, scalars), results, _call, *given)
        return results


_kinds: Kinds[_Pass] = Kinds(_BOUND)


def _call(
    asked: Asked,
    numbers: Numbers,
    into: Gradients | None,
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    *rest: torch.Tensor,
) -> BackwardCall:
    # Lengths that were found equal stay so, even if cu_seqlens comes back as two tensors.
    causal = "bottom_right" if asked.causal is True else asked.causal
    queries, keys = rest[:2] if asked.offsets else (None, None)
    further: dict[str, Any] = dict(zip(asked.further, rest[-len(asked.further) :], strict=False))
    forward = Arguments(
        q,
        k,
        v,
        causal,
        asked.window,
        cu_seqlens_q=queries,
        cu_seqlens_k=keys,
        max_seqlen_q=asked.max_seqlen_q,
        max_seqlen_k=asked.max_seqlen_k,
        deterministic=asked.deterministic,
        backward_spec=asked.backward_spec,
        block_mask=asked.block_mask,
        **dict(zip(NUMBERS, numbers, strict=True)),
        **further,
    )
    made = BackwardCall(forward, out, lse, dout, dlse, into)
    made.prepare(asked.wanted)
    return made
