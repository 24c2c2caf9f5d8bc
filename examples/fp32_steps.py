"""Training steps in fp32 by torch and through `warploom.fp32.activate()`: their time, their GEMMs.

`loss_spread --fp32` compares the losses; this says what a step takes, and what ran in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import timing
import warploom
from trainer import Trainer

ROUNDS, LAPS = 7, 5
GEMMS = {
    torch.ops.aten.mm.default: 2,
    torch.ops.aten.addmm.default: 3,
    torch.ops.aten.bmm.default: 2,
}
"""torch's operators that are activated, and how many tensors each reads."""


def step_seconds(make: Callable[[], Trainer], device: torch.device) -> dict[str, list[float]]:
    """Seconds of a step by torch and through `activate()`, in rounds in which they take turns."""
    trainers = {"torch": make(), "warploom": make()}

    def by_torch() -> None:
        for _ in range(LAPS):
            trainers["torch"].advance()

    def activated() -> None:
        with warploom.fp32.activate():
            for _ in range(LAPS):
                trainers["warploom"].advance()

    calls = {"torch": by_torch, "warploom": activated}
    seconds = timing.interleave(calls, device, rounds=ROUNDS)
    return {name: [one / LAPS for one in taken] for name, taken in seconds.items()}


def gemms(trainer: Trainer) -> list[dict[str, Any]]:
    """The GEMMs of one step through `activate()`, each kind once: what ran it, how often, and why.

    The kernel is the one that `warploom.explain` names for operands of this layout.
    """
    with warploom.fp32.activate() as activation, _Gemms(activation.ran) as seen:
        trainer.advance()
    found = []
    for (operator, by, *operands), calls in seen.counts.items():
        *bias, a, b = (torch.empty_strided(*one, device="meta") for one in operands)
        (m, k), n = a.shape[-2:], b.shape[-1]
        kind = {"operator": operator, "m": m, "n": n, "k": k, "calls": calls, "by": by}
        if by != "torch":
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "NVIDIA H200"
            told = warploom.explain(
                warploom.gemm, a, b, bias=bias[0] if bias else None, precision=by, gpu=gpu
            )
            kind |= {"kernel": told.kernel, "because": told.reason}
        found.append(kind)
    return found


class _Gemms(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts torch's GEMMs by operator, by what ran them and by how their operands are stored."""

    def __init__(self, ran: Counter[tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self._ran = ran

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Any = None,  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        before = self._ran.copy()
        result = func(*args, **(kwargs or {}))
        if func in GEMMS:
            ((operator, by),) = self._ran - before
            stored = [(tuple(one.shape), one.stride()) for one in args[: GEMMS[func]]]
            self.counts[operator, by, *stored] += 1
        return result
