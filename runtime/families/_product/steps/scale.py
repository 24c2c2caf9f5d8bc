"""Scales: a number, a tensor of one element, or a vector over rows or columns."""

from __future__ import annotations

from typing import cast

import torch

from warploom.arguments import is_finite, is_number
from warploom.errors import ProblemError
from warploom.generator.epilogue import By, Scale
from warploom.generator.step import Reads
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.families._product.steps.step import (
    ROUNDOFF,
    Draws,
    Flat,
    Given,
    Item,
    TorchStep,
)
from warploom.runtime.tensors import shown

_VECTORS: dict[str, Reads] = {"scale_row": "row", "scale_column": "column"}
_EITHER: dict[str, Reads] = {"scale_a": "row", "scale_b": "column"}  # or of one element
_TENSOR = "_tensor"  # behind the kind of a tensor that might be a number


class TorchScale(TorchStep[Scale]):
    """Times a number or a tensor; which of these a keyword's is, its value says."""

    step = Scale
    fp32 = True

    def reads(self, item: Item) -> Reads:
        kind, value = item[0], item[1]
        whole = not isinstance(value, torch.Tensor) or value.numel() == 1
        return _VECTORS.get(kind, "nothing" if whole else _EITHER.get(kind, "nothing"))

    def bind(self, item: Item, at: Extents, device: int) -> tuple[Scale, torch.Tensor | None]:
        kind, value = item[0], item[1]
        if kind not in _VECTORS and not isinstance(value, torch.Tensor):
            if is_number(value):
                self.check_finite(item)
                return Scale("host"), None
            rule = "must be a tensor, or a number"
            raise ProblemError(f"{kind} {shown(value)}", rule=rule, fix="pass a torch tensor")
        reads = self.reads(item)
        by = "device" if reads == "nothing" else reads
        return Scale(cast("By", by)), self.tensor(item, at, device)

    def check_finite(self, item: Item) -> None:
        kind, value = item[0], item[1]
        if kind not in _VECTORS and not isinstance(value, torch.Tensor) and not is_finite(value):
            raise ProblemError(
                f"{kind} {shown(value)}",
                rule="must be a finite number, or a tensor",
                fix="a tensor's contents are not looked at: infinities may stand there",
            )

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        return x * (self.beside(x, item) if isinstance(item[1], torch.Tensor) else item[1])

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        return self.apply(error, item).abs() + 2 * ROUNDOFF * after.abs()

    def sample(self, step: Scale, draws: Draws, at: Extents) -> Item:
        if step.by == "host":
            return ("scale", 0.75)
        if step.by == "device":
            return ("scale", draws.scales(1))
        return (f"scale_{step.by}", draws.scales(*at.own(step.reads)))

    def flatten(self, item: Item, into: Flat) -> None:
        kind, value = item[0], item[1]
        if not isinstance(value, torch.Tensor):
            into.words.append(kind)
            into.numbers.append(float(value))
        else:
            into.words.append(kind if kind in _VECTORS else kind + _TENSOR)
            into.tensors.append(value)

    def owns(self, word: str) -> bool:
        return word.removesuffix(_TENSOR) in self.step.arguments

    def unflatten(self, word: str, given: Given) -> Item:
        kind = word.removesuffix(_TENSOR)
        is_tensor = kind in _VECTORS or kind != word
        return (kind, next(given.tensors) if is_tensor else next(given.numbers))
