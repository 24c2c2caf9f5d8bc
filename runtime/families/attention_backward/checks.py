"""What results of a forward pass, their gradients and the room for a backward pass's must be."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from warploom.errors import ProblemError
from warploom.runtime.families._attention.extents import Extents
from warploom.runtime.families._attention.operands import in_place
from warploom.runtime.operands import refuse_repeated

if TYPE_CHECKING:
    from warploom.runtime.families.attention_backward.call import BackwardCall


def check_results(call: BackwardCall, sizes: Extents) -> None:
    """Raise ProblemError where results or gradients are not those of the call's forward pass."""
    forward = call.forward
    q = forward.q
    for name, tensor, operand in zip(
        ("dq", "dk", "dv"), call.into or (), (q, forward.k, forward.v), strict=False
    ):
        if tensor.shape != operand.shape or tensor.dtype != q.dtype or not in_place(tensor):
            raise ProblemError(
                f"{name} {list(tensor.shape)} {tensor.dtype} with strides {list(tensor.stride())}",
                rule=f"must be {list(operand.shape)} of {q.dtype}, its last dimension contiguous, "
                "its address and other strides multiples of 16 bytes",
                fix="leave it out to have it made",
            )
        refuse_repeated(name, tensor)
    sinks, dsinks = forward.sinks, call.dsinks
    if dsinks is not None and (
        sinks is None
        or (dsinks.shape, dsinks.dtype, dsinks.device) != (sinks.shape, sinks.dtype, sinks.device)
        or not dsinks.is_contiguous()
    ):
        raise ProblemError(
            f"dsinks {list(dsinks.shape)} {dsinks.dtype}",
            rule="must be contiguous, and like the sinks of the call",
            fix="torch.empty_like(sinks)",
        )
    for name, tensor in (("out", call.out), ("dout", call.dout)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ProblemError(
                f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}",
                rule=f"must be {list(q.shape)} of {q.dtype} on the device of q",
                fix="pass what warploom.attention returned, and its gradient",
            )
    for name, rows in (("lse", call.lse), ("dlse", call.dlse)):
        if rows is not None and (
            rows.shape != sizes.lse_shape or rows.dtype != torch.float32 or rows.device != q.device
        ):
            raise ProblemError(
                f"{name} {list(rows.shape)} {rows.dtype} on {rows.device}",
                rule=f"must be {list(sizes.lse_shape)} of torch.float32 on the device of q",
                fix="pass what warploom.attention returned with return_lse=True, or its gradient",
            )
