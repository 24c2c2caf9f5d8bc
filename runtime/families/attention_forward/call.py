"""One call of `warploom.attention`: what its arguments ask for, and what is done with them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, cast

import torch

from warploom.generator.families.attention_decode import DecodeOperation, DecodeProblem
from warploom.generator.families.attention_forward import AttentionOperation, AttentionProblem
from warploom.generator.families.attention_forward.schedule import AttentionSpec
from warploom.generator.launches import DeviceLimits
from warploom.generator.specification import KernelSpec, Operation
from warploom.runtime import arguments as calls
from warploom.runtime import dispatch
from warploom.runtime.call import Arguments as Launched
from warploom.runtime.call import Draft
from warploom.runtime.dispatch import Choice
from warploom.runtime.elements import NAMES
from warploom.runtime.families._attention import block_lists, reference
from warploom.runtime.families._attention.block_lists import Lists
from warploom.runtime.families._attention.mask import Band, band, operation, shape
from warploom.runtime.families._attention.modifiers.modifier import Fields
from warploom.runtime.families._attention.operands import (
    check_apart,
    check_out,
    copied,
    empty_like,
    in_place,
    ordered_strides,
    placed,
    strides,
)
from warploom.runtime.families._attention.problem import (
    Arguments,
    Extents,
    check_numbers,
    check_offsets,
    extents,
)
from warploom.runtime.families.attention_backward.call import choose
from warploom.runtime.families.attention_decode.call import shape as decode_shape
from warploom.runtime.families.attention_decode.extents import fits
from warploom.runtime.tensors import require_memory

Pair = tuple[torch.Tensor, torch.Tensor]
GradientOptions = tuple[bool | None, KernelSpec | str | None]  # deterministic, backward_spec
_DECODED = {one.name for one in fields(DecodeOperation)}


@dataclass(frozen=True, slots=True)
class Details:
    """What a kind of call has in common: its sizes and mask, and where its results go."""

    sizes: Extents
    band: Band
    out_strides: tuple[int, ...]
    lse_shape: tuple[int, ...]
    scale: float  # where a call gives none
    copies: tuple[str, ...]
    gradient_options: GradientOptions
    gradient_fields: Fields  # what gradients depend on, and what else wants one
    tile: tuple[int, int] | None  # of the kernel, where it walks lists of tiles


@dataclass(slots=True)
class AttentionCall(Arguments, calls.Arguments[Details, Pair]):
    """The arguments of a forward pass, whose results are out and lse."""

    outputs = ("o", "lse")

    def draft(self, target: DeviceLimits) -> Draft[Details]:
        """Check the call and choose its kernel for a GPU."""
        sizes = extents(self)
        masked = band(self, sizes)
        check_out(self)
        check_numbers(self)
        copies = self.unreadable()
        blocks = self.block_mask is not None
        copies += tuple(name for one in self.modifiers for name in one.copies(self))
        choice = self._choice(sizes, masked, target, self.modifier_fields)
        wanted = tuple(name for name, tensor in self.further.items() if tensor.requires_grad)
        lists = Lists._fields if blocks else ()
        details = Details(
            sizes,
            masked,
            ordered_strides(self.q, sizes.dim_v or sizes.dim),
            sizes.lse_shape,
            sizes.dim**-0.5,
            copies,
            (self.deterministic, self.backward_spec),
            self.gradient_fields(wanted),
            cast("AttentionSpec", choice.spec).schedule.tile if blocks else None,
        )
        return Draft(
            choice,
            None if sizes.empty else self._problem(details, choice.spec.operation),
            (*self.addressed(), *lists),
            self.numbers,
            copies,
            details,
        )

    def unreadable(self) -> tuple[str, ...]:
        """Those of q, k and v that are copied first, since TMA cannot read them."""
        operands = (("q", self.q), ("k", self.k), ("v", self.v))
        return tuple(name for name, tensor in operands if not in_place(tensor))

    def _choice(
        self, sizes: Extents, masked: Band, target: DeviceLimits, further: Fields
    ) -> Choice:
        """The kernel: of few rows by many keys, one that splits the keys."""
        element, spec = NAMES[self.q.dtype], self.kernel
        if further.keys() <= _DECODED and splits_keys(sizes, masked, spec):
            few = DecodeOperation(element=element, dim=sizes.dim, mask=masked.mask, **further)
            return dispatch.choose(few, decode_shape(sizes), spec=spec, device=target)
        dims = sizes.kernel_dims
        wanted = operation(AttentionOperation, element, sizes, dims, masked, further)
        return dispatch.choose(wanted, shape(sizes, masked), spec=spec, device=target)

    def _problem(self, details: Details, wanted: Operation) -> AttentionProblem | DecodeProblem:
        sizes, copies, out = details.sizes, details.copies, self.out
        if out is None:
            shape = (*self.q.shape[:-1], sizes.dim_v or sizes.dim)
            out = torch.empty_strided(shape, details.out_strides, device="meta")
        given = (("q", self.q), ("k", self.k), ("v", self.v))
        q, k, v = (placed(name, one, copies, packed=sizes.packed) for name, one in given)
        o = strides(out, packed=sizes.packed)
        if isinstance(wanted, DecodeOperation):
            return DecodeProblem(
                sizes.batch,
                sizes.heads,
                sizes.kv_heads,
                sizes.seq_q,
                sizes.seq_k,
                entries=sizes.batch,
                entry_rows=sizes.seq_k,
                strides_q=q,
                strides_o=o,
                strides_k=k,
                strides_v=v,
                left=details.band.left,
                right=details.band.right,
            )
        told: dict[str, Any] = details.band.fields(sizes)
        for one in self.modifiers:
            told |= one.problem(self, copies)
        return AttentionProblem(**told, strides_q=q, strides_k=k, strides_v=v, strides_o=o)

    def refuse(self) -> None:
        """Nothing: results are differentiable."""

    def results(self, details: Details) -> Pair:
        """Out, as it was given or new, and a new lse."""
        q, out = self.q, self.out
        if out is None:
            shape = (*q.shape[:-1], self.v.shape[-1])
            out = q.new_empty_strided(shape, details.out_strides)
        return out, q.new_empty(details.lse_shape, dtype=torch.float32)

    def copied(self, details: Details) -> AttentionCall:
        """The same call, of contiguous copies of what TMA cannot read."""
        return copied(self, details.copies)

    def fake(self) -> Pair:
        """Both, of a call whose tensors fit each other."""
        q = self.q
        shape = (q.shape[1], q.shape[0]) if q.dim() == 3 else q.shape[:-1]
        return empty_like(q, self.v.shape[-1]), q.new_empty(shape, dtype=torch.float32)

    def scalars(self, details: Details) -> tuple[float, ...]:
        """The scale, and what modifiers have."""
        return self.told(details.scale)

    def arguments(self, details: Details, results: Pair) -> Launched:
        """The addresses of all tensors, and of the lists of tiles if any; the numbers."""
        addresses, numbers = calls.Arguments.arguments(self, details, results)
        if details.tile is not None:
            addresses += block_lists.of_rows(self.block_mask, details.tile).addresses
        return addresses, numbers

    def check(self, details: Details, results: Pair) -> None:
        """Raise ProblemError for missing memory, bad numbers, a shared out, offsets on the CPU."""
        require_memory(self.named())
        check_numbers(self)
        check_apart(self, results[0])
        if details.sizes.packed and self.q.is_cpu:
            check_offsets(self)

    def compute(self, details: Details, results: Pair) -> None:
        """Without a key, no row attends to anything; else this is a call on CPU tensors."""
        out, lse = results
        if details.sizes.empty:
            out.zero_()
            lse.fill_(-torch.inf)
            for one in self.modifiers:
                one.fill_empty(lse)
            return
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            computed = self.computed_by_torch(details.band)
        if details.sizes.packed:  # rows past the last sequence are nobody's
            last = int(self.offsets[0][-1])
            out, lse = out[:last], lse[:, :last]
            computed = computed[0][:last], computed[1][:, :last]
        for result, tensor in zip((out, lse), computed, strict=True):
            result.copy_(tensor)

    def computed_by_torch(self, band: Band) -> Pair:
        """Out and lse by the reference."""
        return reference.of_call(self, band, reference.attention)


# ---- Which kernels -------------------------------------------------------------------------------

# Of few query rows most of a tile is empty, and most multiprocessors are: the kernels of
# attention_forward give a block to 64 rows of one head or more, and all keys to one block. Those of
# attention_decode split the keys.
FEW = 64  # rows of 128 columns of all heads that share keys: more of them fill a tile
# As many keys for each of these rows, and so many at least, are worth splitting: where heads share
# them, and where each has its own, which the other kernels read at nearly the memory's speed
# (docs/notebook.md).
SHARED, OWN = (32, 256), (256, 1024)


def splits_keys(sizes: Extents, band: Band, spec: KernelSpec | None) -> bool:
    """Whether a decode kernel computes an attention: where it is the faster, or is asked for."""
    if spec is not None:
        is_wanted = isinstance(spec.operation, DecodeOperation)
    else:
        rows = sizes.sharing * sizes.seq_q * sizes.dim / 128
        each, least = SHARED if sizes.sharing > 1 else OWN
        is_wanted = rows <= FEW and sizes.seq_k >= max(least, each * rows)
    return (
        is_wanted
        and not (sizes.packed or sizes.dim_v)
        and (band.bottom_right or band.mask == "none")
        and fits(sizes.heads, sizes.kv_heads, sizes.seq_q, sizes.dim)
    )


def gradients_choice(
    forward: Choice,
    details: Details,
    target: DeviceLimits,
    asked: GradientOptions | None = None,
) -> Choice:
    """The kernel that a GPU gets for the gradients of a call: as it asked, or as is `asked`."""
    wanted = cast("AttentionOperation | DecodeOperation", forward.spec.operation)
    deterministic, spec = asked or details.gradient_options
    return choose(
        wanted.element,
        details.sizes,
        details.band,
        deterministic=deterministic,
        fields=details.gradient_fields,
        spec=spec,
        target=target,
    )
