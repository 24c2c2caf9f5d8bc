"""What is computed and how: fields of YAML, of names and of a search."""

from __future__ import annotations

from typing import Literal

from warploom.generator.elements import Element, element
from warploom.generator.knob import ANY, frozen, knob
from warploom.generator.specification import KernelSpec


@frozen
class AxpyOperation:
    """What is computed: d = alpha x + y, element by element."""

    element: Literal["fp16", "bf16", "fp32"] = knob(doc="of x, y and d; sums are fp32")
    relu: bool = knob(default=False, doc="d = max(alpha x + y, 0)")
    family: Literal["axpy"] = knob(default="axpy", doc="which kernels these are")

    @property
    def type(self) -> Element:
        """The row of the element type in its table."""
        return element(self.element)


@frozen
class AxpySchedule:
    """How it is computed."""

    threads: Literal[128, 256, 512] = knob(name="{}x{}", doc="of one block")
    values: Literal[1, 2, 4, 8] = knob(
        name="", auto=True, doc="that a thread loads at once; auto: 16 bytes of them"
    )
    turns: int = knob(
        default=1, name="turns{}", least=1, most=8, follows=ANY, doc="how often a thread does so"
    )
    streaming: bool = knob(
        default=False, detail=True, doc="caches keep nothing of x and y, which nobody reads again"
    )

    @property
    def tile(self) -> tuple[int]:
        """Elements of one block."""
        return (self.threads * self.values * self.turns,)


AxpySpec = KernelSpec[AxpyOperation, AxpySchedule]
