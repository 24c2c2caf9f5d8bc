"""A backward pass of attention: which kernel it gets, how that is launched, and its plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import cast

import torch

from warploom.generator.families.attention_backward import (
    AttentionBackwardOperation,
    AttentionBackwardProblem,
)
from warploom.generator.families.attention_backward.schedule import AttentionBackwardSpec
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec
from warploom.runtime import call as calls
from warploom.runtime import dispatch
from warploom.runtime.call import Draft, Key
from warploom.runtime.dispatch import Choice
from warploom.runtime.elements import NAMES
from warploom.runtime.families._attention import block_lists
from warploom.runtime.families._attention.block_lists import Lists
from warploom.runtime.families._attention.mask import Band, band, operation, shape
from warploom.runtime.families._attention.modifiers import GRADED
from warploom.runtime.families._attention.modifiers.modifier import Fields
from warploom.runtime.families._attention.operands import (
    contiguous_copy,
    copied,
    in_place,
    ordered_strides,
    placed,
    strides,
)
from warploom.runtime.families._attention.problem import Extents, check_numbers, extents
from warploom.runtime.families.attention_backward import reference
from warploom.runtime.families.attention_backward.arguments import BackwardArguments, check_results
from warploom.runtime.families.attention_backward.reference import Gradients
from warploom.runtime.plan import Plan, make, planned
from warploom.runtime.tensors import Written, require_memory

_TENSORS = ("q", "k", "v", "o", "do", "lse", "dlse", "dq", "dk", "dv")


@dataclass(frozen=True, slots=True)
class Details:
    """What a kind of backward pass has in common: its sizes and mask, and where gradients go."""

    sizes: Extents
    band: Band
    strides: tuple[tuple[int, ...], ...]  # of dq, dk and dv
    scale: float  # where a call gives none
    copies: tuple[str, ...]
    tile: tuple[int, int] | None  # of the kernel, where it walks lists of tiles


@dataclass(slots=True)
class BackwardCall(BackwardArguments):
    """A backward pass, whose results are dq, dk and dv."""

    def signature(self) -> Key:
        """Everything that decides the plan: all but addresses (their alignment counts) and numbers.

        That of the forward pass does, too, since tensors may be saved and come back elsewhere.
        """
        out, lse, dout, dlse = self.out, self.lse, self.dout, self.dlse
        asked = self.forward.deterministic
        return (
            BackwardCall,
            self.forward.signature(),
            out.shape,
            out.stride(),
            out.dtype,
            out.data_ptr() & 15,
            out.get_device(),
            out.is_neg(),
            dout.shape,
            dout.stride(),
            dout.dtype,
            dout.data_ptr() & 15,
            dout.get_device(),
            dout.is_neg(),
            lse.shape,
            lse.dtype,
            lse.get_device(),
            lse.is_neg(),
            None if dlse is None else (dlse.shape, dlse.dtype, dlse.get_device(), dlse.is_neg()),
            None
            if self.into is None
            else tuple((t.stride(), t.data_ptr() & 15, t.is_neg()) for t in self.into),
            torch.are_deterministic_algorithms_enabled() if asked is None else asked,
            self.forward.backward_spec,
            None if self.dcolumn is None else (self.dcolumn.shape, self.dcolumn.dtype),
            None if self.ds is None else (self.ds.shape, self.ds.stride(), self.ds.dtype),
        )

    def written(self) -> Written:
        """The tensors that are given for a kernel to write."""
        return [*zip(("dq", "dk", "dv"), self.into or (), strict=False)]

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        self.forward.require()

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the pass and choose its kernel for a GPU."""
        forward = self.forward
        sizes = extents(forward)
        masked = band(forward, sizes)
        check_results(self, sizes)
        check_numbers(forward)
        copies = tuple(name for name, tensor in self.operands.items() if not in_place(tensor))
        copies += tuple(name for one in forward.modifiers for name in one.copies(forward))
        blocks = forward.block_mask is not None
        fields = forward.gradient_fields(self._wanted)
        choice = choose(
            NAMES[forward.q.dtype],
            sizes,
            masked,
            deterministic=forward.deterministic,
            fields=fields,
            spec=forward.backward_spec,
            target=target,
        )
        gradients = (
            tuple(map(ordered_strides, (forward.q, forward.k, forward.v)))
            if self.into is None
            else tuple(tensor.stride() for tensor in self.into)
        )
        offsets = ("cu_seqlens_q", "cu_seqlens_k") if sizes.packed else ()
        lists = Lists._fields if blocks else ()
        tile = cast("AttentionBackwardSpec", choice.spec).schedule.tile if blocks else None
        details = Details(sizes, masked, gradients, sizes.dim**-0.5, copies, tile)
        return Draft(
            choice,
            None if sizes.empty else self._problem(details),
            (*_TENSORS, *offsets, *lists, *self._further),
            forward.numbers,
            copies,
            details,
        )

    @property
    def _wanted(self) -> tuple[str, ...]:
        """The further tensors whose gradients are wanted."""
        return tuple(kind.argument for kind in GRADED if self.written_by(kind) is not None)

    @property
    def _further(self) -> dict[str, torch.Tensor]:
        """The tensors beside those that every pass has, in the order of launches."""
        found = self.forward.further
        for kind in GRADED:
            written = self.written_by(kind)
            if written is not None:
                found[kind.gradient] = written
            elif kind.has_column:  # whose share the log-sum-exp has
                found.pop(kind.argument, None)
        return found

    def _problem(self, details: Details) -> AttentionBackwardProblem:
        forward, packed = self.forward, details.sizes.packed
        fields = details.band.fields(details.sizes)
        for one in forward.modifiers:
            fields |= one.problem(forward, details.copies)
        if self.ds is not None:
            batch, head, row, _ = self.ds.stride()
            fields["strides_ds"] = (batch, head, row)
            fields["scores"] = tuple(self.ds.shape)
        for name, tensor in self.operands.items():
            fields[f"strides_{name}"] = placed(name, tensor, details.copies, packed=packed)
        for name, tensor, steps in zip(
            ("dq", "dk", "dv"), (forward.q, forward.k, forward.v), details.strides, strict=True
        ):
            gradient = torch.empty_strided(tensor.shape, steps, device="meta")
            fields[f"strides_{name}"] = strides(gradient, packed=packed)
        return AttentionBackwardProblem(**fields)

    def refuse(self) -> None:
        """Nothing: second derivatives are refused when they are asked for."""

    def results(self, details: Details) -> Gradients:
        """Where dq, dk and dv go: as the call says, or new."""
        if self.into is not None:
            return self.into
        q, k, v = self.forward.q, self.forward.k, self.forward.v
        for_q, for_k, for_v = details.strides
        return (
            q.new_empty_strided(q.shape, for_q),
            k.new_empty_strided(k.shape, for_k),
            v.new_empty_strided(v.shape, for_v),
        )

    def copied(self, details: Details) -> BackwardCall:
        """The same pass, of contiguous copies of what TMA cannot read."""
        copies = details.copies
        out = contiguous_copy(self.out) if "o" in copies else self.out
        dout = contiguous_copy(self.dout) if "do" in copies else self.dout
        return replace(self, forward=copied(self.forward, copies), out=out, dout=dout)

    def arguments(self, details: Details, results: Gradients) -> calls.Arguments:
        """The addresses of all tensors, 0 for no dlse; the numbers."""
        forward, lse, dlse = self.forward, self.lse, self.dlse
        if not (lse.is_contiguous() and (dlse is None or dlse.is_contiguous())):
            lse, dlse = lse.contiguous(), None if dlse is None else dlse.contiguous()
            self._held = lse, dlse  # until all is launched
        dq, dk, dv = results
        addresses: tuple[int, ...] = (
            forward.q.data_ptr(),
            forward.k.data_ptr(),
            forward.v.data_ptr(),
            self.out.data_ptr(),
            self.dout.data_ptr(),
            lse.data_ptr(),
            0 if dlse is None else dlse.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
        )
        if details.sizes.packed:
            addresses += tuple(offsets.data_ptr() for offsets in forward.offsets)
        if details.tile is not None:
            addresses += block_lists.of_columns(forward.block_mask, details.tile).addresses
        addresses += tuple(one.data_ptr() for one in self._further.values())
        return addresses, forward.told(details.scale)

    def check(self, details: Details, results: Gradients) -> None:
        """Raise ProblemError for missing memory and bad numbers."""
        require_memory(self.named())
        check_numbers(self.forward)

    def compute(self, details: Details, results: Gradients) -> None:
        """Without a product, nothing depends on anything; else this is a call on CPU tensors."""
        if self.dcolumn is not None:
            (one,) = (one for one in self.forward.modifiers if one.has_column)
            with torch.no_grad():
                self.dcolumn.copy_(one.column_gradient(reference.row_sums(self, torch.float32)))
        if details.sizes.empty:
            for result in (*results, *(() if self.ds is None else (self.ds,))):
                result.zero_()
            return
        if self.ds is not None:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                self.ds.copy_(reference.ds_of_call(self, details.band))
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            computed = reference.of_call(self, details.band, reference.gradients)
        for result, tensor in zip(results, computed, strict=True):
            result.copy_(tensor)


def choose(
    element: str,
    sizes: Extents,
    masked: Band,
    *,
    deterministic: bool | None,
    fields: Fields,
    spec: KernelSpec | str | None,
    target: DeviceLimits,
) -> Choice:
    """The kernel that gradients get on a GPU.

    Raises ProblemError for a spec that computes something else.
    """
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    wanted = operation(
        AttentionBackwardOperation,
        element,
        sizes,
        sizes.gradient_dims(),
        masked,
        {**fields, "deterministic": deterministic},
    )
    given = dispatch.named(spec)
    return dispatch.choose(wanted, shape(sizes, masked), spec=given, device=target)


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
