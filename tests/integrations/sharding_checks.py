"""How calls on torch's distributed tensors are held against the same call in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from warploom.errors import ProblemError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

PROCESSES = 2
CASES: dict[str, Callable[[], None]] = {}
LOOSE = {"rtol": 2**-6, "atol": 2**-5}  # terms of sums in bf16; a lost step of k is 1 or more


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def values(*shape: int, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def shared(tensor: torch.Tensor, place: int | None) -> DTensor:
    """A tensor that lies as `place` says over all processes: a dimension, or None for whole."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (PROCESSES,))
    where = Replicate() if place is None else Shard(place)
    return distribute_tensor(tensor.detach(), mesh, [where]).requires_grad_(tensor.requires_grad)


def place_of(tensor: DTensor) -> str:
    """Whole, Partial, or the dimension that is shared out."""
    (place,) = tensor.placements
    return "whole" if place.is_replicate() else "terms" if place.is_partial() else str(place.dim)


def moved(call: Callable[[], Any]) -> tuple[int, Any]:
    """How many messages a call sends, and what it returns."""
    from torch.distributed.tensor.debug import CommDebugMode

    with CommDebugMode() as counted:
        result = call()
    return counted.get_total_counts(), result


def check(
    function: Callable[..., torch.Tensor],
    tensors: Sequence[torch.Tensor],
    places: Sequence[int | None],
    expected: str,
    messages: tuple[int, int] = (0, 0),
) -> None:
    """Hold results, gradients and messages, forward and backward, against what is expected."""
    want = function(*tensors)
    gradient = torch.randn(want.shape).to(want.dtype)
    given = [shared(one, place) for one, place in zip(tensors, places, strict=True)]
    sent, found = moved(lambda: function(*given))
    assert (place_of(found), sent) == (expected, messages[0])
    assert found.shape == want.shape
    assert found.stride() == want.stride()
    torch.testing.assert_close(found.full_tensor(), want, **LOOSE)
    if not want.requires_grad:
        return
    arriving = shared(gradient, int(expected) if expected.isdigit() else None)
    sent, _ = moved(lambda: found.backward(arriving))
    assert sent == messages[1]
    want.backward(gradient)
    for one, other in zip(given, tensors, strict=True):
        if other.requires_grad:
            torch.testing.assert_close(one.grad.full_tensor(), other.grad, **LOOSE)
            assert other.grad.abs().max() > 0
            other.grad = None


def with_error(call: Callable[[], object], told: str) -> None:
    try:
        call()
    except ProblemError as error:
        assert told in str(error)
        return
    raise AssertionError("nothing was refused")
