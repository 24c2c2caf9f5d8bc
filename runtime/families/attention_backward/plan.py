"""dq, dk, dv of an attention on torch tensors: plan, copies, launches.

As in the forward pass, a call first looks up its plan by everything but addresses and numbers; only
a miss checks, chooses a kernel and lays out its launches. Nothing here waits for the GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from warploom.generator.families.attention_backward import AttentionBackwardProblem
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch, targets
from warploom.runtime.counters import counters
from warploom.runtime.decision import Choice
from warploom.runtime.elements import name_of
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.operands import (
    contiguous_copy,
    in_place,
    ordered_strides,
    strides,
)
from warploom.runtime.families._attention.operation import backward_operation, shape
from warploom.runtime.families._attention.problem import Extents, check_numbers, extents, named
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.problem import BackwardCall, check_results
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.plan import LaunchPlan, plan_launches, remember
from warploom.runtime.tensors import require_memory

_BOUND = 4096  # problems remembered
_plans: dict[tuple[object, ...], AttentionBackwardPlan] = {}

os.register_at_fork(after_in_child=_plans.clear)  # a forked call is planned anew, and so refused


@dataclass
class AttentionBackwardPlan:
    """What a kind of backward pass needs: its kernel and launches, and what is copied for them."""

    key: tuple[object, ...]
    sizes: Extents
    band: Band
    gradient_strides: tuple[tuple[int, ...], ...]  # of dq, dk and dv
    scale: float  # where a call gives none
    launch: LaunchPlan | None  # None on the CPU, and where an extent is 0
    copies: tuple[str, ...]  # the operands that are copied, since TMA cannot read them
    choice: Choice

    def run(self, call: BackwardCall) -> Gradients:
        """Launch on tensors that are known to fit; on the CPU, and without products, compute."""
        forward = call.forward
        q, k, v, out, dout = forward.q, forward.k, forward.v, call.out, call.dout
        if call.into is None:
            for_q, for_k, for_v = self.gradient_strides
            dq = q.new_empty_strided(q.shape, for_q)
            dk = k.new_empty_strided(k.shape, for_k)
            dv = v.new_empty_strided(v.shape, for_v)
        else:
            dq, dk, dv = call.into

        def check() -> None:
            require_memory(call.named())
            check_numbers(forward)

        if self.launch is None:
            check()
            self._compute(call, (dq, dk, dv))
            return dq, dk, dv
        if self.copies:
            require_memory(call.named())  # torch copies from address 0 too
            q, k, v, out, dout = (
                contiguous_copy(tensor) if name in self.copies else tensor
                for name, tensor in call.operands.items()
            )
        lse, dlse = call.lse.contiguous(), call.dlse
        if dlse is not None:
            dlse = dlse.contiguous()
        addresses: tuple[int, ...] = (
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            dout.data_ptr(),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
        )
        if self.sizes.packed:
            addresses += tuple(offsets.data_ptr() for offsets in forward.offsets)
        scale = self.scale if forward.scale is None else forward.scale
        scalars = (scale,) if forward.softcap is None else (scale, forward.softcap)
        self.launch.run(addresses, scalars, check)
        return dq, dk, dv

    def _compute(self, call: BackwardCall, results: Gradients) -> None:
        """Without a product, nothing depends on anything; else this is a call on CPU tensors."""
        if self.sizes.empty:
            for result in results:
                result.zero_()
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            computed = reference.of_call(call, self.band, reference.gradients)
        for result, tensor in zip(results, computed, strict=True):
            result.copy_(tensor)


_TENSORS = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")


def attention_backward(call: BackwardCall) -> Gradients:
    """Run the planned backward pass, planning it first when it is new; return dq, dk and dv.

    Gradients have the order of strides of q, k and v, or lie where the call says. Those of packed
    rows past the last sequence are 0. Raises ProblemError before anything is launched.
    """
    planned = _plans.get(call.signature())
    return (planned or plan(call)).run(call)


def plan(call: BackwardCall) -> AttentionBackwardPlan:
    """Check a backward pass, choose its kernel, load it, and remember the plan."""
    planned = _make(call)
    counters.add("plans")
    remember(_plans, planned.key, planned, _BOUND)
    return planned


def choose(
    element: str,
    sizes: Extents,
    masked: Band,
    *,
    softcap: bool,
    deterministic: bool | None,
    spec: KernelSpec | str | None,
    target: DeviceLimits,
) -> Choice:
    """The kernel that gradients get on a GPU.

    Raises ProblemError for a spec that computes something else.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    wanted = backward_operation(
        element, sizes, masked, softcap=softcap, deterministic=deterministic
    )
    return dispatch.choose(wanted, shape(sizes, masked), spec=named(spec), device=target)


def _make(call: BackwardCall) -> AttentionBackwardPlan:
    forward = call.forward
    sizes = extents(forward)
    masked = band(forward, sizes)
    check_results(call, sizes)
    check_numbers(forward)
    copies = tuple(name for name, tensor in call.operands.items() if not in_place(tensor))
    gradient_strides = (
        tuple(map(ordered_strides, (forward.q, forward.k, forward.v)))
        if call.into is None
        else tuple(tensor.stride() for tensor in call.into)
    )
    device, launch = forward.q.get_device(), None
    choice = choose(
        name_of(forward.q.dtype, "q"),
        sizes,
        masked,
        softcap=forward.softcap is not None,
        deterministic=forward.deterministic,
        spec=forward.backward_spec,
        target=targets.at_hand(device),
    )
    if device >= 0 and not sizes.empty:
        offsets = ("cu_seqlens_q", "cu_seqlens_k") if sizes.packed else ()
        scalars = ("scale",) if forward.softcap is None else ("scale", "softcap")
        problem = _problem(call, sizes, masked, copies, gradient_strides)
        launch = plan_launches(choice.spec, problem, device, (*_TENSORS, *offsets), scalars)
    return AttentionBackwardPlan(
        call.signature(), sizes, masked, gradient_strides, sizes.dim**-0.5, launch, copies, choice
    )


def _problem(
    call: BackwardCall,
    sizes: Extents,
    masked: Band,
    copies: tuple[str, ...],
    gradient_strides: tuple[tuple[int, ...], ...],
) -> AttentionBackwardProblem:
    forward = call.forward
    placed = {
        name: torch.empty(tensor.shape, device="meta") if name in copies else tensor
        for name, tensor in call.operands.items()
    }
    for name, tensor, steps in zip(
        ("dq", "dk", "dv"), (forward.q, forward.k, forward.v), gradient_strides, strict=True
    ):
        placed[name] = torch.empty_strided(tensor.shape, steps, device="meta")
    fields = masked.fields(sizes)
    fields |= {f"strides_{name}": strides(at, packed=sizes.packed) for name, at in placed.items()}
    return AttentionBackwardProblem(**fields)
