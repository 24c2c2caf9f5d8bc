"""dq, dk, dv of an attention on torch tensors: look the pass's plan up, or make it, and launch."""

from __future__ import annotations

from warploom.runtime.families.attention_backward.call import BackwardCall, Details
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.plan import Plan, make, planned


class AttentionBackwardPlan(Plan[Details, Gradients]):
    """What a kind of backward pass needs: its kernel and launches, and what is copied for them."""


def attention_backward(call: BackwardCall) -> Gradients:
    """Run the planned backward pass, planning it first when it is new; return dq, dk and dv.

    Gradients have the order of strides of q, k and v, or lie where the call says. Those of packed
    rows past the last sequence are 0. Raises ProblemError before anything is launched.
    """
    return planned(call, AttentionBackwardPlan).run(call)


def plan(call: BackwardCall) -> AttentionBackwardPlan:
    """Check a backward pass, choose its kernel, load it, and remember the plan."""
    return make(call, AttentionBackwardPlan)
