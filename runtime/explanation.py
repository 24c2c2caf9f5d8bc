"""What `warploom.explain` tells of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warploom.runtime.attention import AttentionPlan
from warploom.runtime.counters import counters
from warploom.runtime.decision import Alternative, Choice
from warploom.runtime.gemm import GemmPlan


@dataclass(frozen=True)
class Explanation:
    """What a call would do, and why.

    `seconds` were recorded or predicted, as the reason says (None: neither); `runners_up` are the
    kernels that came next. `gradients` is the same of an attention's backward pass.
    """

    kernel: str
    reason: str
    grid: int
    stored: bool
    copies: tuple[str, ...]
    counters: dict[str, int]
    seconds: float | None = None
    runners_up: tuple[Alternative, ...] = ()
    gradients: Choice | None = None

    @classmethod
    def of(cls, plan: GemmPlan | AttentionPlan) -> Explanation:
        """What a plan does."""
        return cls(
            kernel=plan.choice.spec.name,
            reason=plan.choice.reason,
            grid=plan.launch.launches[0].grid if plan.launch else 0,
            stored=plan.launch is not None,
            copies=plan.copies,
            counters=counters.as_dict(),
            seconds=plan.choice.seconds,
            runners_up=plan.choice.runners_up,
            gradients=plan.backward_choice(*plan.gradient_options)
            if isinstance(plan, AttentionPlan)
            else None,
        )

    @property
    def backward(self) -> str | None:
        """The kernel of an attention's gradients; None of a gemm."""
        return self.gradients.spec.name if self.gradients else None

    def __str__(self) -> str:
        """One fact a line."""
        copies = ", ".join(self.copies) or "none"
        stored = "compiled" if self.stored else "not compiled yet"
        lines = [
            f"kernel   {self.kernel}",
            f"because  {self.reason}",
            f"store    {stored}",
            f"grid     {self.grid} blocks",
            f"copies   {copies}",
        ]
        lines += _times(self.seconds, self.runners_up)
        if self.gradients:
            lines += [f"backward {self.backward}", f"because  {self.gradients.reason}"]
            lines += _times(self.gradients.seconds, self.gradients.runners_up)
        return "\n".join(lines)


def _times(seconds: float | None, runners_up: Sequence[Alternative]) -> list[str]:
    """The lines about a choice's time, and about what came next."""
    lines = [] if seconds is None else [f"time     {seconds * 1e6:.1f} us"]
    return lines + [
        f"next     {one.spec.name}, {one.source} {one.seconds * 1e6:.1f} us" for one in runners_up
    ]
