"""What a backward pass of attention is given: the call that it differentiates, and gradients.

Nothing here reads a tensor's contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from warploom.errors import ProblemError
from warploom.runtime.families._attention.operands import in_place
from warploom.runtime.families._attention.problem import Arguments, Extents
from warploom.runtime.operands import refuse_repeated


@dataclass(slots=True)
class BackwardArguments:
    """The arguments of one backward pass.

    forward      the call whose results are differentiated; its out and spec play no part
    out, lse     its results: as q, of the dimension of v; fp32 [batch, heads, seq_q], packed
                 [heads, total_q]
    dout, dlse   the gradients of both, of their shapes and types; no dlse stands for zeros
    into         dq, dk and dv, where they are to lie; None: they are made
    dsinks       where the gradient of sinks is to lie, as these do; None: it is not wanted
    ds           where that of scores is, as `room_of_ds` makes it, for a bias; None: not wanted
    """

    forward: Arguments
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    dsinks: torch.Tensor | None = None
    ds: torch.Tensor | None = None
    _held: tuple[torch.Tensor | None, ...] = field(default=(), init=False, repr=False)

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The 16-bit tensors that kernels read, by the names that kernels have for them."""
        call = self.forward
        return {"q": call.q, "k": call.k, "v": call.v, "o": self.out, "do": self.dout}

    def named(self) -> list[tuple[str, object]]:
        """The tensors that are read, by the names that messages have for them."""
        given = [pair for pair in self.forward.named() if pair[0] != "out"]
        mine = [("out", self.out), ("lse", self.lse), ("dout", self.dout), ("dlse", self.dlse)]
        return [*given[:3], *mine, *given[3:]]

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.forward.device


def check_results(call: BackwardArguments, sizes: Extents) -> None:
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
    shape = (*q.shape[:-1], forward.v.shape[-1])
    for name, tensor in (("out", call.out), ("dout", call.dout)):
        if tensor.shape != shape or tensor.dtype != q.dtype or tensor.device != q.device:
            raise ProblemError(
                f"{name} {list(tensor.shape)} {tensor.dtype} on {tensor.device}",
                rule=f"must be {list(shape)} of {q.dtype} on the device of q",
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
