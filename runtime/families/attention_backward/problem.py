"""What a backward pass of attention is given: the call that it differentiates, and gradients.

Nothing here reads a tensor's contents.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from warploom.errors import ProblemError
from warploom.runtime.families._attention.operands import in_place
from warploom.runtime.families._attention.problem import Call, Extents
from warploom.runtime.operands import refuse_repeated


@dataclass(slots=True)
class BackwardCall:
    """The arguments of one backward pass.

    forward      the call whose results are differentiated; its out and spec play no part
    out, lse     its results: as q; fp32 [batch, heads, seq_q], packed [heads, total_q]
    dout, dlse   the gradients of both, of their shapes and types; no dlse stands for zeros
    into         dq, dk and dv, where they are to lie; None: they are made
    """

    forward: Call
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None

    @property
    def operands(self) -> dict[str, torch.Tensor]:
        """The 16-bit tensors that kernels read, by the names that kernels have for them."""
        call = self.forward
        return {"q": call.q, "k": call.k, "v": call.v, "o": self.out, "do": self.dout}

    def named(self) -> list[tuple[str, object]]:
        """The tensors that are read, by the names that messages have for them."""
        mine = [(name, getattr(self, name)) for name in ("lse", "dout", "dlse")]
        return [*self.forward.named()[:3], ("out", self.out), *mine, *self.forward.named()[4:]]

    def signature(self) -> tuple[object, ...]:
        """Everything that decides the plan: all but addresses (their alignment counts) and numbers.

        That of the forward pass does, too, since tensors may be saved and come back elsewhere.
        """
        out, lse, dout, dlse = self.out, self.lse, self.dout, self.dlse
        asked = self.forward.deterministic
        return (
            self.forward.signature(),
            out.shape,
            out.stride(),
            out.dtype,
            out.data_ptr() & 15,
            out.get_device(),
            dout.shape,
            dout.stride(),
            dout.dtype,
            dout.data_ptr() & 15,
            dout.get_device(),
            lse.shape,
            lse.dtype,
            lse.get_device(),
            None if dlse is None else (dlse.shape, dlse.dtype, dlse.get_device()),
            None
            if self.into is None
            else tuple((t.stride(), t.data_ptr() & 15) for t in self.into),
            torch.are_deterministic_algorithms_enabled() if asked is None else asked,
            self.forward.backward_spec,
        )


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
