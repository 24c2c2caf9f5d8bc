"""What every modifier of attention declares of kernels: an option that changes scores or weights.

A class is the option, an instance its value in one operation. Everything has a default that changes
nothing, so that a modifier states only what it does. Its half with torch is the class in the file
of the same name in runtime/families/_attention/modifiers/, its C++ the file of its field's name in
templates/_attention/modifiers/. Registers are of a consumer's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from warploom.generator.families._attention.problem import AttentionProblem
from warploom.generator.knob import knob
from warploom.generator.launches import Workspace
from warploom.generator.models import Model
from warploom.generator.parameters import Field, int64

Strides = Callable[[AttentionProblem], tuple[int, int, int]]
MOST_SCORES_REGISTERS = 56  # of all that changes scores: they are not live at once


class Modifier:
    """An option of attention: its field of operations, and what it does to kernels."""

    name: ClassVar[str]  # of the field
    kind: ClassVar[Any] = bool  # its type
    default: ClassVar[Any] = False  # where the option is off
    doc: ClassVar[str]
    token: ClassVar[str | None] = None  # in names, see `knob`
    later: ClassVar[bool] = True  # it joined after version 0.1.0, see `knob`
    place: ClassVar[int]  # in operations, kernels' parameters and templates: by their order
    decodes: ClassVar[bool] = False  # kernels of decoding have it, too
    eight: ClassVar[bool] = False  # forward kernels of q and k of 8 bits have it, too
    note: ClassVar[str] = ""  # a word for it in the first lines of these
    feature: ClassVar[bool] = False  # tables of untuned schedules tell it apart
    modelled: ClassVar[bool] = False  # the cost model ranks its schedules: sweeps had it
    cost: ClassVar[float] = 0.0  # more of the exponentials' time, where the model's fit begins

    caps: ClassVar[bool] = False  # scores are bent before anything is added to them
    adds: ClassVar[bool] = False  # something is added to scores: see `added`
    placed: ClassVar[bool] = False  # `added` asks for a score's row or column
    leans: ClassVar[bool] = False  # that falls or rises evenly on each side of the diagonal
    hides: ClassVar[bool] = False  # any score may be left out, wherever it is
    trims: ClassVar[bool] = False  # tiles that it hides are left out
    column: ClassVar[bool] = False  # rows have a sum without a key, too: see `extra_score`

    def __init__(self, operation: Any) -> None:  # noqa: ANN401 (of any pass, or of decoding)
        self.operation = operation
        self.value = getattr(operation, self.name)

    @classmethod
    def field(cls, *, later: bool) -> Any:  # noqa: ANN401 (as dataclasses.field)
        """The operation's field."""
        return knob(default=cls.default, doc=cls.doc, name=cls.token, later=later)

    @classmethod
    def of_model(cls, model: Model) -> Mapping[str, Any]:
        """The field's value in what a model runs, by its name; none where it is the default."""
        return {}

    def reasons(self) -> Sequence[str | None]:
        """Why the operation is not legal; None for what is."""
        return ()

    def forward_reasons(self, schedule: Any) -> Sequence[str | None]:  # noqa: ANN401
        """Why a schedule of the forward pass does not fit."""
        return ()

    def backward_reasons(self) -> Sequence[str | None]:
        """Why the operation of the backward pass is not legal."""
        return ()

    def parameters(self) -> Sequence[Field[Any]]:
        """The parameters that scores and their sums depend on."""
        return ()

    def gradient_parameters(self) -> Sequence[Field[Any]]:
        """The parameters of its own gradient."""
        return ()

    def weight_parameters(self) -> Sequence[Field[Any]]:
        """The parameters that weights depend on behind the softmax."""
        return ()

    def tile_parameters(self, *types: str) -> Sequence[Field[Any]]:
        """The parameters of lists of tiles: C++ types of headers and entries, how masks lie."""
        return ()

    def workspaces(self, problem: Any) -> Sequence[Workspace]:  # noqa: ANN401
        """The buffers that both passes need."""
        return ()

    def gradient_workspaces(self, q_tiles: int) -> Sequence[Workspace]:
        """The buffers that its own gradient needs, for these tiles of q of all heads."""
        return ()

    def key_rows(self, problem: Any) -> int:  # noqa: ANN401
        """How many blocks look at what hides keys before the main kernel."""
        return 0

    @property
    def parts(self) -> Sequence[str]:
        """More files of its C++, by what its value is."""
        return ()

    @property
    def staged_bytes(self) -> int:
        """Bytes of each score that come by shared memory."""
        return 0

    def forward_registers(self, schedule: Any) -> int:  # noqa: ANN401
        """What the forward pass takes more."""
        return 0

    def forward_score_registers(self) -> int:
        """The same, of what changes scores: all modifiers together take MOST_SCORES_REGISTERS."""
        return 0

    def backward_registers(self, schedule: Any, q_rows: int, columns: int) -> int:  # noqa: ANN401
        """What the backward pass takes more: a warpgroup has scores of q_rows rows of q, a block
        gradients of these columns.
        """
        return 0

    def backward_score_registers(self) -> int:
        """The same, of what changes scores: together they take the least of all that follow."""
        return 0

    def most_score_registers(self, schedule: Any) -> int:  # noqa: ANN401
        """What is left for all that changes scores."""
        return MOST_SCORES_REGISTERS

    def formula(self, score: str) -> str:
        """What becomes of a score, for the first lines of a kernel."""
        return score

    def added(self, score: str) -> str:
        """C++ of the score of accumulator i with what is added to it, as a member of Score."""
        raise NotImplementedError

    def added_again(self, score: str) -> str:
        """C++ of the same where sums of weights are computed again: see correction.cuh.jinja."""
        raise NotImplementedError

    def extra_score(self, p: str, head: str) -> str:
        """C++ of the score of a query head that counts in the sums of its rows, with no value."""
        raise NotImplementedError


def strides(name: str, of: Strides) -> list[Field[Any]]:
    """The strides of a tensor of every score, of batch, head and row; columns are contiguous."""

    def stride(index: int, axis: str) -> Field[Any]:
        return int64(f"{name}_{axis}", "elements", lambda at: of(at.problem)[index])

    return [stride(index, axis) for index, axis in enumerate(("batch", "head", "row"))]
