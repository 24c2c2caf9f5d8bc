"""What `warploom.explain` tells: of a plan, of what a call would do on a GPU that is named, and of
the calls that a function makes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from warploom import hooks
from warploom.generator.families import family
from warploom.generator.launches import DeviceLimits
from warploom.generator.render import render
from warploom.generator.store import source_digest
from warploom.runtime.arguments import Arguments
from warploom.runtime.call import Draft
from warploom.runtime.counters import counters
from warploom.runtime.dispatch import Alternative, Choice
from warploom.runtime.function import declared
from warploom.runtime.kernel import store
from warploom.runtime.plan import Plan


@dataclass(frozen=True)
class Explanation:
    """What a call would do, and why.

    `seconds` were recorded or predicted, as the reason says (None: neither); `runners_up` are the
    kernels that came next. `gradients` is the same of the backward pass, if there is one. `gpu` is
    the GPU that was named; of it, `stored` says whether this machine's kernel cache has the kernel.
    `operations` has the explanations of a function's operations, by their names, where it runs
    several; then `kernel` is empty, and `seconds` their sum.
    `reference` is True of a call on CPU tensors, which runs no kernel; `torch` of one that torch's
    own kernels run, and then `kernel` is empty. `tuning` says how `warploom.autotune` stands.
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
    gpu: str = ""
    reference: bool = False
    torch: bool = False
    tuning: str = ""
    operations: tuple[tuple[str, Explanation], ...] = ()

    @classmethod
    def of(cls, plan: Plan[Any, Any]) -> Explanation:
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
            gradients=plan.gradients(),
            reference=plan.device == -1,
            tuning=hooks.observer.told(plan.choice) if hooks.observer else "",
        )

    @classmethod
    def on(
        cls, target: DeviceLimits, drafted: Draft[Any], gradients: Choice | None = None
    ) -> Explanation:
        """What a call does on a GPU that may not be here; without a problem it launches nothing."""
        choice, problem = drafted.choice, drafted.problem
        spec = choice.spec
        launches = family(spec.operation.family).launches(spec, problem, target) if problem else ()
        return cls(
            kernel=spec.name,
            reason=choice.reason,
            grid=launches[0].grid if launches else 0,
            stored=store().find(source_digest(render(spec)), spec.arch) is not None,
            copies=drafted.copies,
            counters=counters.as_dict(),
            seconds=choice.seconds,
            runners_up=choice.runners_up,
            gradients=gradients,
            gpu=target.gpu,
        )

    @classmethod
    def by_torch(cls, reason: str, gpu: str = "") -> Explanation:
        """What a call does that is left to torch, and why: `reason` reads on from "because"."""
        nothing: dict[str, Any] = {"kernel": "", "grid": 0, "stored": False, "copies": ()}
        return cls(**nothing, reason=reason, counters=counters.as_dict(), gpu=gpu, torch=True)

    @property
    def backward(self) -> str | None:
        """The kernel of the gradients; None where there are none."""
        return self.gradients.spec.name if self.gradients else None

    def __str__(self) -> str:
        """One fact a line."""
        if self.operations:
            return "\n\n".join(f"calls    {name}\n{one}" for name, one in self.operations)
        if self.torch:
            told = ["runs     torch's own kernel", f"because  {self.reason}"]
            return "\n".join([f"GPU      {self.gpu}"] * bool(self.gpu) + told)
        copies = ", ".join(self.copies) or "none"
        stored = "compiled" if self.stored else "not compiled yet"
        lines = [f"GPU      {self.gpu}"] if self.gpu else []
        if self.reference:
            lines += ["runs     the reference, on the CPU; an untuned GPU would (gpu= names one):"]
        lines += [f"kernel   {self.kernel}", *_because(self.reason)]
        if not self.reference:
            lines += [f"store    {stored}", f"grid     {self.grid} blocks"]
        lines += [f"copies   {copies}", *_times(self.seconds, self.runners_up)]
        if self.tuning:
            lines += [f"autotune {self.tuning}"]
        if self.gradients:
            lines += [f"backward {self.backward}", *_because(self.gradients.reason)]
            lines += _times(self.gradients.seconds, self.gradients.runners_up)
        return "\n".join(lines)


def of_several(told: Sequence[tuple[str, Explanation]]) -> Explanation:
    """What a function does that runs several operations, one after another."""
    each = [one for _, one in told]
    times = [one.seconds for one in each if one.seconds is not None]
    return Explanation(
        kernel="",
        reason="",
        grid=0,
        stored=all(one.stored for one in each),
        copies=tuple(f"{name}'s {copy}" for name, one in told for copy in one.copies),
        counters=counters.as_dict(),
        seconds=sum(times) if len(times) == len(each) else None,
        gpu=each[0].gpu,
        reference=each[0].reference,
        operations=tuple(told),
    )


@runtime_checkable
class Explainable(Protocol):
    """An object that says itself what a call of it does, such as a module."""

    def explanation(self, *operands: Any, gpu: str | None = None, **keywords: Any) -> Explanation:
        """What a call with these operands and keywords does here, or on the GPU that is named."""
        ...


def _because(reason: str) -> list[str]:
    """The lines about why a kernel was chosen."""
    lines = [f"because  {reason}"]
    if reason.startswith("default table: least waves"):  # its words are for those who know them
        lines += ["         waves: tiles of the busiest SM; cost: measured time of one"]
    return lines


def _times(seconds: float | None, runners_up: Sequence[Alternative]) -> list[str]:
    """The lines about a choice's time, and about what came next."""
    lines = [] if seconds is None else [f"time     {seconds * 1e6:.1f} us"]
    return lines + [
        f"next     {one.spec.name}, {one.source} {one.seconds * 1e6:.1f} us" for one in runners_up
    ]


# ---- The calls that a function makes -------------------------------------------------------------


def calls_of(
    function: Callable[..., object], operands: Sequence[Any], keywords: Mapping[str, Any]
) -> list[tuple[str, Arguments[Any, Any]]]:
    """The calls of declared functions that a function makes, by name, on tensors of `meta`.

    It runs on tensors without data: nothing is launched.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # which no call needs

    with FakeTensorMode() as mode, _Seeing() as seeing:
        given, named = tree_map_only(torch.Tensor, mode.from_tensor, ([*operands], {**keywords}))
        function(*given, **named)
    return [
        (name, type(call)(**tree_map_only(torch.Tensor, _on_meta, _fields(call))))
        for name, call in seeing.calls
    ]


class _Seeing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees the operators of declared functions, and so their calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[tuple[str, Arguments[Any, Any]]] = []

    def __torch_dispatch__(
        self,
        operator: Any,  # noqa: ANN401 (as torch has it)
        types: Sequence[type],
        given: Sequence[Any] = (),
        written: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        library, _, name = operator.name().partition("::")
        name = name.removesuffix("_functional").removesuffix("_out")
        if library == "warploom" and name in declared:
            self.calls.append((name, declared[name].crossed(*given, **(written or {}))))
        return operator(*given, **(written or {}))


def _fields(call: Arguments[Any, Any]) -> dict[str, Any]:
    return {one.name: getattr(call, one.name) for one in fields(call)}  # type: ignore[arg-type]


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    lies = tensor.shape, tensor.stride()
    return torch.empty_strided(*lies, dtype=tensor.dtype, device="meta")
