"""out = softmax(scale q k^T, masked) v on torch tensors: plan, copies, launch.

A call first looks up its plan by everything but addresses and numbers; only a miss checks, chooses
a kernel and lays out its launch. Nothing here waits for the GPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Unpack, cast

import torch
from torch.autograd import forward_ad

from warploom.errors import ProblemError
from warploom.generator.families.attention_forward import AttentionOperation, AttentionProblem
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import dispatch, targets
from warploom.runtime.counters import counters
from warploom.runtime.decision import Choice
from warploom.runtime.elements import name_of
from warploom.runtime.families._attention.mask import Band, band
from warploom.runtime.families._attention.operands import (
    check_apart,
    check_out,
    contiguous_copy,
    in_place,
    ordered_strides,
    strides,
)
from warploom.runtime.families._attention.operation import operation, shape
from warploom.runtime.families._attention.problem import (
    Call,
    Extents,
    Keywords,
    check_numbers,
    check_offsets,
    extents,
    require_kinds,
)
from warploom.runtime.families.attention_backward import plan as attention_backward
from warploom.runtime.families.attention_forward import (
    gradient as attention_gradient,
)
from warploom.runtime.families.attention_forward import (
    reference as attention_reference,
)
from warploom.runtime.plan import LaunchPlan, described, plan_launches, remember
from warploom.runtime.tensors import explained, refuse_dual, require_memory

GradientOptions = tuple[bool | None, KernelSpec | str | None]  # deterministic, backward_spec

_BOUND = 4096  # problems remembered
_plans: dict[tuple[object, ...], AttentionPlan] = {}

os.register_at_fork(after_in_child=_plans.clear)  # a forked call is planned anew, and so refused


@dataclass(frozen=True, slots=True)
class Draft:
    """A call that was checked: its sizes and mask, what it copies, and the kernel that it gets."""

    sizes: Extents
    band: Band
    copies: tuple[str, ...]
    choice: Choice


@dataclass
class AttentionPlan:
    """What a kind of call needs: its kernel and launch, and which operands are copied first.

    `plan(q, k, v, ...)` runs it for tensors of the planned shapes, strides and types with the
    keywords that it was made with, and returns out and lse, differentiable as those of
    `warploom.attention` are. Scale, softcap and what is said of gradients may differ.
    """

    key: tuple[object, ...]
    sizes: Extents
    band: Band
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scale: float  # where a call gives none
    launch: LaunchPlan | None  # None on the CPU, and where an extent is 0
    copies: tuple[str, ...]  # the operands that are copied, since TMA cannot read them
    choice: Choice
    gradient_options: GradientOptions = (None, None)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **keywords: Unpack[Keywords]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the plan with the keywords that it was made with, and tensors like those."""
        call = Call(q, k, v, **keywords)
        if torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0:
            # They import this module.
            from warploom.runtime.families.attention_forward import operators

            return operators.attention(call)
        try:
            same = call.signature() == self.key
        except Exception as error:
            raise explained(error, require_kinds, call) from error.__cause__
        if not same:
            raise ProblemError(
                f"q {list(q.shape)} {q.dtype}, k {list(k.shape)}, v {list(v.shape)}",
                rule="a plan runs only what it was made for: shapes, strides, types, keywords",
                fix="call warploom.plan_attention again, or warploom.attention",
            )
        if forward_ad._current_level >= 0:
            refuse_dual("warploom.attention", (q, k, v, call.out))
        return attention_gradient.run(self, call)

    def __repr__(self) -> str:
        sizes = self.sizes
        lead = (sizes.total_q, sizes.heads) if sizes.packed else self.lse_shape
        result = f"{[*lead, sizes.dim]}"
        return described("AttentionPlan", result, self.choice.spec, self.launch, self.copies)

    def backward_choice(self, deterministic: bool | None, spec: KernelSpec | str | None) -> Choice:
        """The kernel that gradients of what the plan computes get."""
        device = self.launch.device if self.launch else -1
        return gradients_choice(self, (deterministic, spec), targets.at_hand(device))

    def run(self, call: Call) -> tuple[torch.Tensor, torch.Tensor]:
        """Launch on tensors that are known to fit; on the CPU, and without products, compute."""
        q, k, v = call.q, call.k, call.v
        out = call.out
        if out is None:
            out = q.new_empty_strided(q.shape, self.out_strides)
        lse = q.new_empty(self.lse_shape, dtype=torch.float32)

        def check() -> None:
            require_memory(call.named())
            check_numbers(call)
            check_apart(call, out)

        if self.launch is None:
            check()
            if q.is_cpu:
                check_offsets(call)
            self._compute(call, out, lse)
            return out, lse
        if self.copies:
            require_memory(call.named())  # torch copies from address 0 too
            q, k, v = (
                contiguous_copy(tensor) if name in self.copies else tensor
                for name, tensor in (("q", q), ("k", k), ("v", v))
            )
        addresses: tuple[int, ...]
        addresses = (q.data_ptr(), k.data_ptr(), v.data_ptr(), out.data_ptr(), lse.data_ptr())
        if self.sizes.packed:
            addresses += tuple(offsets.data_ptr() for offsets in call.offsets)
        scale = self.scale if call.scale is None else call.scale
        self.launch.run(
            addresses, (scale,) if call.softcap is None else (scale, call.softcap), check
        )
        return out, lse

    def _compute(self, call: Call, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Without a key, no row attends to anything; else this is a call on CPU tensors."""
        if self.sizes.empty:
            out.zero_()
            lse.fill_(-torch.inf)
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            computed = attention_reference.of_call(call, self.band, attention_reference.attention)
        if self.sizes.packed:  # rows past the last sequence are nobody's
            last = int(call.offsets[0][-1])
            out, lse = out[:last], lse[:, :last]
            computed = computed[0][:last], computed[1][:, :last]
        for result, tensor in zip((out, lse), computed, strict=True):
            result.copy_(tensor)


def attention(call: Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the planned call, planning it first when it is new; return out and lse."""
    planned = _plans.get(call.signature())
    return attention_gradient.run(planned or plan(call), call)


def plan(call: Call) -> AttentionPlan:
    """Check a call, choose its kernel, load it, and remember the plan."""
    planned = _make(call)
    counters.add("plans")
    remember(_plans, planned.key, planned, _BOUND)
    return planned


def _make(call: Call) -> AttentionPlan:
    device, launch = call.q.get_device(), None
    found = draft(call, targets.at_hand(device))
    require_memory(call.named())
    sizes, choice = found.sizes, found.choice
    if device >= 0 and not sizes.empty:
        offsets = ("cu_seqlens_q", "cu_seqlens_k") if sizes.packed else ()
        tensors = ("q", "k", "v", "o", "lse", *offsets)
        scalars = ("scale",) if call.softcap is None else ("scale", "softcap")
        launch = plan_launches(choice.spec, problem(call, found), device, tensors, scalars)
    return AttentionPlan(
        key=call.signature(),
        sizes=sizes,
        band=found.band,
        out_strides=ordered_strides(call.q),
        lse_shape=sizes.lse_shape,
        scale=sizes.dim**-0.5,
        launch=launch,
        copies=found.copies,
        choice=choice,
        gradient_options=(call.deterministic, call.backward_spec),
    )


def draft(call: Call, target: DeviceLimits) -> Draft:
    """Check a call and choose its kernel for a GPU; nothing is built, and no driver asked.

    Of the tensors only what decides a plan is used: they may be on any device, also `meta`.
    """
    sizes = extents(call)
    masked = band(call, sizes)
    check_out(call)
    check_numbers(call)
    operands = {"q": call.q, "k": call.k, "v": call.v}
    copies = tuple(name for name, tensor in operands.items() if not in_place(tensor))
    element, softcap = name_of(call.q.dtype, "q"), call.softcap is not None
    wanted = operation(element, sizes, masked, softcap=softcap)
    at = shape(sizes, masked)
    choice = dispatch.choose(wanted, at, spec=call.kernel, device=target)
    return Draft(sizes, masked, copies, choice)


def gradients_choice(
    forward: AttentionPlan | Draft, asked: GradientOptions, target: DeviceLimits
) -> Choice:
    """The kernel that a GPU gets for the gradients of a call."""
    wanted = cast("AttentionOperation", forward.choice.spec.operation)
    deterministic, spec = asked
    return attention_backward.choose(
        wanted.element,
        forward.sizes,
        forward.band,
        softcap=wanted.softcap,
        deterministic=deterministic,
        spec=spec,
        target=target,
    )


def problem(call: Call, drafted: Draft) -> AttentionProblem:
    """The problem of a call as its kernel gets it."""
    packed = drafted.sizes.packed

    def placed(name: str, tensor: torch.Tensor) -> tuple[int, int, int]:
        at = torch.empty(tensor.shape, device="meta") if name in drafted.copies else tensor
        return strides(at, packed=packed)

    out = call.out
    if out is None:
        out = torch.empty_strided(call.q.shape, ordered_strides(call.q), device="meta")
    return AttentionProblem(
        **drafted.band.fields(drafted.sizes),
        strides_q=placed("q", call.q),
        strides_k=placed("k", call.k),
        strides_v=placed("v", call.v),
        strides_o=strides(out, packed=packed),
    )
