"""What the machinery asks of a family on torch tensors: calls of its kernels on drawn operands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic

from typing_extensions import TypeVar  # whose variables have defaults

from warploom.errors import ProblemError
from warploom.generator.launches import DeviceLimits
from warploom.generator.shapes import Shape
from warploom.generator.specification import Operation
from warploom.runtime.baselines import Baseline
from warploom.runtime.call import Call, Draft
from warploom.runtime.dispatch import Choice
from warploom.runtime.plan import Plan, make
from warploom.runtime.trial import Trial

if TYPE_CHECKING:
    from warploom.runtime.explanation import Explanation  # no record of GPU tests hangs on it

OperationT = TypeVar("OperationT", bound=Operation, default=Any)
ShapeT = TypeVar("ShapeT", bound=Shape, default=Any)


class RuntimeFamily(ABC, Generic[OperationT, ShapeT]):
    """The half of a family that runs; the other is `generator.families.base.Family`.

    function   what users call; None where that is another family's
    operands   how many tensors a call of it begins with
    unnamed    `explain` takes so many tensors without a function for its call: one family of each
               number may say so
    """

    function: Callable[..., object] | None = None
    operands: int = 0
    unnamed: bool = False

    @abstractmethod
    def trial(self, operation: OperationT, shape: ShapeT, device: str, seed: int) -> Trial:
        """Random operands of a problem on a torch device, to verify and time kernels on."""

    def baselines(self, operation: OperationT, trial: Any) -> list[Baseline]:  # noqa: ANN401
        """What torch computes in the place of a kernel, on the operands of one of its trials."""
        return []

    @abstractmethod
    def calls(self, operation: OperationT, shape: ShapeT) -> list[Call[Any, Any]]:
        """The calls of an operation on dense tensors of `meta`, to choose their kernels.

        There is one, but where one operation is several calls.
        """

    def choices(self, operation: OperationT, shape: ShapeT, target: DeviceLimits) -> list[Choice]:
        """The kernels that these calls run on a GPU; ProblemError as `dense` raises it."""
        return [one.draft(target).choice for one in self.dense(operation, shape)]

    def dense(self, operation: OperationT, shape: ShapeT) -> list[Call[Any, Any]]:
        """What `calls` returns; ProblemError for tensors whose bytes torch cannot count."""
        try:
            return self.calls(operation, shape)
        except RuntimeError as error:  # of torch, which makes tensors of meta only so large
            if "overflow" not in str(error):
                raise
            raise ProblemError(
                f"shape {shape}",
                rule="must have tensors of fewer than 2^63 bytes each",
                fix="use smaller sizes",
            ) from error

    def call(self, *operands: Any, **keywords: Any) -> Call[Any, Any]:
        """The call that `function` makes of these tensors and keywords."""
        raise NotImplementedError(f"{type(self).__name__} has no function that users call")

    def explanation(
        self, operands: Sequence[Any], keywords: Mapping[str, Any], gpu: str | None
    ) -> Explanation | None:
        """What a call of `function` does that is several calls of kernels; None for others."""
        return None

    def plan(self, call: Call[Any, Any]) -> Plan[Any, Any]:
        """The plan of a call."""
        return make(call, Plan)

    def gradients(self, drafted: Draft[Any], target: DeviceLimits) -> Choice | None:
        """The kernel that autograd runs on a GPU for results of a call; None if there is none."""
        return None

    def rehearse(self) -> None:
        """Call the front door on the CPU, which brings what torch imports on first use."""
        return
