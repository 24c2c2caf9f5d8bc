"""What a step's class says of it, with torch's tensors.

Each declares what a step does to values x [.., m, n]; all else loops over steps. A gated step's
`apply` returns half of the columns, and `columns` says so, as its generator's does: what follows it
is bound beside the D that is left, and samples are drawn for it. A step with a second output
(`auxiliary`), such as the scales of blocks that it quantises by, has it as its item's value;
`write` fills it, and an operator takes it beside `out`. Its `apply` returns what D has where D's
rounding is its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from warploom.generator.step import Reads, Step
from warploom.runtime.elements import TORCH
from warploom.runtime.families._product.steps import operand
from warploom.runtime.families._product.steps.operand import Extents
from warploom.runtime.tensors import normal

StepT = TypeVar("StepT", bound=Step)

Item = tuple[Any, ...]
"""A kind, a value (a tensor, a number or a word), and in some a number for the kernel."""

ROUNDOFF = 2.0**-24  # of one fp32 operation of the epilogue


_VALUES = ("apply", "error")
_BESIDE = ("write", "rounded")
_BOTH = "apply and error, or neither and write or rounded"


class TorchStep(Generic[StepT]):
    """A step, as items ask for it; it holds nothing of any.

    step       its class in the generator, whose `arguments` are the kinds of its items
    value      what the value of an item is, of those that have something behind it
    number     what an item has behind its value, a number or, where its step loads z, the tensor
               that is filled; nothing: it ends there
    example    an item, where errors are to show it
    fp32       a tensor must be fp32
    in_place   D may be exactly the tensor
    overwrites it fills the tensor, whatever that had: it must lie apart from all others
    no_gradient  why autograd may not differentiate calls that have it; nothing: it may
    """

    step: ClassVar[type[Step]]
    value: ClassVar[str] = "tensor"
    number: ClassVar[str] = ""
    example: ClassVar[str] = ""
    fp32: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    overwrites: ClassVar[bool] = False
    no_gradient: ClassVar[str] = ""

    def __init_subclass__(cls, **options: Any) -> None:
        """Raise TypeError for a step that would leave values as they are because it forgot to say.

        Those that only write an output, or round, leave `apply` and `error` out together.
        """
        super().__init_subclass__(**options)
        missing = [name for name in _VALUES if not _is_own(cls, name)]
        passive = any(_is_own(cls, name) for name in _BESIDE)
        if hasattr(cls, "step") and missing and not (passive and len(missing) == len(_VALUES)):
            raise TypeError(
                f"{cls.__name__} without {' and '.join(missing)}: a step must have both {_BOTH}"
            )

    def columns(self, n: int) -> int:
        """Columns that are left of the n that it is given."""
        return n

    def reads(self, item: Item) -> Reads:
        """By which dimensions of D the item's tensor lies; else it has one element."""
        return "nothing"

    def bind(self, item: Item, at: Extents, device: int) -> tuple[StepT, torch.Tensor | None]:
        """Check the item where D is `at`, on `device` (-1: CPU).

        Returns its step, and the view of its tensor that all shapes have in common. Raises
        ProblemError naming the item, the rule and the fix.
        """
        raise NotImplementedError

    def tensor(self, item: Item, at: Extents, device: int) -> torch.Tensor:
        """Check the item's tensor and return its natural view, for `bind`."""
        return operand.checked(item, self.reads(item), at, device, fp32=self.fp32)

    def row_pitch(self, value: torch.Tensor, batches: tuple[int, ...]) -> int | None:
        """Elements from row to row of what `bind` returned, where a launch tells them."""
        return operand.row_pitch(value, batches)

    def check_finite(self, item: Item) -> None:
        """Raise ProblemError for a number of the item that is not finite."""

    def apply(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        """The step on x [.., m, n], in x's own precision; one that only writes leaves it out."""
        return x

    def beside(self, x: torch.Tensor, item: Item) -> torch.Tensor:
        """The item's tensor in x's precision, to broadcast with x [.., m, n]."""
        reads, at = self.reads(item), Extents(x.shape[:-2], *x.shape[-2:])
        found = cast("torch.Tensor", operand.natural(reads, item[1].to(x.dtype), at))
        return (
            found.unsqueeze(-1 if reads == "row" else -2) if reads in ("row", "column") else found
        )

    def error(
        self, item: Item, before: torch.Tensor, after: torch.Tensor, error: torch.Tensor
    ) -> torch.Tensor:
        """How far a kernel's values may be from `after`, those before it by `error` from `before`.

        It passes on the error that it is given and adds its own rounding in fp32.
        """
        return error

    def write(self, x: torch.Tensor, item: Item) -> None:
        """Fill the output of an auxiliary step, which is given x [.., m, n] in fp32."""
        raise NotImplementedError

    def rounded(self, x: torch.Tensor, item: Item, dtype: torch.dtype) -> torch.Tensor:
        """The numbers of `dtype` that D has in place of x, where rounding is the step's own."""
        return x

    def sample(self, step: StepT, draws: Draws, at: Extents) -> Item:
        """A random item that asks for `step` where D is `at`."""
        raise NotImplementedError

    def flatten(self, item: Item, into: Flat) -> None:
        """Add the item to what an operator is given."""
        into.words.append(item[0])
        if self.step.auxiliary:
            into.written.append((item[0], item[-1]))
        if not self.step.auxiliary or self.step.loads:
            into.tensors.append(item[1])
        if not self.step.loads:
            into.numbers.extend(map(float, item[2:]))

    def owns(self, word: str) -> bool:
        """True for what `flatten` writes first."""
        return word in self.step.arguments

    def unflatten(self, word: str, given: Given) -> Item:
        """The item again, taking of what is given what `flatten` had added."""
        if self.step.loads:
            return (word, next(given.tensors), given.written.get(word))
        tensor = given.written.get(word) if self.step.auxiliary else next(given.tensors)
        return (word, tensor, next(given.numbers)) if self.number else (word, tensor)


def _is_own(kind: type[TorchStep[Any]], name: str) -> bool:
    return getattr(kind, name) is not getattr(TorchStep, name)


@dataclass(slots=True)
class Flat:
    """Items as operators take them: a word for each, all tensors and numbers in order, and the
    outputs of steps, each with its kind.
    """

    words: list[str] = field(default_factory=list)
    tensors: list[torch.Tensor] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    written: list[tuple[str, torch.Tensor]] = field(default_factory=list)


@dataclass(slots=True)
class Given:
    """The tensors and numbers of a `Flat`, each taken once, and outputs by their kinds."""

    tensors: Iterator[torch.Tensor]
    numbers: Iterator[float]
    written: Mapping[str, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Draws:
    """Random tensors. Floats are normal, int8 uniform; on `meta`, only shapes and strides."""

    device: str
    random: torch.Generator | None

    def values(self, element: str, extents: tuple[int, ...]) -> torch.Tensor:
        """A tensor of an element type."""
        if element == "int8":
            return torch.randint(
                -127, 128, extents, generator=self.random, dtype=torch.int8, device=self.device
            )
        drawn = normal(extents, self.random, self.device)
        return drawn.to(TORCH[element])

    def scales(self, *extents: int) -> torch.Tensor:
        """An fp32 tensor in [0.5, 1.5)."""
        return torch.rand(extents, generator=self.random, device=self.device) + 0.5

    def zeros(self, *extents: int) -> torch.Tensor:
        """An fp32 tensor of zeros."""
        return torch.zeros(extents, device=self.device)
