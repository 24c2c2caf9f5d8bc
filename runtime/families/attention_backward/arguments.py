"""What a backward pass of attention is given: the call that it differentiates, and gradients.

Nothing here reads a tensor's contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from warploom.errors import ProblemError
from warploom.runtime.families._attention.mask import band
from warploom.runtime.families._attention.modifiers import GRADED, Modifier
from warploom.runtime.families._attention.modifiers.score_tensors import row_pitch
from warploom.runtime.families._attention.operands import in_place
from warploom.runtime.families._attention.problem import Arguments, Extents, extents
from warploom.runtime.operands import refuse_repeated


@dataclass(slots=True)
class BackwardArguments:
    """The arguments of one backward pass.

    forward      the call whose results are differentiated; its out and spec play no part
    out, lse     its results: as q, of the dimension of v; fp32 [batch, heads, seq_q], packed
                 [heads, total_q]
    dout, dlse   the gradients of both, of their shapes and types; no dlse stands for zeros
    into         dq, dk and dv, where they are to lie; None: they are made
    dcolumn      where the gradient of a modifier's column is to lie, as its argument does; None:
                 it is not wanted
    ds           where that of scores is, as `room_of_ds` makes it, for what is added to these;
                 None: not wanted
    """

    forward: Arguments
    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dlse: torch.Tensor | None = None
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    dcolumn: torch.Tensor | None = None
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

    def prepare(self, wanted: tuple[str, ...]) -> None:
        """Make room for the gradients of the further tensors that are named."""
        for kind in GRADED:
            if kind.argument not in wanted:
                continue
            if kind.has_column:
                self.dcolumn = torch.empty_like(getattr(self.forward, kind.argument))
            else:
                self.ds = room_of_ds(self.forward)

    def written_by(self, kind: type[Modifier]) -> torch.Tensor | None:
        """Where kernels write what the gradient of its argument follows from, if they do."""
        return self.dcolumn if kind.has_column else self.ds

    def further_gradients(self) -> tuple[torch.Tensor, ...]:
        """The gradients of the further tensors that are wanted, once the pass has run."""
        found = []
        for kind in GRADED:
            written = self.written_by(kind)
            if written is not None and (modifier := kind.of(self.forward)) is not None:
                found.append(modifier.gradient_of(written))
        return tuple(found)

    @property
    def device(self) -> int:
        """Where the operands are; -1 is the CPU."""
        return self.forward.device


def room_of_ds(forward: Arguments) -> torch.Tensor:
    """Where the gradients of scores go: [batch, heads, seq_q, seq_k] in the type of q.

    Packed, [sequences, heads, max_seqlen_q, max_seqlen_k]. Zeros where a kernel may not write.
    """
    q, sizes = forward.q, extents(forward)
    rows, columns = sizes.seq_q, sizes.seq_k
    if sizes.packed:
        rows, columns = forward.max_seqlen_q or 0, forward.max_seqlen_k or 0
    pitch = row_pitch(q, columns)
    writes_all = not sizes.packed and band(forward, sizes).mask == "none"
    room = q.new_empty if writes_all else q.new_zeros
    return room((sizes.batch, sizes.heads, rows, pitch))[..., :columns]


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
