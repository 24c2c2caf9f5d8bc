"""Calls of `warploom.attention` whose queries are few: by decode kernels, which split the keys.

The kernels of attention_forward give a block to 64 rows of one head or more, and all keys to one
block: of few rows most of a tile is empty, and most multiprocessors are.
"""

from __future__ import annotations

from dataclasses import fields

from warploom.generator.families.attention_decode import DecodeOperation, DecodeProblem
from warploom.generator.specification import KernelSpec
from warploom.runtime.families._attention.extents import Extents
from warploom.runtime.families._attention.mask import Band
from warploom.runtime.families._attention.modifiers.modifier import Fields
from warploom.runtime.families._attention.operands import Strides
from warploom.runtime.families.attention_decode.extents import fits

FIELDS = {one.name for one in fields(DecodeOperation)}
FEW = 64  # rows of 128 columns of all heads that share keys: more of them fill a tile
# As many keys for each of these rows, and so many at least, are worth splitting: where heads share
# them, and where each has its own, which the other kernels read at nearly the memory's speed
# (docs/notebook.md).
SHARED, OWN = (32, 256), (256, 1024)


def serves(sizes: Extents, band: Band, spec: KernelSpec | None) -> bool:
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


def operation(element: str, sizes: Extents, band: Band, further: Fields) -> DecodeOperation:
    """The operation that computes an attention, with these further fields."""
    return DecodeOperation(
        element=element,
        dim=sizes.dim,
        mask=band.mask,
        **further,
    )


def problem(
    sizes: Extents, band: Band, q: Strides, k: Strides, v: Strides, o: Strides
) -> DecodeProblem:
    """What a launch is laid out for, of tensors with these strides."""
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
        left=band.left,
        right=band.right,
    )
