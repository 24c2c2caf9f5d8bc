"""Kernels and calls that the gpu tests share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from rooms import Guarded

from warploom.generator.configurations import smoke
from warploom.generator.families.combine import CombineOperation, CombineSchedule
from warploom.generator.space import expand_file
from warploom.generator.specification import KernelSpec
from warploom.runtime import plan
from warploom.runtime.elements import TORCH
from warploom.runtime.families.combine.call import CombineCall, PermuteCall
from warploom.runtime.families.combine.family import FAMILY as RUNTIME
from warploom.runtime.families.route.api import route
from warploom.runtime.measure import largest_share

INTEGERS = {2: torch.int16, 4: torch.int32}
EXPERTS = 8  # of which pairs choose, and two more that are skipped
_BESIDE = 1024  # elements at both ends of a result that are not its own


def spec(threads: int = 128, values: str = "bf16", **fields: object) -> KernelSpec:
    """A kernel."""
    operation = CombineOperation(values, **fields)  # type: ignore[arg-type]
    return KernelSpec("sm_90a", operation, CombineSchedule(threads))  # type: ignore[arg-type]


BACK: dict[str, Any] = {"direction": "permute", "weights": "fp32", "dot": True}
SMOKE = [
    one for path in smoke() for one in expand_file(path).specs if one.operation.family == "combine"
]
EVERY = list(
    dict.fromkeys(
        [
            *SMOKE,
            *(spec(128, values, weights=one) for values in ("fp16", "fp32") for one in ("fp32",)),
            *(spec(256, values, **BACK) for values in ("bf16", "fp16", "fp32")),
            spec(128),
            spec(128, weights="fp32"),
            spec(256, direction="permute"),
        ]
    )
)


@dataclass
class Made:
    """A call of one kernel, whose results lie in rooms where every byte is 0xff."""

    call: CombineCall | PermuteCall
    guarded: list[Guarded]

    def run(self) -> list[torch.Tensor]:
        """Run it on results that hold NaN, and return them."""
        for one in self.guarded:
            one.room.fill_(-1)
        call: Any = self.call
        plan.run(call)
        return [one.view for one in self.guarded]

    def verify(self) -> list[torch.Tensor]:
        """Run it, and assert that each element is right and that nothing else was written."""
        found = self.run()
        for one, held in zip(found, RUNTIME.expected(self.call), strict=True):
            worst = largest_share(one, *held)
            assert worst <= 1, worst
        assert all(one.untouched_outside() for one in self.guarded)
        return found


def guarded(shape: tuple[int, ...], dtype: torch.dtype, pad: int = 0) -> Guarded:
    """A tensor whose last dimension is followed by `pad` elements that are not its own."""
    *rows, last = shape
    whole = (*rows, last + pad)
    size = 2 * _BESIDE + torch.Size(whole).numel()
    room = torch.full((size,), -1, dtype=INTEGERS[dtype.itemsize], device="cuda")
    inside = torch.zeros(room.shape, dtype=torch.bool, device="cuda")
    inside[_BESIDE:-_BESIDE].view(whole)[..., :last] = True
    return Guarded(room, room[_BESIDE:-_BESIDE].view(dtype).view(whole)[..., :last], inside)


def made(
    kernel: KernelSpec, tokens: int, k: int, columns: int, *, pad: int = 0, seed: int = 0
) -> Made:
    """A call of a kernel on a routing of which some pairs are skipped; rows that are no pair's
    hold NaN, and all rows are `pad` elements longer than their columns.
    """
    operation: CombineOperation = kernel.operation  # type: ignore[assignment]
    random = torch.Generator("cuda").manual_seed(seed + tokens + columns)
    dtype = TORCH[operation.values]

    def drawn(rows: int) -> torch.Tensor:
        whole = torch.randn(rows, columns + pad, generator=random, device="cuda").to(dtype)
        return whole[:, :columns]

    ids = torch.randint(0, EXPERTS + 2, (tokens, k), generator=random, device="cuda")
    offsets, _, inverse = route(ids, EXPERTS)
    weights = None
    if operation.weights != "none":
        lying = torch.randn(k, tokens, generator=random, device="cuda")
        weights = lying.to(TORCH[operation.weights]).t()
    rows = drawn(tokens * k)
    rows[offsets[-1] :] = torch.nan
    if operation.direction == "combine":
        out = guarded((tokens, columns), dtype, pad)
        return Made(CombineCall(rows, inverse, weights, kernel, out.view), [out])
    out = guarded((tokens * k, columns), dtype, pad)
    call = PermuteCall(drawn(tokens), inverse, weights, None, offsets, kernel, None, out.view)
    if not operation.dot or weights is None:
        return Made(call, [out])
    gradient = guarded((tokens, k), weights.dtype)
    return Made(replace(call, combined=rows, gradient_out=gradient.view), [out, gradient])


def short(kernel: KernelSpec) -> str:
    """A kernel's name without what all have."""
    return kernel.name.removeprefix("combine_sm90a_")
