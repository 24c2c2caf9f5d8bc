"""How the batches of a call's tensors lie in memory, beside those of D.

The batches of D are counted in one row, the last dimension the fastest. A tensor is read in place
where one pitch leads from each of its own batches to the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from warploom.generator.families._product import Batches

Dimension = tuple[int, int, int]  # extent in D, own extent, stride


def broadcast(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """Return the batches of a b; RuntimeError where those of the two do not broadcast."""
    if a.dim() == b.dim() == 2:  # torch's function takes as long as a launch
        return ()
    return tuple(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))  # type: ignore[no-untyped-call]


def batches(tensor: torch.Tensor, shape: Sequence[int], trailing: int = 2) -> Batches | None:
    """Return how the batches of `tensor` lie in those of D, which have `shape`; None for anyhow.

    The tensor's last `trailing` dimensions are a matrix or a vector; those before broadcast. A
    dimension of stride 0 counts as broadcast too, so that an expanded view is read once.
    """
    if tensor.numel() == 0:  # nothing is read, and its strides mean nothing
        return Batches()
    own = _dimensions(tensor, shape, trailing)
    repeat = 1
    while own and own[-1][1] == 1:  # broadcast on the fast side: repeated in a row
        repeat *= own.pop()[0]
    while own and own[0][1] == 1:  # on the slow side: all repeated
        own.pop(0)
    if not own:
        return Batches()
    pitch = own[-1][2]
    expected = pitch
    for extent, count, stride in reversed(own):
        if count != extent or stride != expected:
            return None
        expected = stride * extent
    return Batches(prod(extent for extent, _, _ in own), pitch, repeat)


def _dimensions(tensor: torch.Tensor, shape: Sequence[int], trailing: int) -> list[Dimension]:
    leading = tensor.dim() - trailing
    missing = len(shape) - leading
    own = zip(tensor.shape[:leading], tensor.stride()[:leading], strict=True)
    return [
        (extent, 1 if stride == 0 else count, stride)
        for extent, (count, stride) in zip(shape, [(1, 0)] * missing + list(own), strict=True)
        if extent != 1
    ]


def stacked(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a view of `tensor` whose batches, copied as they come, lie one pitch apart."""
    leading = tensor.dim() - 2
    once = tensor[
        tuple(slice(0, 1) if tensor.stride(i) == 0 else slice(None) for i in range(leading))
    ]
    fits = batches(once.new_empty(once.shape, device="meta"), shape) is not None
    return once if fits else tensor.expand(*shape, *tensor.shape[-2:])


def step_pitch(tensor: torch.Tensor, shape: Sequence[int], trailing: int) -> int | None:
    """Return the elements between the batches of what a step of the epilogue reads, or None.

    It has every batch of D or none of its own (0).
    """
    found = batches(tensor, shape, trailing)
    if found is None or (found.count > 1 and found.count != prod(shape)):
        return None
    return found.pitch if found.count > 1 else 0
