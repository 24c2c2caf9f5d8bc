"""What a family says of one call of its function, so that it can be planned, run and told of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from warploom.generator.launches import DeviceLimits
from warploom.runtime.dispatch import Choice
from warploom.runtime.tensors import Named, Written

DetailsT = TypeVar("DetailsT")
ResultsT = TypeVar("ResultsT")

Key = tuple[object, ...]
Arguments = tuple[tuple[int, ...], tuple[float, ...]]  # addresses of tensors, values of scalars


@dataclass(frozen=True, slots=True)
class Draft(Generic[DetailsT]):
    """A call that was checked, and the kernel that it gets on a GPU.

    problem   what its launches are laid out for; None where there is nothing to launch
    tensors   what launches call the tensors whose addresses the call's `arguments` are, in order
    scalars   what they call its numbers
    copies    operands that are copied first, since TMA cannot read them
    details   what the family keeps of it for calls like this one
    """

    choice: Choice
    problem: object | None
    tensors: tuple[str, ...]
    scalars: tuple[str, ...]
    copies: tuple[str, ...]
    details: DetailsT


class Call(Protocol[DetailsT, ResultsT]):
    """The arguments of one call. Nothing of it reads a tensor's contents but `compute`.

    Tensors that are left out have the address 0 or none at all; those that are read and written are
    among the results too. What only the GPU knows, such as lengths, is a tensor: no method waits.
    """

    @property
    def device(self) -> int:
        """The number of the GPU that the call runs on; -1 for the CPU."""
        ...

    def signature(self) -> Key:
        """Everything that decides the plan: all but addresses (their alignment counts) and numbers.

        It begins with the type of the call, since the plans of all families are in one map.
        """
        ...

    def named(self) -> Named:
        """The tensors that are given, by the names that messages have for them."""
        ...

    def written(self) -> Written:
        """The tensors that are given for a kernel to write, by the names that messages have."""
        ...

    def require(self) -> None:
        """Raise ProblemError for arguments that are of no type that they may have."""
        ...

    def draft(self, target: DeviceLimits) -> Draft[DetailsT]:
        """Check the call and choose its kernel for a GPU; nothing is built, and no driver asked.

        Of tensors only what decides a plan is used: they may be on any device, also `meta`.
        """
        ...

    def refuse(self) -> None:
        """Raise ProblemError for what no kernel of this call may run with, however it lies."""

    def results(self, details: DetailsT) -> ResultsT:
        """Where results go: the tensors that were given for that, or new ones."""
        ...

    def copied(self, details: DetailsT) -> Self:
        """The same call, of copies of the operands that TMA cannot read."""
        ...

    def arguments(self, details: DetailsT, results: ResultsT) -> Arguments:
        """The addresses and the numbers that launches are given."""
        ...

    def check(self, details: DetailsT, results: ResultsT) -> None:
        """Raise ProblemError where these addresses or numbers must not be used.

        It is asked the first time that they come up, and always where no kernel runs.
        """
        ...

    def compute(self, details: DetailsT, results: ResultsT) -> None:
        """Write the results without a kernel: on the CPU, and where there is no product."""
        ...
