"""out = softmax(scale q k^T, masked) v on torch tensors: look the call's plan up, and launch."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, Unpack

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.specification import KernelSpec
from warploom.runtime import targets
from warploom.runtime.dispatch import Choice, named
from warploom.runtime.families._attention.problem import Keywords
from warploom.runtime.families.attention_forward import gradient, operator_call
from warploom.runtime.families.attention_forward.call import (
    AttentionCall,
    Details,
    Pair,
    gradients_choice,
)
from warploom.runtime.function import WarmCalls
from warploom.runtime.plan import Plan, make, planned
from warploom.runtime.tensors import explained, refuse_dual

_DEFAULTS = {one.name: one.default for one in fields(AttentionCall)[3:]}  # behind q, k and v
# A state that is drawn, lists of tiles and a kernel that is named are for the call to find.
_RECOGNISED = _DEFAULTS.keys() - {"spec", "block_mask", "dropout_p", "dropout_state"}


def calls() -> WarmCalls[Pair]:
    """No calls yet, of all arguments of `warploom.attention`."""
    declaration = AttentionCall.declaration
    return WarmCalls(declaration.names, declaration, lambda values: AttentionCall(*values))


def keep(
    warm: WarmCalls[Pair],
    values: tuple[Any, ...],
    call: AttentionCall,
    plan: AttentionPlan,
    results: Pair,
) -> None:
    """Keep what is known of a call that ran, for others like it."""
    derive = None
    if results[0].requires_grad:
        derive = gradient.derive(call, call.declaration.names, gradient.apply)
    warm.keep(values, call, plan, results, derive)


class AttentionPlan(Plan[Details, Pair]):
    """What a kind of call needs: its kernel and launch, and which operands are copied first.

    `plan(q, k, v, ...)` runs it for tensors of the planned shapes, strides and types with the
    keywords that it was made with, and returns out and lse, differentiable as those of
    `warploom.attention` are. Numbers, as the scale is, and what is said of gradients may differ.
    """

    _warm: WarmCalls[Pair] | None = None  # its own calls that ran before

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[Keywords]
    ) -> Pair:
        """Run the plan with the keywords that it was made with, and tensors like those."""
        traced = torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
        values = None
        if not traced and keywords.keys() <= _RECOGNISED:
            values = (q, k, v, *map(keywords.get, _DEFAULTS, _DEFAULTS.values()))
            results = None if self._warm is None else self._warm.again(values)
            if results is not None:
                return results
        call = AttentionCall(q, k, v, **keywords)
        if traced:
            return operator_call.attention(call)
        try:
            same = call.signature() == self.key
        except Exception as error:
            raise explained(error, call.require) from error.__cause__
        if not same:
            call.require()
            raise ProblemError(
                f"q {list(q.shape)} {q.dtype}, k {list(k.shape)}, v {list(v.shape)}",
                rule="must have the shapes, strides, dtypes and keywords that the plan was made "
                "for",
                fix="call warploom.plan_attention again, or warploom.attention",
            )
        if forward_ad._current_level >= 0:
            refuse_dual("warploom.attention", (q, k, v, call.out, *call.further.values()))
        results = self.run_recorded(call)
        if values is not None:
            if self._warm is None:
                self._warm = calls()
            keep(self._warm, values, call, self, results)
        return results

    def run_recorded(self, call: AttentionCall) -> Pair:
        """Run a call, so that autograd can differentiate it where a gradient is wanted.

        Raises ProblemError for an `out` that autograd would have to know of, and for a
        backward_spec that computes something else.
        """
        if not torch.is_grad_enabled():
            return self.run(call)
        q, k, v, out = call.q, call.k, call.v, call.out
        wanted = q.requires_grad or k.requires_grad or v.requires_grad
        wanted = wanted or any(one.requires_grad for one in call.further.values())
        if out is not None and (wanted or out.requires_grad):
            gradient.refuse_out()
        if not wanted:
            if call.backward_spec is not None:
                named(call.backward_spec)  # or it is refused
            return self.run(call)
        if self.details.sizes.dim_v:
            self.details.sizes.gradient_dims()  # or they are refused
        if call.backward_spec is not None:
            self.backward_choice(call.deterministic, call.backward_spec)  # or it is refused
        with torch.no_grad():
            results = self.run(call)
        read = [tensor for _, tensor in call.read()]
        return gradient.apply(gradient.Asked.of(call), gradient.numbers_of(call), results, *read)

    def __repr__(self) -> str:
        sizes = self.details.sizes
        lead = (sizes.total_q, sizes.heads) if sizes.packed else self.details.lse_shape
        return self.described(f"{[*lead, sizes.dim_v or sizes.dim]}")

    def backward_choice(self, deterministic: bool | None, spec: KernelSpec | str | None) -> Choice:
        """The kernel that gradients of what the plan computes get."""
        target = targets.at_hand(self.device)
        return gradients_choice(self.choice, self.details, target, (deterministic, spec))

    def gradients(self) -> Choice | None:
        """The kernel of the gradients, as the call that was planned asked for them, if any has."""
        sizes = self.details.sizes
        if sizes.dim_v and not sizes.has_gradients:
            return None
        return self.backward_choice(*self.details.gradient_options)


def attention(call: AttentionCall) -> Pair:
    """Run the planned call, planning it first when it is new; return out and lse."""
    return planned(call, AttentionPlan).run_recorded(call)


def plan(call: AttentionCall) -> AttentionPlan:
    """Check a call, choose its kernel, load it, and remember the plan."""
    return make(call, AttentionPlan)
