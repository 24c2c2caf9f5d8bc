"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.activation_backward import (
    ActivationBackwardOperation,
    ActivationBackwardSchedule,
)
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.activation_backward.call import ActivationBackwardCall
from warploom.runtime.families.activation_backward.family import FAMILY as RUNTIME

BF16 = ("bf16", "bf16", "bf16")
TYPES = (BF16, ("fp16", "fp16", "fp16"), ("fp32", "fp32", "fp32"), ("bf16", "fp32", "fp16"))
NARROW, WIDE = ActivationBackwardSchedule(256, 64), ActivationBackwardSchedule(256, 256)


def spec(
    function: str = "gelu_tanh",
    schedule: ActivationBackwardSchedule = WIDE,
    types: tuple[str, ...] = BF16,
    *,
    sums: bool = True,
) -> KernelSpec:
    """A kernel."""
    operation = ActivationBackwardOperation(*types, function, sums=sums)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, schedule)


SMOKE = [
    one
    for path in smoke()
    for one in expand_file(path).specs
    if one.operation.family == "activation_backward"
]
EVERY = [
    *SMOKE,
    *(
        spec(function, schedule, types)
        for function in ("relu", "gelu", "gelu_tanh", "silu")
        for types in TYPES
        for schedule in (NARROW, WIDE)
    ),
    *(
        spec("none", schedule, (kind, kind, kind))
        for kind in ("bf16", "fp16", "fp32")
        for schedule in (NARROW, WIDE)
    ),
    spec(sums=False),
    spec("relu", sums=False),
]


@dataclass
class Made:
    """A call of one kernel, whose results lie in rooms where every byte is 0xff."""

    call: ActivationBackwardCall
    dz: Guarded | None
    sums: Guarded | None

    def run(self) -> list[torch.Tensor]:
        """Run it on results that hold NaN, and return those that there are."""
        for one in self.guarded():
            one.room.fill_(-1)
        plan.run(self.call)
        return [one.view for one in self.guarded()]

    def guarded(self) -> list[Guarded]:
        """The results that there are."""
        return [one for one in (self.dz, self.sums) if one is not None]

    def verify(self) -> list[torch.Tensor]:
        """Run it, and assert that each element is right and that nothing else was written."""
        found = self.run()
        pairs = zip((self.dz, self.sums), RUNTIME.expected(self.call), strict=True)
        for name, (one, (exact, bound)) in zip(("dz", "sums"), pairs, strict=True):
            if one is None:
                continue
            off = (one.view.double() - exact).abs()
            wrong = ~(off <= bound)  # NaN too
            assert not wrong.any(), (name, int(wrong.sum()), wrong.nonzero()[:4].tolist())
            assert one.untouched_outside(), name
        return found


def guarded(m: int, n: int, dtype: torch.dtype, pitch: int, shift: int) -> Guarded:
    """[m, n] with rows `pitch` apart that begin `shift` elements after a multiple of 16 bytes."""
    integer = torch.int16 if dtype.itemsize == 2 else torch.int32
    room = torch.full((64 + m * pitch + 64,), -1, dtype=integer, device="cuda")
    at = torch.arange(m, device="cuda")[:, None] * pitch + torch.arange(n, device="cuda")
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    inside[at + 64 + shift] = True
    view = room.view(dtype)[64 + shift :].as_strided((m, n), (pitch, 1))
    return Guarded(room, view, inside)


def made(
    kernel: KernelSpec, m: int, n: int, *, pad: int = 0, shift: int = 0, seed: int = 0
) -> Made:
    """A call of a kernel; rows of all matrices are `pad` elements longer than n."""
    operation: ActivationBackwardOperation = kernel.operation  # type: ignore[assignment]
    random = torch.Generator("cuda").manual_seed(seed + 7 * m + n)
    pitch = n + pad

    def matrix(name: str) -> torch.Tensor:
        drawn = 2 * torch.randn(m * pitch + shift, generator=random, device="cuda")
        return drawn.to(TORCH[name])[shift:].view(m, pitch)[:, :n]

    sums = guarded(1, n, torch.float32, n, 0) if operation.sums else None
    call = ActivationBackwardCall(matrix(operation.dy), sums=operation.sums, spec=kernel)
    call.sums_out = sums.view[0] if sums else None
    dz = None
    if operation.function != "none":
        call.z, call.activation = matrix(operation.z), operation.function
        dz = guarded(m, n, TORCH[operation.dz], pitch, shift)
        call.out = dz.view
    return Made(call, dz, Guarded(sums.room, sums.view[0], sums.inside) if sums else None)


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("activation_backward_sm90a_")
