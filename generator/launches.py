"""What a family asks of the runtime: launches and workspaces, as data.

`launches(spec, problem, device)` is a pure function of the family; the runtime resolves the tensor
names to addresses, encodes the tensor maps, packs the block and launches the list in order. It
knows no family.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.generator.gpus import DEFAULT, kind
from warploom.generator.specification import KernelSpec, OperationT, ScheduleT
from warploom.generator.tensor_maps import TensorMap

ProblemT = TypeVar("ProblemT", covariant=True, default=object)


@dataclass(frozen=True, slots=True)
class Address:
    """The device address of the call's tensor called `tensor`."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Argument:
    """The call's host scalar called `name` (a float)."""

    name: str


Value = TensorMap | Address | Argument | int | float | bytes


@dataclass(frozen=True)
class DeviceLimits:
    """What a launch, and the choice of its kernel, depend on of a GPU: at hand, or named.

    gpu     the name of its kind, as the driver gives it; empty where there is none
    nvrtc   major.minor of the compiler that calls build with there; None where kernels come out of
            a store, whoever compiled them
    arch    the architecture that its kernels are for; what is left empty is that of its kind
    """

    multiprocessors: int
    gpu: str = ""
    nvrtc: str | None = None
    arch: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", self.arch or kind(self.gpu).arch)

    @cached_property
    def _at_a_time(self) -> Mapping[int, int]:
        return kind(self.gpu).at_a_time or DEFAULT.at_a_time

    def clusters(self, size: int) -> int:
        """How many clusters of `size` blocks, each filling a multiprocessor, run at a time.

        A cluster lies in one GPC, in which some multiprocessors are left over: as its kind counts
        them, else the default, for as many multiprocessors as there are.
        """
        return max(1, self.multiprocessors * self._at_a_time[size] // self._at_a_time[1])


# What calls on the CPU are planned for: a GPU like the default, that nothing was tuned on.
NO_GPU = DeviceLimits(DEFAULT.multiprocessors)


@dataclass(frozen=True)
class AtLaunch(Generic[OperationT, ScheduleT, ProblemT]):
    """What the parameters of a launch are functions of. A family's own has what it derives."""

    spec: KernelSpec[OperationT, ScheduleT]
    problem: ProblemT
    device: DeviceLimits

    @cached_property
    def operation(self) -> OperationT:
        """What is computed."""
        return self.spec.operation

    @cached_property
    def schedule(self) -> ScheduleT:
        """How it is computed."""
        return self.spec.schedule


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel launch: grid, block and cluster count blocks and threads along x.

    `early` lets it start under the last blocks of the kernel before it on the stream (programmatic
    dependent launch): its code must wait (griddepcontrol.wait) before it touches global memory, but
    for packed weights, which no launch that may start early writes.
    """

    entry: str
    grid: int
    block: int
    cluster: int
    shared_bytes: int
    parameters: Mapping[str, Value]
    early: bool = False


@dataclass(frozen=True, slots=True)
class Workspace:
    """A buffer for the launches of one call; it begins at a multiple of 128 bytes.

    It is allocated on the call's stream and uninitialised. Where it is `kept`, it is full of zeros,
    and the launches leave it so: it serves whatever comes next on the stream, without a memset.
    """

    tensor: str
    bytes: int
    kept: bool = False
