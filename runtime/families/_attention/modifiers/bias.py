"""A bias: a number for each score, or one that several share, that is added to it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch

from warploom.errors import ProblemError
from warploom.generator.families._attention.operation import Operation
from warploom.runtime.elements import TORCH
from warploom.runtime.families._attention.modifiers import score_tensors
from warploom.runtime.families._attention.modifiers.modifier import Fields, Modifier, Rows, Scores
from warploom.runtime.tensors import normal

if TYPE_CHECKING:
    from warploom.runtime.families._attention.problem import Arguments

BIASES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}


@dataclass(frozen=True, slots=True)
class Bias(Modifier):
    """Add a number to each score: [batch, heads, seq_q, seq_k], or broadcast to it.

    A score with a bias is an fp32 number in float64, too: a bias of -1e9 over a whole row hides the
    differences of its scores, so that their weights are alike, as torch's math path has them.
    """

    numbers: torch.Tensor
    argument: ClassVar[str] = "bias"
    rounds: ClassVar[bool] = True
    gradient: ClassVar[str] = "ds"

    @classmethod
    def of(cls, call: Arguments) -> Self | None:
        return None if call.bias is None else cls(call.bias)

    def check(self, call: Arguments, scores: Scores) -> None:
        bias = self.numbers
        score_tensors.check_broadcast("bias", bias, scores)
        if bias.dtype not in BIASES:
            raise ProblemError(
                f"bias of {bias.dtype}",
                rule="must be of torch.float16, torch.bfloat16 or torch.float32",
                fix="pass a mask of truth values as mask=, or convert with .float()",
            )
        caps = [one.argument for one in call.modifiers if one.cap_error]
        if bias.requires_grad and caps:
            raise ProblemError(
                f"bias that requires grad with a {caps[0]}",
                rule=f"a bias has a gradient without {caps[0]} only",
                fix=f"leave out {caps[0]}, or detach the bias",
            )

    def fields(self, call: Arguments) -> Fields:
        return {"bias": BIASES[self.numbers.dtype]}

    def gradient_fields(self, fields: Fields, wanted: tuple[str, ...]) -> Fields:
        return {**fields, "bias_gradient": True} if "bias" in wanted else fields

    def copies(self, call: Arguments) -> tuple[str, ...]:
        columns = score_tensors.columns_of(call)
        return () if score_tensors.readable(self.numbers, columns) else ("bias",)

    def problem(self, call: Arguments, copies: tuple[str, ...]) -> Fields:
        columns, copied = score_tensors.columns_of(call), "bias" in copies
        return {"strides_bias": score_tensors.strides(self.numbers, columns, copied=copied)}

    @classmethod
    def sample(
        cls, operation: Operation, scores: Scores, device: str, random: torch.Generator | None
    ) -> dict[str, Any]:
        if operation.bias == "none":
            return {}
        bias = normal((1, *scores[1:]), random, device)
        return {"bias": score_tensors.room_for(scores[3], bias.to(TORCH[operation.bias]))}

    def of_sequence(self, index: int, rows: int, columns: int) -> Self:
        own = score_tensors.batch_of(self.numbers, index)
        return replace(self, numbers=own[:, :, :rows, :columns])

    def term(
        self, q: torch.Tensor, k: torch.Tensor, chunk: Rows, dtype: torch.dtype
    ) -> torch.Tensor:
        return score_tensors.of_chunk(self.numbers, q, k, chunk).to(dtype)

    @classmethod
    def is_differentiated(cls, operation: Operation) -> bool:
        return bool(operation.bias_gradient)

    def gradient_of(self, written: torch.Tensor) -> torch.Tensor:
        """The sum, in fp32 and in an order that does not change, over what is broadcast."""
        bias, total = self.numbers, written
        whole = score_tensors.four(bias)
        broadcast = [i for i, extent in enumerate(whole.shape) if extent != written.shape[i]]
        if broadcast:
            # Torch sums 16 bits in fp32, and rounds once; told of a type it writes all of that.
            wide = None if bias.dtype == written.dtype else torch.float32
            total = written.sum(broadcast, keepdim=True, dtype=wide)
        return total.to(bias.dtype).reshape(bias.shape)
